"""What leaves in a later release: it works until then, and says at the caller's line what takes its place."""

import warnings

import torch

from fusedloss.core.checks import expect


def renamed_argument(old: str, given, new: str, value, default, leaves: str):
    "The value of an argument that has a new name; a `DeprecationWarning`, once for each line that calls, if the old name was used."
    if given is None:
        return value
    expect(value == default, old, f"nothing beside {new}, whose old name it is", repr(given))
    if not torch.compiler.is_compiling():  # a warning would break the graph
        warnings.warn(f"{old}= is now {new}=, and leaves in fusedloss {leaves}", DeprecationWarning, stacklevel=3)
    return given
