"""Random calls of the public losses, each checked against float64: `python tools/fuzz.py [--seconds N] [--seed S] [--device cuda] [LOSS ...]`.

Shapes, strides, dtypes, labels, lengths and options are hostile. A call gives the numbers and gradients of its definition, or an error that names
an argument; the same bits when repeated; and it neither reads nor changes what lies beside a tensor. A call that does not prints a line with
what repeats it, `--seed S --only K`, and the exit code is 1. With TRITON_INTERPRET=1 kernels take what they can on a CPU.
"""
import argparse
import math
import os
import random
import re
import sys
import time
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Iterator, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]
from fuzz_calls import LOSSES, Call, Draw  # noqa: E402
from helpers import INTERPRETED, TOLERANCE, everywhere  # noqa: E402

BARE = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"  # compute-sanitizer looks on: buffers end with their tensors
GUARD = 0 if BARE else 1024  # bytes on each side of what a call allocates
MARGIN = 0 if BARE else 64  # numbers on each side of an input
Found = tuple[list[Tensor], list[Tensor]]  # outputs, gradients


class Laid:
    "A tensor in a larger buffer of what must not be read, by strides and a start drawn at random"
    def __init__(self, t: Tensor, r: random.Random, expands: bool = True):
        order = list(range(t.dim()))[::-1] if r.random() < 0.5 else r.sample(range(t.dim()), t.dim())
        strides, step = [0] * t.dim(), r.choice((1, 1, 1, 2, 3))
        for d in order:  # the innermost first
            strides[d], step = step, step * max(t.shape[d], 1) + r.choice((0, 0, 0, 1, 8))
        first = t
        if expands and t.dim() and t.numel() and r.random() < 0.06:  # expanded
            d = r.choice(order)
            first, strides[d] = t.narrow(d, 0, 1), 0
        start, poison = MARGIN + r.choice((0, 0, 1, 3, 8)), float("nan") if t.is_floating_point() else 2**30
        end = start + sum((n - 1) * s for n, s in zip(t.shape, strides)) + 1 if t.numel() else start
        self.buffer = torch.full((end + MARGIN,), poison, dtype=t.dtype, device=t.device)
        at = lambda buffer, shape: buffer.as_strided(shape, strides, start)
        at(self.buffer, first.shape).copy_(first)
        self.tensor, self.before, self.outside = at(self.buffer, t.shape), self.buffer.clone(), torch.ones_like(self.buffer, dtype=torch.bool)
        self.given = at(self.before, t.shape)
        at(self.outside, first.shape).fill_(False)

    def changed(self, where: Tensor | None = None) -> bool:
        "Whether a number of the buffer has other bits than before, `where` a mask says or anywhere"
        now, then = (t if where is None else t[where] for t in (self.buffer, self.before))
        return not torch.equal(bits(now), bits(then))


def bits(t: Tensor) -> Tensor:
    "Its bytes"
    return t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


class Between(torch.autograd.Function):
    "An identity whose result lies as a buffer does: a loss may write there in place"
    @staticmethod
    def forward(ctx, t, laid):
        return laid.tensor.detach()

    @staticmethod
    def backward(ctx, g):
        return g, None


@contextmanager
def guarded_memory() -> Iterator[list[str]]:
    "What PyTorch is asked for by name lies between guards, and is no number until it is written; the list says what wrote beyond"
    made, wrong = [], []

    def guarded(owner, name):
        allocate = getattr(owner, name)

        def made_between(*args, **how):
            t = allocate(*args, **how)
            if t.device.type == "meta" or not t.numel() or t.layout != torch.strided or torch.compiler.is_compiling():
                return t
            size = t.untyped_storage().nbytes()
            memory = torch.full((size + 2 * GUARD,), 255, dtype=torch.uint8, device=t.device)
            made.append((memory, size, tuple(t.shape)))
            out = torch.tensor([], dtype=t.dtype, device=t.device).set_(memory.untyped_storage(), GUARD // t.itemsize, t.shape, t.stride())
            return out if "empty" in name else out.copy_(t)
        return mock.patch.object(owner, name, made_between)
    with ExitStack() as stack:
        for owner, name in [*((torch, n) for n in ("empty", "empty_like", "empty_strided", "zeros", "zeros_like")), (Tensor, "new_empty"), (Tensor, "new_zeros")]:
            stack.enter_context(guarded(owner, name))
        yield wrong
    for memory, size, shape in made:
        freed = memory.untyped_storage().nbytes() < memory.nbytes
        if not freed and not ((memory[:GUARD] == 255).all() and (memory[GUARD + size:] == 255).all()):
            wrong.append(f"wrote beside a result of shape {shape}")


def answered(call: Call, laid: dict[str, Laid], ups: list[Laid], seed: int) -> tuple[Found, list[str]]:
    "What the library says, and what it wrote beyond; `ups` are upstream gradients, drawn where there are none yet"
    leaves = {name: l.tensor.detach().requires_grad_(name in call.leaves) for name, l in laid.items()}
    given = leaves | {call.inplace: Between.apply(leaves[call.inplace], laid[call.inplace])} if call.inplace else leaves
    torch.manual_seed(seed)
    with guarded_memory() as wrong:
        found = [t for t in call.run(**given) if t is not None]
        of = [t for t in found if t.requires_grad]
        if not ups:
            r, g = random.Random(seed), torch.Generator().manual_seed(seed)
            ups += [Laid(torch.randn(t.shape, generator=g, dtype=t.dtype).to(t.device), r) for t in of]
        grads = list(torch.autograd.grad(of, [leaves[n] for n in call.leaves], [u.tensor for u in ups], materialize_grads=True)) if of else []
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    return ([t.detach() for t in found], grads), wrong


def touched(call: Call, laid: dict[str, Laid]) -> list[str]:
    "What a call has changed of its inputs, or beside them"
    return [f"{name} was changed" for name, l in laid.items() if l.changed(l.outside if name == call.inplace else None)]


class Shaken(torch.autograd.Function):
    "Numbers, and later their gradient, as roundings may leave them"
    @staticmethod
    def forward(ctx, t, eps, seed):
        ctx.how = eps, seed
        return shaken(t, eps, seed)

    @staticmethod
    def backward(ctx, g):
        return shaken(g, *ctx.how), None, None


class ShakenProducts(TorchFunctionMode):
    "Scores are rounded, and their gradient before its products: each by chance, up or down"
    def __init__(self, eps: float, seed: int):
        super().__init__()
        self.how = eps, seed

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return Shaken.apply(out, *self.how) if function in (F.linear, Tensor.matmul, Tensor.__matmul__) else out


def shaken(t: Tensor, eps: float, seed: int) -> Tensor:
    "Each number larger or smaller by a share of it"
    return t * (1 + eps * (2 * torch.randint(2, t.shape, generator=torch.Generator().manual_seed(seed)) - 1))


def exact(call: Call, laid: dict[str, Laid], ups: list[Laid], found: list[Tensor], noise: int | None) -> Found:
    "The definition in float64 on a CPU; with other roundings if `noise` is a seed"
    given, eps = {}, max(torch.finfo(l.given.dtype).eps for l in laid.values() if l.given.is_floating_point())
    for i, (name, l) in enumerate(laid.items()):
        given[name] = t = l.given.cpu()
        if t.is_floating_point():
            t = t.double() if noise is None or not t.dim() else shaken(t.double(), torch.finfo(t.dtype).eps, noise + i)
            given[name] = t.requires_grad_(name in call.leaves)
    with nullcontext() if noise is None else ShakenProducts(eps, noise):
        out = [t for t in call.exact([t.cpu() for t in found], **given) if t is not None]
    of = [t for t in out if t.requires_grad]
    alike = of and [t.shape for t in of] == [u.tensor.shape for u in ups]
    grads = torch.autograd.grad(of, [given[n] for n in call.leaves], [u.tensor.cpu().double() for u in ups], materialize_grads=True) if alike else []
    return [t.detach() for t in out], list(grads)


class Limits(NamedTuple):
    "Of one result"
    dtype: torch.dtype
    tolerance: float  # a share of it
    floor: float  # of each number, from terms that cancel
    slack: float = 0.0  # of all of it, which the loss states


def misfit(name: str, got: Tensor, want: Tensor, others: list[Tensor], limits: Limits) -> list[str]:
    "How far a result is off, beyond what roundings explain, which made `others` of `want`"
    got = got.cpu()
    if got.shape != want.shape or got.is_floating_point() and got.dtype != limits.dtype:
        return [f"{name} is {got.dtype} {list(got.shape)}, not {limits.dtype} {list(want.shape)}"]
    if not got.is_floating_point():
        return [] if torch.equal(got, want.to(got.dtype)) else [f"{name} differs"]
    got, finite = got.double(), want.isfinite()
    if not torch.equal(torch.where(finite, 0.0, want).nan_to_num(7.0), torch.where(finite & got.isfinite(), 0.0, got).nan_to_num(7.0)):
        return [f"{name} has other numbers that are not finite"]
    part = lambda t: torch.where(finite, t, 0.0).nan_to_num(0.0, 0.0, 0.0)
    error, size = (part(got) - part(want)).norm().item(), part(want).norm().item()
    spread = sum((part(o) - part(want)).norm().item() for o in others)
    limit = limits.tolerance * size + 4 * spread + limits.floor * max(1, want.numel()) ** 0.5 + limits.slack
    return [f"{name} is off by {error:.1e} of {size:.1e}, more than {limit:.1e}"] if error > limit else []


def differences(call: Call, laid: dict[str, Laid], ups: list[Laid], got: Found) -> list[str]:
    "What is wrong with outputs and gradients"
    want, noisy = exact(call, laid, ups, got[0], None), [exact(call, laid, ups, got[0], seed) for seed in (100, 200, 300)]
    floats = [l.given for l in laid.values() if l.given.is_floating_point()]
    wide = torch.promote_types(floats[0].dtype, torch.float32)
    longest = [1 + torch.where(t.isfinite(), t, 0.0).double().norm(dim=-1).amax().item() for t in floats if t.dim() and t.numel()] or [1.0]
    floor = 32 * torch.finfo(wide).eps * math.prod(longest) * max(math.prod(t.shape[:-1]) for t in floats) ** 0.5
    wrong = [f"{len(got[0])} outputs, not {len(want[0])}"] if len(got[0]) != len(want[0]) else []
    for i, (a, e) in enumerate(zip(got[0], want[0])):
        wrong += misfit(f"output {i}", a, e, [n[0][i] for n in noisy], Limits(wide, TOLERANCE[wide], floor))
    if not wrong and len(got[1]) != len(want[1]):
        return [f"{len(got[1])} gradients, not {len(want[1])}"]
    given = {name: l.given.cpu().double() if l.given.is_floating_point() else l.given.cpu() for name, l in laid.items()}
    slack = call.slack([u.tensor.cpu().double() for u in ups], **given)
    for i, (name, a, e) in enumerate(zip(call.leaves, got[1], want[1])):
        dtype = laid[name].given.dtype
        least = max(longest) * floor + torch.finfo(dtype).smallest_normal * 2**-8
        wrong += misfit(f"d {name}", a, e, [n[1][i] for n in noisy], Limits(dtype, max(call.tolerance, TOLERANCE[dtype]), least, slack.get(name, 0.0)))
    return wrong


def refused(call: Call, error: Exception) -> str | None:
    "What is wrong with an error"
    named = re.match(rf"({'|'.join(call.names)})(\[[\d, ]*\])*(: expected .*, got |(: .*)? is .*: expected )", str(error), re.DOTALL)
    kinds = (ValueError, IndexError) if call.impossible else ValueError
    return None if isinstance(error, kinds) and named else f"{type(error).__name__}: {str(error)[:300]}"


def judged(call: Call, r: random.Random, device: str) -> tuple[str, list[str]]:
    "What became of a call, and what is wrong with it"
    laid = {name: Laid(t.to(device) if name not in call.at_home else t, r, call.expands and not call.impossible) for name, t in call.tensors.items()}
    ups, seed = [], r.getrandbits(40)
    try:
        got, wrong = answered(call, laid, ups, seed)
    except Exception as error:  # whatever comes
        fault = refused(call, error)
        return "refused", ([fault] if fault else []) + touched(call, laid)
    wrong += touched(call, laid) + [f"{u} was changed" for u, l in enumerate(ups) if l.changed()]
    for l in laid.values():
        l.buffer.copy_(l.before)
    again, _ = answered(call, laid, ups, seed)
    wrong += [f"other bits in {i} when repeated" for i, (a, b) in enumerate(zip(got[0] + got[1], again[0] + again[1])) if not torch.equal(bits(a), bits(b))]
    if call.impossible:
        if device == "cpu" or not any(t.isnan().any() for t in got[0] if t.is_floating_point()):
            wrong.append("a label or length that cannot be was taken")
        return "impossible", wrong
    return "right", wrong + differences(call, laid, ups, got)


def run_one(seed: int, k: int, names: list[str], device: str) -> tuple[str, str, list[str]]:
    "Draw number k of a seed: the loss, what became of it and what is wrong"
    name, interpreted = names[k % len(names)], INTERPRETED and device == "cpu"
    dtypes = [t for t in TOLERANCE if not (interpreted and t == torch.bfloat16)]  # which the interpreter rounds otherwise
    d = Draw(f"{seed}-{k}", dtypes, 65 if interpreted else 257)
    call = LOSSES[name](d)
    try:
        return f"{name}{call}", *judged(call, d.r, device)
    except Exception as error:  # of a second call that differs, or of the definition
        return f"{name}{call}", "broken", [repr(error)]


def kernels_everywhere(patch) -> None:
    "On a CPU, in Triton's interpreter: kernels take what they can"
    import fusedloss as fl
    from fusedloss.core import negatives, products, triton
    for name in fl.__all__:
        getattr(fl, name)
    takes = lambda t: t.dtype in (torch.float16, torch.float32) and t.numel() > 0
    everywhere(patch, triton, "has_kernel", takes)
    everywhere(patch, products, "takes_kernel", takes)
    everywhere(patch, negatives, "fits_kernels", lambda x, o: takes(x) and o.centers == 1 and o.circle_margin < 0)


def main(argv: list[str]) -> int:
    "1 where a call was wrong"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("losses", nargs="*", default=[*LOSSES], metavar="LOSS", help=", ".join(LOSSES))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this draw alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    chosen = [] if asked.losses == [*LOSSES] else asked.losses
    end, outcomes, bad = time.monotonic() + asked.seconds, Counter(), 0
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED and asked.device == "cpu":
            kernels_everywhere(patch)
        for k in count() if asked.only is None else [asked.only]:
            if asked.only is None and time.monotonic() > end:
                break
            what, outcome, wrong = run_one(asked.seed, k, asked.losses, asked.device)
            outcomes[outcome] += 1
            bad += bool(wrong)
            if wrong:
                print(f"{' '.join(['--seed', str(asked.seed), '--only', str(k), *chosen])}: {what}: {'; '.join(wrong)}", flush=True)
    print(f"{sum(outcomes.values())} calls: {', '.join(f'{n} {what}' for what, n in outcomes.items())}; {bad} wrong")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
