"""Random calls of the public losses, each checked against float64: `python tools/fuzz.py [--seconds N] [--seed S] [--device cuda] [--ranks R] [LOSS ...]`.

Shapes, strides, dtypes, labels, lengths and options are hostile. A call gives the numbers and gradients of its definition, or an error that names
an argument; the same bits when repeated; and it neither reads nor changes what lies beside a tensor. A call that does not prints a line with
what repeats it, `--seed S --only K`, and the exit code is 1. With TRITON_INTERPRET=1 kernels take what they can on a CPU.

With `--ranks R` so many processes make each call together, of losses whose classes or pairs are over ranks: results and gradients of all are those
of the whole problem on one process, and a call that raises says the same on all ranks. A hang ends with a line that names the call.
"""
import argparse
import io
import math
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]
import fuzz_ranks  # noqa: E402
from fuzz_calls import LOSSES, Call, Draw, under_autocast, within_autocast  # noqa: E402
from fuzz_ranks import RankCall  # noqa: E402
from helpers import INTERPRETED, TOLERANCE, everywhere  # noqa: E402

BARE = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"  # compute-sanitizer looks on: buffers end with their tensors
GUARD = 0 if BARE else 1024  # bytes on each side of what a call allocates
MARGIN = 0 if BARE else 64  # numbers on each side of an input
HANGS = timedelta(seconds=30)  # of a message between ranks
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
            if type(t) is not Tensor or t.device.type == "meta" or not t.numel() or t.layout != torch.strided or torch.compiler.is_compiling():
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


def normal(t: Tensor, g: torch.Generator) -> Tensor:
    "Numbers in the place of these"
    return torch.randn(t.shape, generator=g, dtype=t.dtype).to(t.device)


class Seeds(NamedTuple):
    "Of what a call draws, and of upstream gradients"
    call: int
    rows: int
    scalars: int


def answered(call: Call, laid: dict[str, Laid], ups: list[Laid], seeds: Seeds) -> tuple[Found, list[str]]:
    "What the library says, and what it wrote beyond; `ups` are upstream gradients, drawn where there are none yet"
    leaves = {name: l.tensor.detach().requires_grad_(name in call.leaves) for name, l in laid.items()}
    given = leaves | {call.inplace: Between.apply(leaves[call.inplace], laid[call.inplace])} if call.inplace else leaves
    torch.manual_seed(seeds.call)
    with guarded_memory() as wrong:
        found = [t for t in call.run(**given) if t is not None]
        of = [t for t in found if t.requires_grad]
        if not ups:
            r, rows, scalars = random.Random(seeds.rows), *(torch.Generator().manual_seed(seed) for seed in seeds[1:])
            ups += [Laid(normal(t, rows if t.dim() else scalars), r) for t in of]
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
    given, dtypes = {}, [l.given.dtype for l in laid.values() if l.given.is_floating_point()] + [call.under] * (call.under is not None)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes) * (1 if call.under is None else 2)  # a product and its bias are rounded apart
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
        wrong += misfit(f"d {name}", a, e, [n[1][i] for n in noisy], Limits(dtype, max(call.tolerance, TOLERANCE[call.under or dtype]), least, slack.get(name, 0.0)))
    return wrong


def refused(call: Call, error: Exception) -> str | None:
    "What is wrong with an error"
    named = re.match(rf"({'|'.join(call.names)})(\[[\d, ]*\])*(: expected .*, got |(: .*)? is .*: expected )", str(error), re.DOTALL)
    kinds = (ValueError, IndexError) if call.impossible else ValueError
    return None if isinstance(error, kinds) and named else f"{type(error).__name__}: {str(error)[:300]}"


def wrong_again(call: Call, laid: dict[str, Laid], ups: list[Laid], seeds: Seeds, got: Found) -> list[str]:
    "What a call has changed, and what it says otherwise when it is repeated"
    wrong = touched(call, laid) + [f"{u} was changed" for u, l in enumerate(ups) if l.changed()]
    for l in laid.values():
        l.buffer.copy_(l.before)
    again, _ = answered(call, laid, ups, seeds)
    return wrong + [f"other bits in {i} when repeated" for i, (a, b) in enumerate(zip(got[0] + got[1], again[0] + again[1])) if not torch.equal(bits(a), bits(b))]


def taken(got: Found, device: str) -> list[str]:
    "What is wrong with the answer to an impossible call"
    return [] if device != "cpu" and any(t.isnan().any() for t in got[0] if t.is_floating_point()) else ["a label or length that cannot be was taken"]


def judged(call: Call, r: random.Random, device: str) -> tuple[str, list[str]]:
    "What became of a call, and what is wrong with it"
    laid = {name: Laid(t.to(device) if name not in call.at_home else t, r, call.expands and not call.impossible) for name, t in call.tensors.items()}
    ups, seeds = [], Seeds(*[r.getrandbits(40)] * 3)
    try:
        got, wrong = answered(call, laid, ups, seeds)
    except Exception as error:  # whatever comes
        fault = refused(call, error)
        return "refused", ([fault] if fault else []) + touched(call, laid)
    wrong += wrong_again(call, laid, ups, seeds, got)
    if call.impossible:
        return "impossible", wrong + taken(got, device)
    return "right", wrong + differences(call, laid, ups, got)


class Said(NamedTuple):
    "What one rank says of a call"
    wrong: list[str]
    error: str = ""
    fault: str | None = None  # what is wrong with the error
    got: Found = ([], [])
    ups: list[Tensor] = []


def said_here(call: Call, laid: dict[str, Laid], seeds: Seeds, ranks: "Ranks") -> Said:
    "What this rank's part of a call gives, twice if no rank raises"
    ups, error, got, wrong = [], None, ([], []), []
    try:
        got, wrong = answered(call, laid, ups, seeds)
    except Exception as e:  # whatever comes
        error = e
    if any(ranks.told(error is not None)):
        return Said(touched(call, laid), str(error or ""), error and refused(call, error))
    try:
        wrong += wrong_again(call, laid, ups, seeds, got)
    except Exception as error:
        return Said(wrong, str(error), f"when repeated, {refused(call, error) or error}")
    return Said(wrong, got=([t.cpu() for t in got[0]], [t.cpu() for t in got[1]]), ups=[u.given.cpu() for u in ups])


def errors_of_ranks(said: list[Said]) -> tuple[str, list[str]]:
    "What became of a call that raises, and what is wrong with it: all ranks name one argument, or what the first of them found"
    faults = [f"rank {rank}: {what}" for rank, s in enumerate(said) for what in (*s.wrong, s.fault) if what]
    found = [re.sub(r"^mesh: expected ranks whose arguments are right, got an error on rank \d+: ", "", s.error) for s in said]
    alike = len({re.match(r"\w*", error)[0] for error in found}) == 1
    return "refused" if alike else "out of step", faults or ([] if alike else [f"ranks do not raise alike: {[error[:200] for error in found]}"])


def judged_over_ranks(call: RankCall, r: random.Random, device: str, ranks: "Ranks") -> tuple[str, list[str]]:
    "What became of a call that all ranks make, and what is wrong with it; the first rank knows"
    all_of, rank, seed = call.whole, ranks.rank, r.getrandbits(40)
    laid = {name: Laid(t.to(device), r, all_of.expands and not all_of.impossible) for name, t in all_of.tensors.items()}
    mine, own = call.here({name: l.given for name, l in laid.items()}, ranks.mesh), random.Random(seed + rank)
    seeds = Seeds(seed + rank, seed + (rank if call.parts.tokens else 0), seed)
    said = ranks.told(said_here(mine, {name: Laid(t, own, False) for name, t in mine.tensors.items()}, seeds, ranks))
    if any(s.error for s in said):
        return errors_of_ranks(said)
    try:
        return ("", []) if rank else verdict(call, laid, said, r, device)
    except Exception as error:  # of the definition
        return "broken", [repr(error)]


def verdict(call: RankCall, laid: dict[str, Laid], said: list[Said], r: random.Random, device: str) -> tuple[str, list[str]]:
    "What became of a call that no rank refuses, and what is wrong with it"
    wrong = [f"rank {rank}: {what}" for rank, s in enumerate(said) for what in s.wrong]
    outputs = [call.parts.output([*found]) for found in zip(*(s.got[0] for s in said))]
    of_leaves = {name: [*found] for name, found in zip(call.whole.leaves, zip(*(s.got[1] for s in said)))}
    grads, slack = ([of(name, found) for name, found in of_leaves.items()] for of in (call.parts.gradient, call.parts.roundings))
    wrong += [f"{what} {i} is not the same on all ranks" for what, of in (("output", outputs), ("gradient", grads)) for i, (_, alike) in enumerate(of) if not alike]
    got = [t for t, _ in outputs], [t for t, _ in grads]
    if call.whole.impossible:
        return "impossible", wrong + taken(got, device)
    ups = [Laid(call.parts.output([*found])[0], r, False) for found in zip(*(s.ups for s in said))]
    return "right", wrong + differences(call.whole._replace(slack=lambda *_, **__: dict(zip(of_leaves, slack))), laid, ups, got)


def drawing(seed: int, k: int, device: str) -> Draw:
    "What chance gives to draw number k of a seed"
    interpreted = INTERPRETED and device == "cpu"
    dtypes = [t for t in TOLERANCE if not (interpreted and t == torch.bfloat16)]  # which the interpreter rounds otherwise
    return Draw(f"{seed}-{k}", dtypes, 65 if interpreted else 257)


def may_autocast(call: Call, d: Draw) -> bool:
    "Whether a call of a linear layer in float32 is made within autocast"
    return "linear_weight" in call.tensors and d.dtype == torch.float32 and not INTERPRETED and d.chance()


def run_one(seed: int, k: int, names: list[str], device: str) -> tuple[str, str, list[str]]:
    "Draw number k of a seed: the loss, what became of it and what is wrong"
    name, d = names[k % len(names)], drawing(seed, k, device)
    call = LOSSES[name](d)
    if may_autocast(call, d):
        call = under_autocast(call, torch.bfloat16)
    try:
        return f"{name}{call}", *judged(call, d.r, device)
    except Exception as error:  # of a second call that differs, or of the definition
        return f"{name}{call}", "broken", [repr(error)]


def run_one_over_ranks(seed: int, k: int, names: list[str], device: str, ranks: "Ranks") -> tuple[str, str, list[str]]:
    "The same of a call that all ranks make"
    name, d = names[k % len(names)], drawing(seed, k, device)
    call = fuzz_ranks.LOSSES[name](d, ranks.mesh.size())
    if may_autocast(call.whole, d):
        call = call._replace(whole=under_autocast(call.whole, torch.bfloat16), run=within_autocast(call.run, torch.bfloat16))
    ranks.note(f"--only {k}: {name}{call.whole}")
    return f"{name}{call.whole}", *judged_over_ranks(call, d.r, device, ranks)


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


class Ranks(NamedTuple):
    "The processes that make a call together"
    rank: int
    mesh: DeviceMesh
    talk: Any  # a group of its own, which a call that hangs does not break
    at: Path  # a file that names the call

    def told(self, what: Any) -> list[Any]:
        "What each rank says"
        of_all = [None] * self.mesh.size()
        dist.all_gather_object(of_all, what, group=self.talk)
        return of_all

    def note(self, call: str) -> None:
        if not self.rank:
            self.at.write_text(call)


def fuzz(asked: argparse.Namespace, names: list[str], run: Callable[[int], tuple[str, str, list[str]]], goes_on: Callable[[], bool]) -> int:
    "Draw after draw; 1 where a call was wrong"
    ranks, outcomes, bad = ["--ranks", str(asked.ranks)] if asked.ranks > 1 else [], Counter(), 0
    for k in count() if asked.only is None else [asked.only]:
        if asked.only is None and not goes_on():
            break
        what, outcome, wrong = run(k)
        outcomes[outcome] += 1
        bad += bool(wrong)
        if wrong:
            print(f"{' '.join([*ranks, '--seed', str(asked.seed), '--only', str(k), *asked.losses])}: {what}: {'; '.join(wrong)}", flush=True)
        if outcome == "out of step":  # nor is what they say next
            break
    print(f"{sum(outcomes.values())} calls: {', '.join(f'{n} {what}' for what, n in outcomes.items())}; {bad} wrong", flush=True)
    return min(bad, 1)


def one_rank(rank: int, asked: argparse.Namespace, names: list[str], folder: str) -> None:
    "What one of the processes does; the first prints"
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    kind = torch.device(asked.device).type
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", f"file://{folder}/meet", HANGS, asked.ranks, rank)
    ranks = Ranks(rank, DeviceMesh(kind, list(range(asked.ranks))), dist.new_group(backend="gloo", timeout=3 * HANGS), Path(folder, "call"))
    end = time.monotonic() + asked.seconds
    with nullcontext() if not rank else redirect_stdout(io.StringIO()):
        wrong = fuzz(asked, names, lambda k: run_one_over_ranks(asked.seed, k, names, kind, ranks), lambda: ranks.told(time.monotonic() < end)[0])
    ranks.told(None)
    if not rank:
        ranks.at.unlink(missing_ok=True)
    os._exit(wrong)  # threads of a group may abort a process that has done its work


def fuzz_over_ranks(asked: argparse.Namespace, names: list[str]) -> int:
    "1 where a call was wrong, or a rank fell"
    start = multiprocessing.get_context("fork" if torch.device(asked.device).type == "cpu" else "spawn")  # CUDA is not to be forked
    with tempfile.TemporaryDirectory() as folder:
        processes = [start.Process(target=one_rank, args=(rank, asked, names, folder)) for rank in range(asked.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        unfinished = Path(folder, "call")
        if unfinished.exists():
            print(f"--ranks {asked.ranks} --seed {asked.seed} {unfinished.read_text()}: no answer of all ranks")
        return int(unfinished.exists() or any(process.exitcode for process in processes))


def main(argv: list[str]) -> int:
    "1 where a call was wrong"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("losses", nargs="*", metavar="LOSS", help=f"{', '.join(LOSSES)}; over ranks {', '.join(fuzz_ranks.LOSSES)}")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this draw alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=1, help="processes that make each call together; on GPUs one each")
    asked = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    end, names = time.monotonic() + asked.seconds, asked.losses or [*(LOSSES if asked.ranks == 1 else fuzz_ranks.LOSSES)]
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED and asked.device == "cpu":
            kernels_everywhere(patch)
        if asked.ranks > 1:
            return fuzz_over_ranks(asked, names)
        return fuzz(asked, names, lambda k: run_one(asked.seed, k, names, asked.device), lambda: time.monotonic() < end)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
