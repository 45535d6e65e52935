"""For each puzzle: the arrays, the grid and the sizes of two launches, what must stand in the outputs afterwards, and the wrong answers that usual mistakes give."""

from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

from workbook.puzzles.watch import ANYONE, Array


class Case(NamedTuple):
    "One launch, and what it must do."

    arrays: dict[str, Array]
    grid: tuple[int, ...]
    others: dict[str, Any]  # sizes and constants, by name
    mistakes: dict[str, dict[str, Tensor]] = {}  # in words: what outputs it leads to
    regions: dict[str, Tensor] = {}  # in words: a part of the outputs of this shape
    strays: dict[tuple[str, int], str] = {}  # of an array and a program: why one element may be touched in error
    ahead: int = 0  # how many steps have to be loaded before their product; 0 if nobody asks


class Task(NamedTuple):
    "A puzzle: its title, and what makes its launches."

    title: str
    name: str  # of the kernel
    case: Callable[[int], Case]


TASKS: dict[int, Task] = {}


def task(title: str) -> Callable:
    "A decorator: the next puzzle."

    def add(case):
        TASKS[len(TASKS) + 1] = Task(title, case.__name__, case)
        return case

    return add


def normal(seed: int, *shape: int) -> Tensor:
    "Normal numbers in float32."
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(seed: int, rows: int, classes: int, ignored: int = -1, ignore_index: int = -100) -> Tensor:
    "Random labels, the last row's in the last class; one row may have `ignore_index`."
    y = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(seed))
    y[-1] = classes - 1
    if ignored >= 0:
        y[ignored] = ignore_index
    return y


def tiles(size: int, tile: int) -> int:
    "How many tiles cover so many rows or columns."
    return -(-size // tile)


def by_row(row: int, column: int) -> int:
    "The program of a tile is its row's."
    return row


def by_column(row: int, column: int) -> int:
    "The program of a tile is its column's."
    return column


def anyone(row: int, column: int) -> int:
    "Every program may touch the tile."
    return ANYONE


@task("A row's maximum")
def row_max(which):
    N, V = [(5, 16), (3, 32)][which]
    z = normal(which, N, V)
    return Case(
        {"z": Array(z, tile=(1, V)), "out": Array(None, z.double().amax(1))},
        (N,),
        dict(V=V),
        {
            "It is the sum of the row, not its maximum.": {"out": z.double().sum(1)},
            "It is the minimum of the row, not its maximum.": {"out": z.double().amin(1)},
        },
    )


@task("A row that does not fill its block")
def masked_max(which):
    N, V = [(5, 27), (4, 19)][which]
    z = normal(which, N, V)
    z = z - z.max() - 1
    z[1] -= 50
    z[2, -1] = z[2].max() + 0.5
    return Case(
        {"z": Array(z, tile=(1, 32)), "out": Array(None, z.double().amax(1))},
        (N,),
        dict(V=V, BV=32),
        {
            "The lanes beyond the row count as 0, which is larger than every score here. Of a maximum, −∞ is neutral.": {
                "out": z.double().amax(1).clamp(min=0)
            }
        },
    )


@task("A sum of exponentials that does not overflow")
def log_sum_exp(which):
    N, V = [(4, 27), (3, 19)][which]
    z = normal(which, N, V).mul(3)
    z[1] += 100
    z[2] -= 200
    z = z.half()
    expected, beyond = z.double().logsumexp(1), 32 - V
    padded = torch.cat([z.double(), torch.zeros(N, beyond, dtype=torch.float64)], 1).logsumexp(1)
    return Case(
        {"z": Array(z, tile=(1, 32)), "out": Array(None, expected)},
        (N,),
        dict(V=V, BV=32),
        {
            "The lanes beyond the row are counted as scores of 0.": {"out": padded},
            "The exponentials are taken of the scores as they are: e¹⁰⁰ overflows and e⁻²⁰⁰ is 0. "
            "Subtract the row's maximum first, and add it to the logarithm.": {"out": z.float().exp().sum(1).log()},
            "It is the logarithm of the sum relative to the maximum: the maximum has to be added.": {
                "out": expected - z.double().amax(1)
            },
        },
    )


@task("The online softmax")
def online_log_sum_exp(which):
    N, V = [(4, 75), (3, 50)][which]
    z = normal(which, N, V).mul(2) + torch.arange(V) / 8
    z[1] -= 300
    expected, running = z.double().logsumexp(1), z.double().cummax(1).values
    blocks = [part.double() for part in z.split(32, 1)]
    unscaled = sum((part - running[:, min(32 * k + 31, V - 1), None]).exp().sum(1) for k, part in enumerate(blocks))
    return Case(
        {"z": Array(z, tile=(1, 32), owner=by_row), "out": Array(None, expected)},
        (N,),
        dict(V=V, BV=32),
        {
            "The sum is not rescaled when the maximum rises: what was summed so far is relative to the old maximum.": {
                "out": unscaled.log() + z.double().amax(1)
            },
            "The running maximum begins with 0: where all scores are far below, every exponential is 0. Begin with −∞.": {
                "out": torch.where(torch.arange(N) == 1, -torch.inf, expected)
            },
        },
    )


IGNORED = [-100, 255]  # `ignore_index` of the first launch and of the second, where it is no negative number


def loss_of(z: Tensor, y: Tensor, ignore_index: int = -100) -> Tensor:
    "Cross entropy of each row in float64; 0 where the label is `ignore_index`."
    return torch.nn.functional.cross_entropy(z.double(), y, reduction="none", ignore_index=ignore_index)


@task("The loss of a label")
def label_loss(which):
    N, V = [(5, 75), (4, 50)][which]
    ignore_index = IGNORED[which]
    z, y = normal(which, N, V) * 3, labels(which, N, V, 2, ignore_index)
    loss, ignored = loss_of(z, y, ignore_index), (y == ignore_index)
    lse, spare = z.double().logsumexp(1), ignored[:, None].expand(N, V)
    return Case(
        {
            "z": Array(z, tile=(1, 32), owner=by_row, times=1 + 1 / V, spare=spare),
            "y": Array(y),
            "out": Array(None, loss),
        },
        (N,),
        dict(V=V, ignore_index=ignore_index, BV=32),
        {
            "It is the log-probability of the label; the loss is its negative.": {"out": -loss},
            "The row whose label is `ignore_index` has a loss: it must be 0.": {"out": torch.where(ignored, lse, loss)},
        },
        {"in the row whose label is `ignore_index`": ignored},
        {("z", 2): f"Row 2's label is `ignore_index`: z[{ignore_index}] is no score, and must not be loaded."},
    )


def score_grad(z: Tensor, y: Tensor, ignore_index: int = -100) -> Tensor:
    "Softmax minus one-hot in float64; 0 in ignored rows."
    z = z.double().requires_grad_()
    return torch.autograd.grad(loss_of(z, y, ignore_index).sum(), z)[0]


@task("The gradient in the place of the scores")
def grad_in_place(which):
    N, V, g = [(4, 43, 0.5), (3, 27, -2.0)][which]
    ignore_index = IGNORED[which]
    z, y = normal(which, N, V) * 3, labels(which, N, V, 1, ignore_index)
    p, dz = z.double().softmax(1), score_grad(z, y, ignore_index)
    ignored = (y == ignore_index)[:, None]
    local = torch.where(torch.arange(V) % 16 == y[:, None], p - 1, p).masked_fill(ignored, 0)
    arrays = {
        "z": Array(z, g * dz, tile=(1, 16), owner=by_row, spare=ignored.expand(N, V)),
        "y": Array(y),
        "lse": Array(z.logsumexp(1), spare=ignored),
    }
    return Case(
        arrays,
        (N,),
        dict(V=V, g=g, ignore_index=ignore_index, BV=16),
        {
            "The gradient lacks the factor g.": {"z": dz},
            "The one of the one-hot vector is not subtracted: this is the softmax.": {
                "z": g * p.masked_fill(ignored, 0)
            },
            "The label is compared with the place in the block: each block subtracts a one. Compare it with the class.": {
                "z": g * local
            },
            "The row whose label is `ignore_index` has a gradient: it must be 0.": {
                "z": torch.where(ignored, g * p, g * dz)
            },
        },
        {"in the row whose label is `ignore_index`": ignored.expand(N, V)},
    )


@task("Rows with strides")
def strided_log_sum_exp(which):
    N, V = [(4, 27), (3, 19)][which]
    strides = [(2**30, 2), (1, 2**27)][which]  # 3 · 2³⁰ is more than an int32 holds
    z = normal(which, N, V) * 3
    return Case(
        {"z": Array(z, tile=(1, 32), strides=strides), "out": Array(None, z.double().logsumexp(1))},
        (N,),
        dict(V=V, stride_n=strides[0], stride_v=strides[1], BV=32),
    )


@task("One-hot by comparison")
def target_minus_mean(which):
    N, V, BN, BV = [(10, 27, 4, 16), (6, 40, 4, 16)][which]
    z, y = normal(which, N, V) * 3, labels(which, N, V)
    z_y, mean = z.double().gather(1, y[:, None])[:, 0], z.double().mean(1)
    local = z.double().where(torch.arange(V) % BV == y[:, None], 0).sum(1)
    return Case(
        {"z": Array(z, tile=(BN, BV)), "y": Array(y, tile=(BN, 1)), "out": Array(None, z_y - mean, tile=(BN, 1))},
        (tiles(N, BN),),
        dict(N=N, V=V, BN=BN, BV=BV),
        {
            "The mean is over the lanes of the blocks, not over the V classes.": {
                "out": z_y - mean * V / (tiles(V, BV) * BV)
            },
            "The sum is divided by the BV lanes of one block, not by the V classes.": {"out": z_y - mean * V / BV},
            "The label is compared with the place in the tile. Compare it with the class.": {"out": local - mean},
            "The target's score is missing.": {"out": -mean},
            "It is the target's score alone: the mean of the row is missing.": {"out": z_y},
        },
    )


@task("A sum down the columns")
def column_sum(which):
    N, V, BN, BV = [(37, 24, 8, 16), (50, 40, 8, 16)][which]
    dz = (normal(which, N, V) + 3).mul(40).half()
    out = Array(None, dz.double().sum(0)[None], tile=(1, BV), owner=by_column)
    return Case(
        {"dz": Array(dz, tile=(BN, BV), owner=by_column), "out": out},
        (tiles(V, BV),),
        dict(N=N, V=V, BN=BN, BV=BV),
        {
            "It is the sum of the last rows only: the sum is overwritten and not added to.": {
                "out": dz[N - (N % BN or BN) :].double().sum(0)[None]
            }
        },
    )


@task("Two outputs for each part of a row")
def part_stats(which):
    N, V, PART, P = [(4, 75, 32, 4), (3, 40, 16, 3)][which]
    z = normal(which, N, V) * 3
    parts = torch.nn.functional.pad(z.double(), (0, P * PART - V), value=-torch.inf).view(N, P, PART)
    row_max = parts.amax(2)
    s = (parts - row_max.clamp(min=-1e9)[..., None]).exp().sum(2)
    owner = lambda row, column: row * P + column
    empty = torch.arange(P).mul(PART).ge(V).expand(N, P)
    arrays = {
        "z": Array(z, tile=(1, PART), owner=owner),
        "max": Array(None, row_max, owner=owner),
        "sum": Array(None, s, owner=owner),
    }
    return Case(
        arrays,
        (N, P),
        dict(V=V, P=P, PART=PART),
        {"The sum is not relative to the part's maximum.": {"sum": parts.exp().sum(2)}},
        {"in the part that lies beyond the row": empty},
    )


@task("The merge of parts")
def merge_parts(which):
    N, P, BP = [(5, 6, 8), (4, 3, 4)][which]
    row_max, s = normal(which, N, P) * 5, normal(which + 9, N, P).abs() + 1
    row_max[1] -= 300
    row_max[0, -1], s[0, -1] = -torch.inf, 0
    row_max[2], s[2] = -torch.inf, 0
    merged = (row_max.double() + s.double().log()).logsumexp(1)
    return Case(
        {"max": Array(row_max, tile=(1, BP)), "sum": Array(s, tile=(1, BP)), "out": Array(None, merged)},
        (N,),
        dict(P=P, BP=BP),
        {
            "The sums are added as they are, but each is relative to its own part's maximum.": {
                "out": row_max.double().amax(1) + s.double().sum(1).log()
            }
        },
        {"in the row whose parts are all empty": torch.arange(N) == 2},
    )


def layer(which: int, N: int, V: int, H: int) -> tuple[Tensor, Tensor, Tensor]:
    "Hidden states and weights in float16, and their scores in float64."
    x, w = normal(which, N, H).half(), normal(which + 9, V, H).half()
    return x, w, x.double() @ w.double().T


DROPPED = "All scores are 0: `tl.dot` returns its result, and leaves its operands as they are."


@task("A product and its log-sum-exp in one kernel")
def linear_log_sum_exp(which):
    N, V, H, B = [(20, 40, 24, 16), (17, 25, 40, 16)][which]
    x, w, z = layer(which, N, V, H)
    zeros = torch.nn.functional.pad(z, (0, tiles(V, B) * B - V))  # of whole tiles
    kept = zeros.view(N, -1, B).cumsum(1).view(N, -1)[:, :V].logsumexp(1)
    dropped = (0 * z).logsumexp(1)
    return Case(
        {
            "x": Array(x, tile=(B, B), times=tiles(V, B)),
            "w": Array(w, tile=(B, B), owner=anyone, times=tiles(N, B)),
            "out": Array(None, z.logsumexp(1), tile=(B, 1), tolerance=1e-4),
        },
        (tiles(N, B),),
        dict(N=N, V=V, H=H, BN=B, BV=B, BH=B),
        {
            "Classes beyond V count with a score of 0. Their scores have to be −∞.": {"out": zeros.logsumexp(1)},
            "The products of one tile of classes are still there when the next one begins: its sum must begin with 0.": {
                "out": kept
            },
            DROPPED: {"out": dropped},
        },
    )


NOT_ADDED = "dx is 0: `tl.dot` returns its sum, which has to be kept."


@task("Scores recomputed for the gradient")
def linear_grad(which):
    N, V, H, B = [(20, 40, 32, 16), (17, 25, 16, 16)][which]
    x, w, z = layer(which, N, V, H)
    y = labels(which, N, V)
    lse, dx, p = z.logsumexp(1), score_grad(z, y) @ w.double(), z.softmax(1)
    dropped = torch.exp(-lse)[:, None] - torch.nn.functional.one_hot(y, V)
    return Case(
        {
            "x": Array(x, tile=(B, H)),
            "w": Array(w, tile=(B, H), owner=anyone, times=tiles(N, B)),
            "y": Array(y, tile=(B, 1)),
            "lse": Array(lse.float(), tile=(B, 1)),
            "dx": Array(None, dx, tile=(B, H), tolerance=3e-3),
        },
        (tiles(N, B),),
        dict(N=N, V=V, H=H, BN=B, BV=B),
        {
            "The one of the one-hot vector is not subtracted.": {"dx": p @ w.double()},
            "The gradient has the wrong sign.": {"dx": -dx},
            DROPPED: {"dx": dropped @ w.double()},
            NOT_ADDED: {"dx": 0 * dx},
        },
    )


@task("Skipped tiles")
def filtered_grad(which):
    N, V, H, B = [(32, 64, 16, 16), (20, 40, 16, 16)][which]
    x, w, z = layer(which, N, V, H)
    y, eps = labels(which, N, V), 0.0625
    dz = score_grad(z, y)
    full = torch.nn.functional.pad(dz, (0, tiles(V, B) * B - V, 0, tiles(N, B) * B - N))
    bound = torch.stack([torch.stack([t.abs().amax() for t in rows.split(B, 1)]) for rows in full.split(B)])
    order = torch.arange(bound.numel()).view_as(bound)
    bound = torch.where((order + which) % 3 == 1, bound * 0.01, bound.clamp(min=eps)).float()
    bound[0, 2] = eps  # exactly
    places = lambda of_tiles: of_tiles.repeat_interleave(B, 0).repeat_interleave(B, 1)[:N, :V]
    kept = places(bound >= eps)
    allowed = (bound >= eps).repeat_interleave(B, 1)[:, :V].repeat_interleave(H, 1).numpy()
    return Case(
        {
            "x": Array(x, tile=(B, H)),
            "w": Array(w, tile=(B, H), owner=anyone, times=allowed.sum() / (V * H), allowed=allowed),
            "y": Array(y, tile=(B, 1)),
            "lse": Array(z.logsumexp(1).float(), tile=(B, 1)),
            "bound": Array(bound, tile=(1, 1)),
            "dx": Array(None, (dz * kept) @ w.double(), tile=(B, H), tolerance=3e-3),
        },
        (tiles(N, B),),
        dict(N=N, V=V, H=H, T=tiles(V, B), eps=eps, BN=B, BV=B),
        {
            "No tile is skipped.": {"dx": dz @ w.double()},
            "The tiles that should be kept are skipped.": {"dx": (dz * ~kept) @ w.double()},
            "A tile whose bound is eps is skipped; only those below eps may be.": {
                "dx": (dz * places(bound > eps)) @ w.double()
            },
            "The first tile that is skipped ends the loop: those after it count.": {
                "dx": (dz * places((bound >= eps).int().cummin(1).values.bool())) @ w.double()
            },
            NOT_ADDED: {"dx": 0 * dz @ w.double()},
        },
    )


@task("A persistent loop")
def softmax_tiles(which):
    N, V, BN, BV = [(14, 43, 4, 16), (10, 27, 4, 16)][which]
    z, programs = normal(which, N, V) * 3, [5, 3][which]
    owner = lambda row, column: (row * tiles(V, BV) + column) % programs
    return Case(
        {
            "z": Array(z, tile=(BN, BV), owner=owner),
            "lse": Array(z.logsumexp(1), tile=(BN, 1), owner=anyone, times=tiles(V, BV)),
            "out": Array(None, z.double().softmax(1), tile=(BN, BV), owner=owner),
        },
        (programs,),
        dict(N=N, V=V, BN=BN, BV=BV),
    )


@task("A pipelined load")
def pipelined_scores(which):
    N, V, H, B = [(20, 24, 72, 16), (16, 16, 56, 16)][which]
    x, w, z = layer(which, N, V, H)
    across, last = tiles(V, B), H - (H % B or B)
    return Case(
        {
            "x": Array(x, tile=(B, B), owner=anyone, times=across),
            "w": Array(w, tile=(B, B), owner=anyone, times=tiles(N, B)),
            "out": Array(None, z, tile=(B, B), owner=lambda row, column: row * across + column, tolerance=1e-4),
        },
        (tiles(N, B), across),
        dict(N=N, V=V, H=H, BN=B, BV=B, BH=B),
        {
            "The last step's product is missing.": {"out": x[:, :last].double() @ w[:, :last].double().T},
            DROPPED: {"out": 0 * z},
        },
        ahead=1,
    )


def lattice(seed: int, N: int, L: int, C: int) -> Tensor:
    "The class of each state, [N,2L+1]; the first two labels of the first row are equal."
    y = torch.randint(1, C, (N, L), generator=torch.Generator().manual_seed(seed))
    y[0, 1] = y[0, 0]
    states = torch.zeros(N, 2 * L + 1, dtype=torch.int64)
    states[:, 1::2] = y
    return states


def step_of(alpha: Tensor, log_probs: Tensor, states: Tensor, skips: Tensor) -> Tensor:
    "One step of the forward variable in float64, [N,S]."
    behind = lambda by: torch.nn.functional.pad(alpha.double(), (by, 0), value=-torch.inf)[:, : states.shape[1]]
    ways = torch.stack([alpha.double(), behind(1), behind(2).masked_fill(~skips, -torch.inf)])
    return ways.logsumexp(0) + log_probs.double().gather(1, states)


@task("A step of alpha")
def alpha_step(which):
    N, L, C = [(4, 5, 7), (3, 3, 5)][which]
    states, log_probs, S = lattice(which, N, L, C), normal(which, N, C).log_softmax(1), 2 * L + 1
    alpha = torch.where(torch.arange(S) < 4, normal(which + 9, N, S) - 300, -torch.inf)
    label = (states != 0) & (torch.arange(S) >= 2)
    skips = label & (states != states.roll(2, 1))
    wrong = lambda skips: {"out": step_of(alpha, log_probs, states, skips)}
    log_prob = Array(log_probs, tile=(1, C), times=S / C, spare=torch.ones(N, C, dtype=torch.bool))
    return Case(
        {
            "alpha": Array(alpha, tile=(1, 16), times=3),
            "log_prob": log_prob,
            "state": Array(states, tile=(1, 16), times=2),
            "out": Array(None, step_of(alpha, log_probs, states, skips), tile=(1, 16)),
        },
        (N,),
        dict(S=S, C=C, BS=16),
        {
            "No path goes on by two states.": wrong(skips & False),
            "Paths go on by two states between equal labels too: the blank between them is skipped.": wrong(label),
            "Paths go on by two states from blank to blank: a label is skipped.": wrong(
                torch.arange(S).expand(N, S) >= 2
            ),
        },
        {"in states that no path reaches": torch.isinf(step_of(alpha, log_probs, states, skips))},
    )


def scanned(stay: Tensor, enter: Tensor, after: Callable) -> Tensor:
    "A scan from the last time step to the first, in float64; what it combined to enters."
    steps = list(zip(stay.double().unbind(1), enter.double().unbind(1)))
    combined = [steps.pop()]
    while steps:
        combined.append(after(*combined[-1], *steps.pop()))
    return torch.stack([enter for _, enter in reversed(combined)], 1)


def later_first(late_stay: Tensor, late_enter: Tensor, stay: Tensor, enter: Tensor) -> tuple[Tensor, Tensor]:
    "Two stretches of time as one, the later one given first."
    return late_stay + stay, torch.logaddexp(stay + late_enter, enter)


def later_last(stay: Tensor, enter: Tensor, late_stay: Tensor, late_enter: Tensor) -> tuple[Tensor, Tensor]:
    "The same with the pairs exchanged."
    return later_first(late_stay, late_enter, stay, enter)


@task("Beta by a scan")
def beta_scan(which):
    N, T, BT = [(3, 13, 16), (2, 7, 8)][which]
    stay, enter = normal(which, N, T) - 2, normal(which + 9, N, T) - 100
    enter[:, -3] = -torch.inf
    beta, flipped = scanned(stay, enter, later_first), scanned(stay.flip(1), enter.flip(1), later_first).flip(1)
    padded = [torch.nn.functional.pad(t, (0, BT - T)) for t in (stay, enter)]
    return Case(
        {name: Array(t, tile=(1, BT)) for name, t in (("stay", stay), ("enter", enter))}
        | {"out": Array(None, beta, tile=(1, BT), tolerance=1e-5)},
        (N,),
        dict(T=T, BT=BT),
        {
            "The scan runs from the first time step to the last; beta comes from the other end.": {"out": flipped},
            "`after` has its pairs the wrong way round: the first is the later in time.": {
                "out": scanned(stay, enter, later_last)
            },
            "The lanes beyond T are combined as time steps. They have to change nothing: stay = 0 and enter = −∞.": {
                "out": scanned(*padded, later_first)[:, :T]
            },
            "It is what enters at each step alone, without what stays.": {"out": enter.double()},
        },
        {"where two steps or more are combined: look at `after`": (torch.arange(T) < T - 1).expand(N, T)},
    )
