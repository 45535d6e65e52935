"""Every kernel once, on small tensors: what `make sanitize` gives compute-sanitizer to watch. Names of parts choose among them."""
import sys

import torch

import fusedloss as fl
from fusedloss.semirings import Log, Max

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
bf16, f32 = torch.bfloat16, torch.float32


def leaf(*size: int, dtype: torch.dtype = f32) -> torch.Tensor:
    "Normal numbers that want a gradient"
    return torch.randn(*size, device=DEVICE).to(dtype).requires_grad_()


def labels(top: int, *size: int) -> torch.Tensor:
    "Labels from 1 to `top` - 1"
    return torch.randint(1, top, size, device=DEVICE)


def cross_entropy() -> None:
    "Stage 4: Triton, and rows that a cluster holds"
    for n, v, inplace in ((5, 300, False), (3, 32768, True), (9, 1003, True)):
        fl.cross_entropy(leaf(n, v, dtype=bf16) * 1, labels(v, n), label_smoothing=0.1, inplace=inplace).backward()


def linear_cross_entropy() -> None:
    "Stages 5 and 6"
    for n, v, h, method in ((33, 515, 64, "chunks"), (33, 515, 64, "recompute"), (70, 1003, 96, "recompute")):
        x, w = leaf(n, h, dtype=bf16), leaf(v, h, dtype=bf16)
        method = method if DEVICE == "cuda" else "auto"
        fl.linear_cross_entropy(x, w, labels(v, n), method=method).backward()


def partial_fc() -> None:
    "Stage 9: rows by index, one of them ignored, and the optimizer's"
    for v, n, h, rate in ((3000, 77, 64, 0.1), (777, 33, 64, 0.5)):
        head = fl.PartialFC(v, h, sample_rate=rate, device=DEVICE)
        optimizer = fl.RowSparse(torch.optim.SGD, head.parameters(), lr=0.1, momentum=0.9)
        y = labels(v, n)
        y[0] = head.ignore_index
        head(leaf(n, h, dtype=bf16), y).backward()
        optimizer.step()


def logz() -> None:
    "Stage 12: both semirings, with edges that are missing"
    for T, N, C, nz in ((6, 3, 4, 2), (20, 2, 33, 3), (6, 2, 1024, 5)):
        idx, frames = torch.randint(-1, C, (C, nz), device=DEVICE), labels(T + 1, N)
        scores, start, end = leaf(T, N, C, nz), leaf(N, C), leaf(N, C)
        for S in (Log, Max):
            fl.logz(scores, idx, start, end, S, lengths=frames).sum().backward()
        fl.viterbi(scores.detach(), idx, start.detach(), end.detach(), lengths=frames)


def ctc() -> None:
    "Stage 13: a warp, several, and clusters; a label that is none, on a GPU"
    for T, N, C, L, dtype in ((9, 3, 5, 2, f32), (70, 2, 40, 33, bf16), (140, 2, 33, 130, f32), (620, 1, 30, 300, f32)):
        z, y, frames, lengths = leaf(T, N, C, dtype=dtype), labels(C, N, L), torch.full((N,), T), labels(L + 1, N).cpu()
        if DEVICE == "cuda": y[0, 0] = C + 7
        fl.ctc_loss_with_logits(z, y, frames, lengths).backward()
        fl.ctc_loss(z.float().log_softmax(-1), y, frames, lengths, reduction="none").sum().backward()


def linear_ctc() -> None:
    "Stage 14: padded frames left out, or unknown to the host; rows that shared memory holds, and one that it does not"
    for T, N, V, H, L, reduction in ((40, 2, 300, 64, 12, "mean"), (70, 3, 515, 96, 40, "none"), (18, 2, 40000, 64, 7, "sum")):
        x, w, b, y = leaf(T, N, H, dtype=bf16), leaf(V, H, dtype=bf16), leaf(V, dtype=bf16), labels(V, N, L)
        for place in ("cpu", DEVICE):
            frames, lengths = torch.arange(T - N + 1, T + 1).to(place), torch.full((N,), L).to(place)
            fl.linear_ctc_loss(x, w, y, frames, lengths, linear_bias=b, reduction=reduction).sum().backward()


PARTS = cross_entropy, linear_cross_entropy, partial_fc, logz, ctc, linear_ctc


def main(chosen: list[str]) -> None:
    "Run them one after another"
    torch.manual_seed(0)
    for part in PARTS:
        if chosen and part.__name__ not in chosen:
            continue
        part()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        print(f"{part.__name__}: {part.__doc__}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
