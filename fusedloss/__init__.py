"Memory- and time-efficient losses over many classes, in PyTorch, Triton and CUDA."
__version__ = "0.2.0"

import sys
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from inspect import cleandoc
from types import ModuleType

import torch

from fusedloss.core.versions import check_torch

check_torch()  # before names that an older one lacks

from fusedloss._arguments import SECTIONS
from fusedloss._ops import ops
from fusedloss.core.operators import is_operator

_NAMES = {  # the public names of each module, which is imported when one of them is first used
    "baseline": ("BaselineSoftmax", "BaselineSoftmaxNllLoss", "baseline_linear_cross_entropy"),
    "chunks": ("chunked_linear_cross_entropy",),
    "clusters": ("cross_entropy",),
    "contrast": ("contrastive_loss", "sigmoid_contrastive_loss"),
    "core.options": ("CrossEntropyStats",),
    "core.popularity": ("PopularitySampler",),
    "core.sampling": ("NegativeSampler",),
    "ctc": ("CTCLoss", "ctc_loss", "ctc_loss_with_logits", "ctc_posteriors", "forced_align"),
    "decode": ("ctc_decode",),
    "divergence": ("linear_divergence",),
    "iota": ("iota_cross_entropy", "onehot_select", "rewrite_gather"),
    "linear_ctc": ("linear_ctc_loss",),
    "lattices": ("TransducerLoss", "transducer_align", "transducer_decode", "transducer_loss"),
    "logprobs": ("LogProbs", "linear_log_probs", "log_probs"),
    "losses": ("LinearCrossEntropyLoss", "linear_cross_entropy"),
    "margins": ("margin_cross_entropy",),
    "filter": ("recompute_linear_cross_entropy",),
    "partial_fc": ("PartialFC",),
    "plans": ("plan",),
    "row_sparse": ("RowSparse", "clip_grad_norm_", "clip_grad_value_"),
    "samples": ("linear_sample",),
    "scans": ("logz", "sample", "viterbi"),
    "sharded": ("sharded_linear_cross_entropy", "sharded_linear_divergence", "sharded_linear_log_probs", "sharded_linear_sample", "sharded_linear_topk"),
    "sharded_heads": ("ShardedPartialFC", "ShardedRowSparse", "ignore_in_ddp", "load_insightface", "save_insightface"),
    "tiles": ("MemoryEfficientVocabOutput", "tiled_linear_cross_entropy"),
    "topk": ("TopK", "linear_topk"),
    "transducer": ("linear_transducer_loss",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
_SPACES = ("integrations", "margins", "semirings")  # public modules
__all__ = sorted([*_HOMES, "margins", "semirings"])  # `import *` leaves `integrations` out


def __getattr__(name: str):
    "A public name, or a module of the package: imported here, and found without this function from then on."
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        _describe()
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    from fusedloss.core.checks import did_you_mean
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, [*_HOMES, *_SPACES])}", name=name)


def __dir__() -> list[str]:
    "What is here, and what is imported when it is used."
    return sorted({*globals(), *_HOMES, *_SPACES})


def _describe():
    "Add the sections on arguments and results to the docstrings of what has been imported by now."
    for key, text in [*SECTIONS.items()]:
        module, path = key.split()
        *owners, name = path.split(".")
        try:
            found = vars(reduce(getattr, owners, sys.modules[module]))[name]
        except (KeyError, AttributeError):  # not imported, or not to its end
            continue
        if SECTIONS.pop(key, None) and sys.flags.optimize < 2:
            found.__doc__ = f"{cleandoc(found.__doc__)}\n\n{text}"


class _Package(ModuleType):
    "The package, told of each of its modules when Python has imported it, whoever asked for it."
    def __setattr__(self, name: str, value):
        super().__setattr__(name, value)
        if isinstance(value, ModuleType):
            _describe()


sys.modules[__name__].__class__ = _Package


def _is_importing() -> bool:
    "Whether a module of the package is being imported, which may define the operator that is looked for."
    return any(m.__spec__._initializing for name, m in [*sys.modules.items()] if name.startswith(__package__) and m.__spec__)


class _Operators(type(torch.ops.aten)):
    "`torch.ops.fusedloss`: an exported program finds the operators in it though no loss has been called."
    __module__ = type(torch.ops.aten).__module__  # which the names of operators in a file begin with

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or is_operator(name) or _is_importing():
                raise
        for module in _NAMES:
            import_module(f"{__package__}.{module}")
        return super().__getattr__(name)


ops.__class__ = _Operators
