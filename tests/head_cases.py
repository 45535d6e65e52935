"""Heads, and what their steps, their optimizers and their kernels are tested with."""
import copy
import math
import sys

import pytest
import torch
import torch.nn.functional as F

from fusedloss import partial_fc
from fusedloss.core import cosine, negatives
from fusedloss.core.cosine import EPS
from fusedloss.core.negatives import RowIndex
from fusedloss.core.sampling import live_index
from fusedloss.margins import ArcFace
from fusedloss.row_sparse import RowSparse
from workbook.measure import relative_error
from helpers import TOLERANCE, everywhere, need_kernels
from test_margins import FORMULAS

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SGD, ADAMW, ADAGRAD = torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad
COUNT = 300  # classes of most heads here


@pytest.fixture
def place(device):
    "A device on which kernels run"
    need_kernels(device)
    return device


# --- the head against its definition ---

def definition(x, w, y, name, scored, k=1, log_q=None, conflict=None, mode="drop"):
    "The mean loss over the classes that are `scored` [V], all cosines in float64, by the formulas of the margins' tests"
    margin, formula = FORMULAS[name]
    x, w = x.double(), w.double()
    unit = lambda t: t / torch.where(t.norm(dim=-1) > 0, t.norm(dim=-1).clamp(min=EPS), 1.0).unsqueeze(-1)
    cos = (unit(x) @ unit(w).T).unflatten(-1, (-1, k)).amax(-1)
    valid, label = y >= 0, y.clamp(min=0)[:, None]
    hot = torch.zeros_like(cos, dtype=torch.bool).scatter_(1, label, True)
    c = cos.gather(1, label)[:, 0]
    z = margin.scale * (torch.relu(cos + 0.25) * (cos - 0.25) if name == "Circle" else cos)
    if conflict is not None:
        z = torch.where(cos > conflict, 0.0 if mode == "zero" else -1e6, z)
    if log_q:
        z = z - math.log(log_q) * (~torch.isin(torch.arange(len(scored)), y[valid])).double()
    z = z.masked_fill(hot | ~scored, -1e6)
    losses = F.softplus(z.logsumexp(1) - formula(c, torch.acos(c.clamp(-1, 1)), x.norm(dim=-1)), threshold=100)
    return torch.where(valid, losses, 0.0).sum() / max(int(valid.sum()), 1)


def scored_classes(head, y):
    "What the head's next step scores, by asking its sampler"
    mask = torch.zeros(head.num_classes, dtype=torch.bool)
    drawn = torch.arange(head.num_classes) if head.sampler is None else head.sampler(head.num_classes).cpu()
    mask[drawn[drawn >= 0]] = True
    mask[y[y >= 0].cpu()] = True
    return mask


def sample(n=23, h=6, v=COUNT, k=1, dtype=f64, device="cpu", seed=0):
    "Rows, some near their class; every fifth has no label, and two share one"
    g = torch.Generator().manual_seed(seed)
    w, y = torch.randn(v * k, h, generator=g, dtype=f64), torch.randint(v, (n,), generator=g)
    x = torch.randn(n, h, generator=g, dtype=f64)
    x[::3] += 2 * w[y[::3] * k]
    if n > 8:
        y[7] = y[3]
    return x.to(device, dtype), w.to(device, dtype), y.masked_fill(torch.arange(n) % 5 == 1, -1).to(device)


def known_to(module, margin):
    "The same margin, of a class that `module` takes for one: a planted module may have margins of its own"
    if isinstance(margin, module.Margin):
        return margin
    return getattr(sys.modules[module.Margin.__module__], type(margin).__name__)(**vars(margin))


def make_head(w, k=1, name="CosFace", module=partial_fc, **options):
    "A head with these vectors"
    margin = known_to(module, copy.deepcopy(FORMULAS[name][0]))
    margin = sys.modules[module.Margin.__module__].SubCenter(k, margin) if k > 1 else margin
    if isinstance(margin, torch.nn.Module):
        margin = margin.to(w.device)
    head = module.PartialFC(len(w) // k, w.shape[1], margin=margin, device=w.device, dtype=w.dtype, **options)
    head.weight.data.copy_(w)
    return head.train() if name != "AdaFace" else head  # its statistics are held by eval() of the margin alone


CASES = {
    "all": {}, "a tenth": dict(rate=0.1), "a third": dict(rate=0.37), "positives": dict(rate="positives"), "rate 1": dict(rate=1.0),
    "log q": dict(rate=0.2, log_q=True), "conflict": dict(rate=0.5, conflict=0.3), "conflict, all": dict(conflict=0.3),
    "conflict zero": dict(conflict=0.2, mode="zero"), "conflict and log q": dict(rate=0.4, conflict=0.3, mode="zero", log_q=True),
    "ArcFace": dict(rate=0.3, name="ArcFace"), "SphereFace": dict(rate=0.3, name="SphereFace"), "Circle": dict(rate=0.3, name="Circle"),
    "Circle, conflict": dict(rate=0.3, name="Circle", conflict=0.3), "AdaFace": dict(rate=0.3, name="AdaFace"),
    "MagFace": dict(rate=0.3, name="MagFace"), "MagFace, SubCenter": dict(k=2, name="MagFace"),
    "SubCenter": dict(rate=0.3, k=3), "SubCenter, all": dict(k=2), "SubCenter, Circle": dict(rate=0.3, k=2, name="Circle"),
    "SubCenter, log q": dict(rate=0.3, k=2, log_q=True), "few classes": dict(v=3, rate=0.5), "fewer than rows": dict(v=7, rate=0.9),
    "many rows": dict(n=70, rate=0.05), "dense gradient": dict(rate=0.3, sparse=False),
}


def faults(name="CosFace", rate=None, log_q=False, conflict=None, mode="drop", k=1, n=23, v=COUNT, dtype=f64, device="cpu",
           module=partial_fc, tolerance=None, h=6, **options):
    "What the head gets wrong, in words"
    x, w, y = sample(n, h, v, k, dtype, device)
    sampler = None if rate is None else module.NegativeSampler(rate, 11, log_q)
    head = make_head(w, k, name, module, sampler=sampler, conflict=conflict, conflict_mode=mode, **options)
    mask, x = scored_classes(head, y), x.requires_grad_()
    loss = head(x, y)
    got = loss.detach(), *torch.autograd.grad(loss * -1.7, [x, head.weight])
    xd, wd = x.detach().double().cpu().requires_grad_(), w.double().cpu().requires_grad_()
    exact = definition(xd, wd, y.cpu(), name, mask, k, rate if log_q else None, conflict, mode)
    exact = exact.detach(), *torch.autograd.grad(exact * -1.7, [xd, wd])
    limit = tolerance or TOLERANCE[dtype]
    dw = got[2]
    wrong = [f"{what} is off by {error:.1e}" for what, a, e in zip(("loss", "dx", "dw"), (*got[:2], dw.to_dense()), exact)
             if not (error := relative_error(a.cpu(), e)) <= limit]
    wrong += ["dw is dense" for _ in range(1) if dw.is_sparse != (rate is not None and options.get("sparse", True))]
    wrong += [f"{t} has another dtype" for t, a, b in (("dx", got[1], x), ("dw", dw, w)) if a.dtype != b.dtype]
    if dw.is_sparse:
        rows = mask.nonzero().flatten().repeat_interleave(k) * k + torch.arange(k).repeat(int(mask.sum()))
        if set(dw._indices()[0].tolist()) != set(rows.tolist()):
            wrong.append("dw names rows that were not scored")
    return wrong


# --- faults of other heads: F of the one with swapped sub-weights, I of the widely used one ---

def one_step(head, x, y, **options):
    optimizer = RowSparse(torch.optim.SGD, head.parameters(), lr=0.1, **options)
    head(x, y).backward()
    optimizer.step()
    return optimizer


def sparse_gradients(shape, n_steps, dtype, seed=0, count=5):
    "Rows and values of random steps"
    g = torch.Generator().manual_seed(seed)
    for _ in range(n_steps):
        yield torch.randperm(shape[0], generator=g)[:count], torch.randn(count, shape[1], generator=g, dtype=f64).to(dtype)


def given_rows(p, rows, values):
    "p's gradient as a head leaves it, a dead column among it"
    rows = torch.cat([rows[:2], torch.tensor([-1]), rows[2:]]).to(p.device)
    values = torch.cat([values[:2], torch.zeros(1, values.shape[1], dtype=values.dtype), values[2:]]).to(p.device)
    p.grad_rows = RowIndex(live_index(rows), rows)
    p.grad = torch.sparse_coo_tensor(p.grad_rows.index[None], values, p.shape, check_invariants=False)


def row_by_row(w, gradients, kind, options):
    "What PyTorch makes of each row by itself"
    out = w.clone()
    for r in range(len(w)):
        row = torch.nn.Parameter(w[r].clone())
        optimizer = kind([row], **options)
        for rows, values in gradients:
            if r in rows:
                row.grad = values[rows == r][0]
                optimizer.step()
        out[r] = row.detach()
    return out


# --- kernels, interpreted or compiled ---

def guarded(*shape, dtype=f32, device="cpu", values=None):
    "A tensor inside a larger one of NaN"
    around = torch.full((shape[0] + 12, *shape[1:]), math.nan, dtype=dtype, device=device)
    inner = around[6:6 + shape[0]]
    if values is not None:
        inner.copy_(values)
    return inner


@pytest.fixture
def kernels_for_all(place, monkeypatch):
    "The kernels take fp32, interpreted"
    if place != "cpu":
        pytest.skip("the kernels take fp32 in the interpreter alone")
    everywhere(monkeypatch, cosine, "has_kernel", lambda t: t.dtype != f64 and t.numel() > 0)
    everywhere(monkeypatch, negatives, "fits_kernels", lambda x, o: len(x) > 0 and o.centers == 1 and o.circle_margin < 0)
    return place


class Failing(ArcFace):
    "Fails when the cosines are there"
    def target_score(self, cos, norm):
        raise RuntimeError("no score")


def state_fault(heads, optimizers):
    "A word on what goes from one step to another, or from one row"
    x, w, y = sample()
    head = make_head(w, sample_rate=0.3, module=heads)
    optimizer = optimizers.RowSparse(SGD, head.parameters(), lr=0.1)
    losses = [head(x[:10], y[:10]), head(x[10:20], y[10:20])]
    losses[0].backward()  # as many rows as the last forward's, and others
    total = head.weight.grad.to_dense()
    optimizer.step()
    if not torch.allclose(head.weight, w - 0.1 * total):
        return "rows of another forward"
    if head.sampler.step != 1:
        return "steps are not counted"
    head.zero_grad()
    bad = x.clone()
    bad[y < 0] = math.nan
    head(bad, y).backward()
    if not head.weight.grad.to_dense().isfinite().all():
        return "ignored rows"


def failure_fault(heads, optimizers):
    "A word on what calls that fail, and calls that change the classes, do wrong"
    p, q = torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.zeros(1, 3).expand(4, 3))
    p.grad, q.grad = torch.ones(4, 3), torch.ones(4, 3)
    with pytest.raises(ValueError):
        optimizers.RowSparse(SGD, [p, q], lr=0.1).step()
    head, x = heads.PartialFC(9, 3, sample_rate=0.5), torch.randn(4, 3)
    optimizer, y = optimizers.RowSparse(SGD, head.parameters(), lr=0.1, momentum=0.9), torch.arange(4)
    alive = head(x, y)
    alive.backward()
    optimizer.step()
    with pytest.raises(ValueError):
        head.extend(5, optimizer, SGD([p], lr=0.1))
    if head.weight.grad is None or len(head.weight) != 9 or head.num_classes != 9 or (p != 1).any():
        return "what failed has changed something"
    head.extend(2, optimizer)
    if (head.weight[9:] == 0).all() or len(optimizer.state[head.weight]["momentum_buffer"]) != 11:
        return "new rows"
    head(x, y).backward()  # while `alive` is
    head.sampler.used.zero_()
    if head.remove([0], optimizer).tolist() != [-1, *range(10)]:
        return "numbers"
    head.margin = type("Failing", (Failing, heads.Margin), {})()
    with pytest.raises(RuntimeError):
        head(x, y)
    return None if head.sampler.used == 0 else "what failed has drawn"
