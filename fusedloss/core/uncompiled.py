"""What a compiler has to leave as it is: it runs between two graphs, as without `torch.compile`."""

import functools
import sys
from typing import Any, Callable, TypeVar

import torch


Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(
    whole: str,  # whose it is, and what it expects in place of fullgraph=True
) -> Callable[[Function], Function]:
    """Decorates what cannot be in a graph: it runs between two, uncompiled with all that it calls; `fullgraph=True` raises `whole`.

    For code of which a graph would ask too early what is known when it runs (whether a backward pass is at work), in which ranks
    talk, or which a release of PyTorch cannot trace. Where a graph can hold a computation as one node, `operator` and `over_ranks`
    make the node instead; where only a question differs, `torch.compiler.is_compiling` answers it.
    """

    def decorated(function):
        disable = functools.partial(torch.compiler.disable, function, reason=whole)
        disabled = functools.cache(disable)  # made once: that takes as long as an optimizer's hook does

        @functools.wraps(function)
        def called(*args, **given):
            # in this order, so that no graph depends on `sys.modules`; nothing here imports Dynamo, which takes seconds
            if torch.compiler.is_compiling():
                return disable()(*args, **given)  # a compiler would warn of the cache
            if "torch._dynamo" in sys.modules:
                return disabled()(*args, **given)
            return function(*args, **given)

        called._torchdynamo_disable = True  # as `torch.compiler.disable` marks what it returns
        called._torchdynamo_disable_msg = whole
        return called

    return decorated
