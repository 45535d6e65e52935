"""What may stand for a weight: a tensor, or a module whose forward is the product with it and no more."""

from typing import Optional

from torch import Tensor, nn


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(
    module: nn.Module,
) -> bool:
    "Whether hooks other than those of `torch.distributed` run on a module or its children."
    hooks = (hook for m in module.modules() for name in HOOKS for hook in getattr(m, name).values())
    return any(not str(getattr(hook, "__module__", "")).startswith("torch.distributed.") for hook in hooks)


LOOKUPS = dict(max_norm=None, scale_grad_by_freq=False, sparse=False)  # that change no lookup


def lookup_option(
    module: nn.Module,
) -> str:
    "The option of an `nn.Embedding` that a product would not honour; empty if there is none."
    if not isinstance(module, nn.Embedding):
        return ""
    return next(
        (f"{name}={getattr(module, name)}" for name, none in LOOKUPS.items() if getattr(module, name) != none), ""
    )


def more_than_product(
    module: nn.Module,  # an `nn.Linear` or `nn.Embedding`
) -> str:
    "What a module does beside the product with its weight; empty if nothing."
    kind = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
    if type(module).forward is not kind.forward or "forward" in vars(module):
        return "whose forward is its own (an adapter, a scale, a quantised weight)"
    if hasattr(module, "parametrizations"):
        return "whose weight has a parametrization"
    if has_hooks(module):
        return "which has hooks"
    option = lookup_option(module)
    if option:
        return f"which has {option}"
    kind = type(module.weight)  # an adapter may stand in the tensor
    return "" if f"{kind.__module__}.".startswith("torch.") else f"whose weight is a {kind.__name__}"


def weight_and_bias(
    linear_weight: Tensor | nn.Module,  # [V,H], or an `nn.Linear` or `nn.Embedding` that has it
    linear_bias: Optional[Tensor] = None,  # [V]
    name: str = "linear_weight",  # of the argument
) -> tuple[Tensor, Optional[Tensor]]:
    "A module's weight and bias, tensors as they are; `ValueError` for one that does more."
    if not isinstance(linear_weight, nn.Module):
        return linear_weight, linear_bias
    kind = type(linear_weight).__name__
    expected = f"{name}: expected a tensor, an nn.Linear or an nn.Embedding"
    if not isinstance(linear_weight, (nn.Linear, nn.Embedding)):
        raise ValueError(f"{expected}, got {kind}")
    more = more_than_product(linear_weight)
    if more:
        raise ValueError(
            f"{expected} whose forward is the product with its weight alone, "
            f"got {kind}, {more}; its weight as a tensor leaves that out"
        )
    bias = getattr(linear_weight, "bias", None)
    if bias is not None and linear_bias is not None:
        raise ValueError(f"linear_bias: expected None beside a {kind} with a bias, got a tensor")
    return linear_weight.weight, linear_bias if bias is None else bias


def weight_alone(
    linear_weight: Tensor | nn.Module,  # [V,H], or a module that has it
    name: str = "linear_weight",  # of the argument
) -> Tensor:  # [V,H]
    "The weight, for a loss without a bias; `ValueError` for a module that has one."
    weight, bias = weight_and_bias(linear_weight, None, name)
    if bias is None:
        return weight
    raise ValueError(
        f"{name}: expected a weight without a bias, which this loss does not take, "
        f"got {type(linear_weight).__name__} with bias=True"
    )
