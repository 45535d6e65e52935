"""The installed package imports, and a loss and its gradient are right: the least that any machine can do.

    python tools/smoke.py
"""
import torch
from torch.nn.functional import cross_entropy

import fusedloss as fl


def main() -> None:
    "One forward and backward pass on the CPU beside PyTorch's"
    x, w, y = torch.randn(7, 8), torch.randn(16, 8), torch.arange(7)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, expected = fl.linear_cross_entropy(ours, w, y), cross_entropy(theirs @ w.T, y)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    print(f"fusedloss {fl.__version__} from {fl.__file__}")


if __name__ == "__main__":
    main()
