"Eighteen kernels to fill in: `check` runs one on Triton's interpreter and says what is wrong with it, `picture` draws the question."

from workbook.puzzles.report import check as check
from workbook.puzzles.report import picture as picture
