"Eighteen kernels to fill in: `check` runs one on Triton's interpreter and says what is wrong with it, `picture` draws the question."

from fusedloss.puzzles.report import check as check
from fusedloss.puzzles.report import picture as picture
