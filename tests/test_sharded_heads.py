"""A class head over ranks that one process plays, one after the other: against the head of one process, and with planted bugs."""
import itertools
import math
from types import ModuleType

import pytest
import torch

import fusedloss.sharded_heads as sharded_heads
from fusedloss.margins import AdaFace, CosFace, SubCenter
from fusedloss.core.sampling import NegativeSampler
from fusedloss.partial_fc import PartialFC
from grids import few
from helpers import everywhere, fault_of, planted, unchanged

f64 = torch.float64
KINDS = {  # margin and its centres, share of the classes, whether the weight's gradient is rows
    "a sample": (lambda: CosFace(0.2, 8.0), 1, 0.6, True), "all": (lambda: CosFace(0.2, 8.0), 1, None, False),
    "sub-centres": (lambda: SubCenter(2, CosFace(0.2, 8.0)), 2, 0.5, True), "AdaFace": (lambda: AdaFace(momentum=0.5), 1, 0.6, True),
}


def played(module: ModuleType, ranks: int, kind: str, v: int) -> tuple[list, list]:
    "Loss, dx, dw, statistics and the sampler's step of all ranks; and those of one process"
    make, k, rate, sparse = KINDS[kind]
    g = torch.Generator().manual_seed(v)
    x, w, y = torch.randn(9, 4, generator=g, dtype=f64), torch.randn(v * k, 4, generator=g, dtype=f64), torch.randint(v, (9,), generator=g)
    y[4], x = -1, x.requires_grad_()
    options = lambda: dict(dtype=f64, sparse=sparse, margin=make(), sampler=None if rate is None else NegativeSampler(rate, 3))
    one, parts, said = PartialFC(v, 4, **options()), [], {}
    one.weight.data.copy_(w)
    exact = one(x, y)
    exact = [exact.detach(), *(t.to_dense() for t in torch.autograd.grad(exact, [x, one.weight]))]
    # what a rank says to the others is known once each has said it: twice, as nothing that is said depends on an answer
    for again in (False, True):
        parts.clear()
        for rank in range(ranks):
            span = module.shard_range(v, ranks, rank)
            head = module.ShardedPartialFC(v, 4, **options())
            head.weight = torch.nn.Parameter(w[span.start * k:span.stop * k])
            def all_gather(t, s, rank=rank):
                said[rank] = t
                return torch.stack([said.get(r, t) for r in range(ranks)])
            s = module.Shards(v, span.start, span.stop)
            with pytest.MonkeyPatch.context() as patch:
                everywhere(patch, module, "all_gather", all_gather)
                loss, _ = module.sharded_head_loss(head, x, y, s, head.sampler, f64)
                dx, dw = torch.autograd.grad(loss, [x, head.weight])
            if dw.is_sparse:
                dw = torch.zeros_like(w).index_add_(0, dw._indices()[0], dw._values())[span.start * k:span.stop * k]
            parts.append((loss.detach(), dx, dw, head))
    losses, dxs, dws, heads = zip(*parts)
    state = lambda head: [head.margin.mean if kind == "AdaFace" else torch.zeros(()), torch.tensor(0) if head.sampler is None else head.sampler.step]
    return [max(losses), sum(dxs), torch.cat(dws), *state(heads[-1])], [*exact, *state(one)]


PLAYED = [(kind, ranks, v) for (ranks, v), kind in itertools.product([(2, 4), (3, 11), (3, 4), (13, 5)], KINDS)]


def first_fault(module: ModuleType) -> str | None:
    "The first case in which ranks get something else than one process"
    for kind, ranks, v in PLAYED[4:12]:
        for name, a, e in zip(("loss", "dx", "dw", "statistics", "step"), *played(module, ranks, kind, v)):
            if a.shape != e.shape or not torch.allclose(a, e):
                return f"{name}, {kind}, {ranks}, {v}"
    whole = module.initial_rows(range(2 * module.BLOCK), 1, 5, "cpu", f64)
    if len(whole.unique()) < len(whole):
        return "blocks repeat"
    part = range(module.BLOCK - 3, module.BLOCK + 2)
    return None if torch.equal(module.initial_rows(part, 1, 5, "cpu", f64), whole[part.start:part.stop]) else "rows depend on who owns them"


@pytest.mark.parametrize("kind,ranks,v", few(PLAYED, *PLAYED[::3]))
def test_played_ranks_are_one_process(kind, ranks, v):
    torch.testing.assert_close(*played(sharded_heads, ranks, kind, v))


BUGS = {
    "gradients of another rank's rows": ("index = index + s.start * o.centers", "index = index + s.start"),
    "every rank draws as the first": ("sampler, sums, s.start)", "sampler, sums)"),
    "the negatives count on every rank": ("share = (lse - joined).exp_().nan_to_num_(0.0)", "share = torch.ones_like(lse)"),
    "the largest sum alone": ("joined = of_ranks.logsumexp(0)", "joined = of_ranks.amax(0)"),
    "cosines of one rank": ("return joined, cosines.sum(0), largest", "return joined, cos, largest"),
    "the cosine's gradient is shared too": ("share * g_lse, g_cos, None, None", "share * g_lse, share * g_cos, None, None"),
    "no classes, and yet a score": ("lse, largest = x.new_full((2, len(x)), -torch.inf)", "lse, largest = x.new_zeros(2, len(x))"),
    "labels of this rank alone": ("plain_labels(y, ignore, 0, head.num_classes, sums)", "plain_labels(y, ignore, s.start, s.stop, sums)"),
    "rows without a label are observed": ("head.margin.observe(norm, known)", "head.margin.observe(norm, known | True)"),
    "the sample stands still": ("if sampler is not None: sampler.advance()  # not for a step that raised\n    terms =", "terms ="),
    "blocks of a first weight repeat": ("generator.manual_seed(seed * 1_000_003 + block)", "generator.manual_seed(seed)"),
    "a first weight depends on its owner": ("out[first - rows.start:last - rows.start] = made[first - block * BLOCK:", "out[first - rows.start:last - rows.start] = made[:last - first] if first == rows.start else made[first - block * BLOCK:"),
}


def test_a_step_that_raises_has_drawn_nothing(monkeypatch):
    head = sharded_heads.ShardedPartialFC(50, 4, sample_rate=0.5)
    everywhere(monkeypatch, sharded_heads, "local_statistics", None)
    with pytest.raises(TypeError):
        head(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    assert head.sampler.step == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_row_that_overflowed_does_not_count_in_the_statistics(bad):
    heads = [sharded_heads.ShardedPartialFC(50, 4, margin=AdaFace(momentum=0.5)) for _ in range(2)]
    x, y = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])
    spoilt = x.clone()
    spoilt[1, 0] = bad
    heads[0](spoilt, y), heads[1](x, torch.tensor([0, -1, 2, 3]))
    assert heads[0].margin.state_dict() == heads[1].margin.state_dict()


def test_the_unchanged_source_passes(tmp_path):
    assert first_fault(planted(sharded_heads, tmp_path, *unchanged(BUGS.values()))) is None


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert fault_of(first_fault, sharded_heads, tmp_path, *BUGS[bug]), f"no case notices that {bug}"
