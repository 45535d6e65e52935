"""Sizes at which 32-bit numbers end, on a GPU with room for them: 2³¹ logits of a chunk, 2³¹ numbers of a weight, 2³⁸ logits in all."""
from typing import NamedTuple

import pytest
import torch

from fusedloss import linear_cross_entropy

PIECE = 2**12  # classes at a time


class Size(NamedTuple):
    tokens: int
    features: int
    classes: int
    budget: int | None = None  # bytes


SIZES = {
    "logits of a chunk": Size(20480, 128, 131080, 6 << 30),
    "a weight": Size(512, 2056, 2**20 + 8),
    "2³⁸ logits": Size(2**19, 64, 2**19),
}
room = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 48 << 30, reason="no GPU with 48 GiB to spare")


def sample(n: Size) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator("cuda").manual_seed(0)
    new = lambda rows, scale: (scale * torch.randn(rows, n.features, generator=made, device="cuda", dtype=torch.bfloat16)).requires_grad_()
    return new(n.tokens, 1), new(n.classes, n.features ** -0.5), torch.randint(n.classes, (n.tokens,), generator=made, device="cuda")


def exact_lse(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    "Of each row, in float64; its scores are small"
    total = x.new_zeros(len(x), dtype=torch.float64)
    for rows, sums in zip(x.split(2**17), total.split(2**17)):
        for classes in w.split(PIECE):
            sums += (rows.float() @ classes.float().T).exp_().sum(1, dtype=torch.float64)
    return total.log()


def exact_parts(x, w, y, lse, rows, classes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    "The mean loss, and the chosen rows of dx and dw, in float64"
    own = (x.double() * w[y].double()).sum(1)
    dx = -w[y[rows]].double()
    for piece in w.split(PIECE):
        dx += (x[rows].double() @ piece.double().T - lse[rows, None]).exp() @ piece.double()
    p = (x.double() @ w[classes].double().T - lse[:, None]).exp() - (y[:, None] == classes).double()
    return (lse - own).mean(), dx / len(x), p.T @ x.double() / len(x)


@room
@pytest.mark.parametrize("name", SIZES)
def test_sizes_at_which_32_bits_end(name):
    size = SIZES[name]
    x, w, y = sample(size)
    ends = lambda n: torch.tensor([0, n // 2, n - 2, n - 1], device="cuda")
    rows, classes = ends(len(x)), ends(len(w))
    with torch.no_grad():
        want = exact_parts(x, w, y, exact_lse(x, w), rows, classes)
    for method in ("product", "chunks", "recompute"):
        loss = linear_cross_entropy(x, w, y, method=method, memory_budget=size.budget)
        dx, dw = torch.autograd.grad(loss, (x, w))
        found = loss, dx[rows], dw[classes]
        errors = [((f - t).norm() / t.norm()).item() for f, t in zip(found, want)]
        assert max(errors) < 2e-2, (method, errors)
        del dx, dw, found
