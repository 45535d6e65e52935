"Adapters to frameworks. None of them imports its framework."
from fusedloss.integrations import transformers as transformers
from fusedloss.integrations import trl as trl
