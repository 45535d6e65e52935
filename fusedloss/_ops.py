"Where the library's operators are: a build for a hub of kernels has a file of its own in this place, with a namespace for each build."

import torch


NAMESPACE = "fusedloss"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(
    name: str,  # of an operator
) -> str:  # "namespace::name"
    "An operator's name as PyTorch has it."
    return f"{NAMESPACE}::{name}"
