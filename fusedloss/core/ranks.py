"""Who owns which classes, how rows travel with their labels, and all collectives of a loss over ranks, each with its shortcut for one process."""

import functools
import json
import threading
import weakref
from typing import Any, Callable, NamedTuple, Optional, Sequence, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from fusedloss.core.checks import acc_dtype, expect, is_debugged
from fusedloss.core.operators import larger_size, smaller_size
from fusedloss.core.tiling import is_timed
from fusedloss.core.tuning import is_capturing, rank_agreement


def shard_range(
    n_classes: int,  # V
    ranks: int,  # R
    rank: int,
) -> range:
    "The classes of a rank, as `Shard(0)` deals them."
    each = -(-n_classes // ranks)
    return range(min(rank * each, n_classes), min((rank + 1) * each, n_classes))


class Shards(NamedTuple):
    "Which classes this rank owns, and with whom it shares the others."

    n_classes: int  # V
    start: int
    stop: int  # of this rank
    group: object = None  # a process group; None: one process has all

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def local_labels(self, y: Tensor, ignore_index: int) -> Tensor:  # [N]
        "Labels counted from this rank's first class; -1 where the class is not here."
        local = y - self.start
        elsewhere = (local < 0) | (local >= self.stop - self.start)
        if self.start <= ignore_index < self.stop:
            elsewhere |= y == ignore_index
        return local.masked_fill_(elsewhere, -1)


def is_dtensor(t) -> bool:
    "Whether `t` is a DTensor, without importing what defines it."
    return hasattr(t, "device_mesh")


def is_row_sharded(t: Tensor) -> bool:
    "Whether a DTensor has its rows over a mesh of one dimension."
    return t.device_mesh.ndim == 1 and t.placements[0].is_shard(0)


def check_mesh(mesh):
    "`ValueError` for what is neither a mesh nor None."
    expect(mesh is None or isinstance(mesh, DeviceMesh), "mesh", "a DeviceMesh or None", type(mesh).__name__)


def shards_on(
    mesh,  # a DeviceMesh of one dimension, or None
    n_classes: int,  # V
) -> Shards:
    "What this rank owns of so many classes."
    if mesh is None:
        return Shards(n_classes, 0, n_classes)
    mine = shard_range(n_classes, mesh.size(), mesh.get_local_rank())
    return Shards(n_classes, mine.start, mine.stop, mesh.get_group())


def shards_of(
    weight: Tensor,  # a DTensor [V,H]; or this rank's rows of it
    mesh=None,  # of the ranks, where `weight` is but rows
    n_classes: Optional[int] = None,  # V, likewise
) -> Shards:
    "Where a weight's rows are; `ValueError` if they are elsewhere than `Shard(0)` says."
    check_mesh(mesh)
    if is_dtensor(weight):
        expect(
            is_row_sharded(weight),
            "linear_weight",
            "[Shard(0)] on a mesh of one dimension",
            f"{list(weight.placements)} on {weight.device_mesh.ndim}",
        )
        mesh, n_classes = weight.device_mesh, weight.shape[0]
    if mesh is None:
        return shards_on(None, len(weight))
    expect(
        mesh.ndim == 1 and type(n_classes) is int,
        "mesh",
        "one dimension, and num_classes beside it",
        f"{mesh.ndim}, {n_classes}",
    )
    s, here = shards_on(mesh, n_classes), weight.to_local() if is_dtensor(weight) else weight
    expect(len(here) == s.stop - s.start, "linear_weight", f"{s.stop - s.start} of {n_classes} rows here", len(here))
    return s


def is_token_sharded(input: Tensor) -> bool:
    "Whether a DTensor's tokens lie over the ranks."
    return is_dtensor(input) and input.placements[0].is_shard()


def dtensor_like(local: Tensor, like: Tensor) -> Tensor:
    "A DTensor of local rows, shaped and placed as `like`, or as its first dimension."
    from torch.distributed.tensor import DTensor

    shape = like.shape[: local.dim()]
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def dtensor_of_rows(rows: Tensor, mesh, shape: torch.Size) -> Tensor:  # DTensor of `shape`
    "A DTensor of each rank's rows."
    from torch.distributed.tensor import DTensor, Shard

    if mesh is None:
        return rows
    return DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride()
    )


LINE_BYTES = 128  # rows of a packet start on lines of memory, as matmuls read them


class LabelledRows(NamedTuple):
    "Views of rows that travel with their labels."

    labels: Tensor  # [n] int64
    weights: Tensor  # [n] float64
    features: Tensor  # [n,H]


def packet_bytes(n_features: int, dtype: torch.dtype) -> int:
    "Bytes of a row, its label and its weight, in whole lines."
    needed = n_features * dtype.itemsize + 16
    return needed + -needed % LINE_BYTES


def unpack(
    t: Tensor,  # [n, bytes]
    n_features: int,
    dtype: torch.dtype,
) -> LabelledRows:
    "What the bytes hold: features first, label and weight last."
    labels, weights = t[:, -16:-8].view(torch.int64), t[:, -8:].view(torch.float64)
    return LabelledRows(labels[:, 0], weights[:, 0], t[:, : n_features * dtype.itemsize].view(dtype))


def pack(
    x: Tensor,  # [n,H]
    y: Tensor,  # [n]
    token_weight: Optional[Tensor],  # [n] or None
    rows: int,  # as many as the rank with most
    ignore_index: int,
) -> Tensor:  # [rows, bytes]
    "Rows and their labels; rows that pad are ignored."
    if x.stride(1) != 1:  # a clone, as contiguous() leaves strides where there is no row, or one feature
        x = x.clone(memory_format=torch.contiguous_format)
    beside = packet_bytes(x.shape[1], x.dtype) - x.shape[1] * x.dtype.itemsize
    packet = torch.cat([x.detach().view(torch.uint8), x.new_zeros(len(x), beside, dtype=torch.uint8)], 1)
    if rows > len(x):
        packet = F.pad(packet, (0, 0, 0, rows - len(x)))
    own = unpack(packet, x.shape[1], x.dtype)
    own.labels[: len(x)], own.labels[len(x) :] = y, ignore_index
    if token_weight is not None:
        own.weights[: len(x)] = token_weight.detach()
    return packet


def collective(*names: str) -> Callable:
    "The first of PyTorch's collectives that this version has; it gave two of them new names."
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


def start_gather(
    t: Tensor,  # of one shape on all ranks
    s: Shards,
    aside: bool = True,  # while other work goes on; else in its turn
) -> Callable[[], Tensor]:  # returns [R, *t.shape]
    "Start an exchange; what is returned waits for it, and gives what every rank has, in order."
    if s.group is None or not t.numel():
        return lambda: t.expand(s.ranks, *t.shape)
    out, gather = t.new_empty((s.ranks, *t.shape)), collective("all_gather_single", "all_gather_into_tensor")
    work = gather(out.flatten(0, 1), t.contiguous(), group=s.group, async_op=aside)

    def arrive():
        if aside:
            work.wait()
        return out

    return arrive


def all_gather(t: Tensor, s: Shards) -> Tensor:  # [R, *t.shape]
    "What every rank has, in order."
    return start_gather(t, s, aside=False)()


def all_reduce(t: Tensor, s: Shards) -> Tensor:
    "The sum over ranks, in place of a contiguous tensor: of others a group adds up what lies at one place in memory."
    t = t.contiguous()
    if s.group is not None:
        dist.all_reduce(t, group=s.group)
    return t


class RankTokens(NamedTuple):
    "Whose tokens a rank scores."

    shared: bool  # all ranks have the same; else each has its own
    own: int  # tokens of this rank
    rows: int  # of the rank with most
    factor: int = 1  # input's gradient is multiplied by this, as its wrapper divides

    def token_slice(self, s: Shards) -> slice:
        "This rank's tokens among all that are scored."
        start = 0 if self.shared else s.rank * self.rows
        return slice(start, start + self.own)


def gather_rows(
    x: Tensor,
    y: Tensor,
    token_weight: Optional[Tensor],
    b: RankTokens,
    s: Shards,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Optional[Tensor]]:  # [N,H], [N], [N] or None
    "The tokens that are scored: all of every rank's, in one collective."
    if b.shared or s.group is None:
        return x, y, token_weight
    gathered = all_gather(pack(x, y, token_weight, b.rows, ignore_index), s).flatten(0, 1)
    p = unpack(gathered, x.shape[1], x.dtype)
    weights = None if token_weight is None else p.weights.to(acc_dtype(x.dtype))
    return p.features, p.labels.contiguous(), weights  # kernels read labels one after the other


def reduce_scatter_rows(
    total: Tensor,  # [N,H], what this rank adds
    b: RankTokens,
    s: Shards,
    aside: bool = True,  # while other work goes on; else in its turn
) -> Callable[[], Tensor]:  # returns [own,H]
    "Start the sum over ranks, each row to its rank; what is returned waits for it."
    if s.group is None or not total.numel():
        return lambda: total[: b.own]
    out, start = total, dist.all_reduce
    if not b.shared:
        out = total.new_empty(b.rows, total.shape[1])
        start = functools.partial(collective("reduce_scatter_single", "reduce_scatter_tensor"), out)
    work = start(total.contiguous(), group=s.group, async_op=aside)

    def arrive():
        if aside:
            work.wait()
        return out[: b.own] if b.factor == 1 else out[: b.own].mul_(b.factor)

    return arrive


def shifted_ahead(
    t: Tensor,  # [..., T]
    k: int,
    fill: float,  # past the end
    each: int,  # tokens of the first rank; 0 where the sequence is not shared
    s: Shards,
) -> Tensor:  # [..., T]
    "What stands k positions ahead of each token."
    here, start = t.shape[-1], s.rank * each
    if each:
        padded = F.pad(t, (0, each - here), value=fill)
        t = all_gather(padded, s).movedim(0, -2).flatten(-2)
    t = F.pad(t[..., k:], (0, min(k, t.shape[-1])), value=fill)
    return t[..., start : start + here]


def within(
    size: int,  # T of all ranks
    k: int,  # the shift
    each: int,  # as for `shifted_ahead`
    here: int,  # T here
    s: Shards,
) -> int:
    "How many of this rank's tokens have a target k ahead."
    return smaller_size(larger_size(size - k - s.rank * each, 0), here)


def shift_targets_of_ranks(
    y: Tensor,  # [..., T] here
    token_weight: Optional[Tensor],  # of this rank's tokens
    k: int,
    size: int,  # T of all ranks
    ignore_index: int,
    each: int,  # as for `shifted_ahead`
    s: Shards,
) -> tuple[Tensor, Optional[Tensor], int]:
    "Labels and weights k ahead, and how many of this rank's tokens have a label there."
    weight = None if token_weight is None else shifted_ahead(token_weight, k, 0.0, each, s)
    return shifted_ahead(y, k, ignore_index, each, s), weight, within(size, k, each, y.shape[-1], s)


def tuning_agreement(
    x: Tensor,  # all ranks' rows
    dtype: torch.dtype,  # of products
    s: Shards,
    *kind,  # words and numbers that are the same on all ranks
):
    "What ranks agree on where variants of kernels are timed; None elsewhere."
    if isinstance(x, FakeTensor) or not is_timed(x, dtype, -(-s.n_classes // s.ranks)):
        return None
    return rank_agreement(s.group, x.device, x.shape[1], s.n_classes, dtype, *kind)


_said = weakref.WeakKeyDictionary()  # by process group, then by kind of call


def all_say(
    flag: bool,
    s: Shards,
    device: torch.device,  # of the group's tensors
    *kind,  # of the question: words and numbers that are the same on all ranks
) -> bool:
    "Whether all ranks say so; a collective where a kind is asked for the first time."
    if s.group is None:
        return flag
    said = _said.setdefault(s.group, {})
    if kind in said or is_capturing():
        return said.get(kind, False)
    said[kind] = bool(all_gather(torch.tensor([int(flag)], device=device), s).min())
    return said[kind]


def fingerprint(t: Tensor) -> Tensor:  # [2], float64
    "Two numbers that change when `t` does."
    flat = t.detach().double().nan_to_num(12345.0, 1e300, -1e300).flatten()
    steps = torch.arange(len(flat), device=t.device) % 97 + 1
    return torch.stack([flat.sum(), flat @ steps.double()])


def check_same_on_ranks(what: str, t: Tensor, s: Shards):
    "`RuntimeError` on every rank if `t` is not the same on all; one collective."
    if s.group is None or not is_debugged():
        return
    seen = all_gather(fingerprint(t), s)
    others = (seen != seen[0]).any(1).nonzero().flatten().tolist()
    if not others:
        return
    raise RuntimeError(f"{what}: ranks {others} of {s.ranks} have another than rank 0")


FACTS_BYTES = 4096  # of what a rank says of its call


def written(facts: dict[str, Any], device: torch.device | str) -> Tensor:  # uint8 [FACTS_BYTES]
    "Facts as bytes, of one length whatever they are."
    text = json.dumps(facts, default=str, ensure_ascii=False).encode()
    assert len(text) <= FACTS_BYTES, f"{len(text)} bytes of facts, more than {FACTS_BYTES}"
    return torch.frombuffer(bytearray(text.ljust(FACTS_BYTES)), dtype=torch.uint8).to(device)


def error_facts(error: Exception) -> dict[str, Any]:
    return dict(error=str(error)[:1000])


def found_facts(
    look: Callable[[], dict[str, Any]],  # checks a call; what ranks have to know of it
) -> tuple[dict[str, Any], Optional[Exception]]:
    "The facts of a call; or an error, and that there was one."
    try:
        return look(), None
    except Exception as error:
        return error_facts(error), error


def facts_device(s: Shards, device: torch.device | str) -> torch.device | str:
    "Where facts travel: on the host, if the group has a backend for it."
    try:
        s.group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return device
    return "cpu"


def is_compared_later(fact: Any) -> bool:
    "Whether it is a tensor on a GPU, which nobody waits for."
    return isinstance(fact, Tensor) and fact.is_cuda and not is_debugged()


def told_facts(facts: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
    "Facts in words and numbers, and the tensors that are compared later."
    later = [fact for fact in facts.values() if is_compared_later(fact)]
    number = lambda fact: dict(sums=fingerprint(fact).tolist()) if isinstance(fact, Tensor) else fact
    return {
        name: "a tensor on a GPU" if is_compared_later(fact) else number(fact) for name, fact in facts.items()
    }, later


def one_or_nan(tensors: Sequence[Tensor], s: Shards) -> Tensor:  # a scalar
    "1 if all ranks have the same tensors, else NaN; without waiting for their GPU."
    seen = all_gather(torch.cat([fingerprint(t) for t in tensors]), s)
    return torch.where((seen == seen[0]).all(), 1.0, torch.nan)


class Agreement(NamedTuple):
    "What ranks know of a call."

    calls: list[dict[str, Any]]  # the facts of each rank
    later: Sequence[Tensor] = ()  # on a GPU: compared behind the kernels of a call, which wait for no message then
    shards: Optional[Shards] = None

    def all_of(self, found: Sequence[Optional[Tensor]]) -> list[Optional[Tensor]]:
        "What a call computed, NaN where ranks were given other tensors; one collective."
        if not self.later:
            return [*found]
        factor = one_or_nan(self.later, self.shards)
        return [None if t is None else t * factor.to(t.dtype) for t in found]

    def of(self, loss: Tensor) -> Tensor:
        "Likewise of a call that computed but one."
        return self.all_of([loss])[0]


def words_of_ranks(said: list) -> str:
    "What each rank says of one fact; of tensors, whose differs."
    if not all(isinstance(fact, dict) and "sums" in fact for fact in said):
        return str(dict(enumerate(said)))
    return f"another on ranks {[rank for rank, fact in enumerate(said) if fact != said[0]]} than on rank 0"


def check_calls(
    calls: list[dict[str, Any]],
    own: tuple[str, ...],
    hints: dict[str, str],
):
    "`ValueError` that names the first error of a rank, or the first fact that is not the same on all."
    for rank, facts in enumerate(calls):
        expect(
            "error" not in facts,
            "mesh",
            "ranks whose arguments are right",
            f"an error on rank {rank}: {facts.get('error')}",
        )
    for name in [name for name in calls[0] if name not in own]:  # in one order, so that all name the same
        said = [facts.get(name) for facts in calls]
        expect(said == said[:1] * len(said), name, "the same on all ranks" + hints.get(name, ""), words_of_ranks(said))


class _Talks(threading.local):
    "How often ranks have talked of a call of this thread."

    count = 0


_talks = _Talks()


def mesh_of_call(args: tuple, given: dict) -> Optional[DeviceMesh]:  # of a loss: its arguments
    "The ranks over which a call's classes lie."
    weight = given.get("linear_weight", args[1] if len(args) > 1 else None)
    weight = getattr(weight, "weight", weight)  # of a module
    return weight.device_mesh if is_dtensor(weight) else given.get("mesh")


def tell_error(error: Exception, mesh: Any):
    "Let ranks know that wait to hear of a call; nothing where none can, or all know."
    none = not isinstance(mesh, DeviceMesh) or mesh.ndim != 1 or is_capturing()
    if none or getattr(error, "ranks_know", False):
        return
    s = shards_on(mesh, 0)
    all_gather(written(error_facts(error), facts_device(s, mesh.device_type)), s)


Call = TypeVar("Call", bound=Callable[..., Any])


def tells_ranks(
    mesh_of: Callable[[tuple, dict], Any],  # takes a call's arguments
) -> Callable[[Call], Call]:
    "Decorates a call over ranks: an error before they have talked of it is told to all."

    def decorated(call):
        @functools.wraps(call)
        def told(*args, **given):
            if torch.compiler.is_compiling():
                return call(*args, **given)  # ranks talk when the graph runs
            before = _talks.count
            try:
                return call(*args, **given)
            except Exception as error:
                if _talks.count == before:
                    tell_error(error, mesh_of(args, given))
                error.ranks_know = True
                raise

        return told

    return decorated


def agreed_facts(
    look: Callable[[], dict[str, Any]],  # checks a call; what ranks have to know of it
    s: Shards,
    device: torch.device | str,
    own: tuple[str, ...] = (),  # names of facts that may be others on each rank
    hints: dict[str, str] = {},  # what to do, by the name of a fact
) -> Agreement:
    "What ranks say of a call, in one collective; all raise where one found an error, or was given other facts."
    if s.group is None:
        return Agreement([look()])
    found, error = found_facts(look)
    facts, later = told_facts(found)
    _talks.count += 1
    rows = all_gather(written(facts, facts_device(s, device)), s).cpu().numpy()
    if error:
        raise error
    calls = [facts] * len(rows)
    if (rows != rows[0]).any():
        calls = [json.loads(row.tobytes()) for row in rows]
        check_calls(calls, own, hints)
    return Agreement(calls, later, s)
