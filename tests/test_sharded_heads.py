"""A class head over ranks that one process plays, one after the other: against the head of one process, and with planted bugs."""
import itertools
import math
from types import ModuleType

import pytest
import torch

import fusedloss as fl
import fusedloss.sharded_heads as sharded_heads
from fusedloss.core import checks
from fusedloss.core.sampling import NegativeSampler
from fusedloss.margins import AdaFace, CosFace, SubCenter
from fusedloss.partial_fc import PartialFC
from grids import few
from helpers import everywhere, fault_of, planted, unchanged
from test_margins import MagFace, PerClass

f64 = torch.float64
KINDS = {  # margin and its centres, share of the classes, whether the weight's gradient is rows
    "a sample": (lambda: CosFace(0.2, 8.0), 1, 0.6, True), "all": (lambda: CosFace(0.2, 8.0), 1, None, False),
    "sub-centres": (lambda: SubCenter(2, CosFace(0.2, 8.0)), 2, 0.5, True), "AdaFace": (lambda: AdaFace(momentum=0.5), 1, 0.6, True),
    "lengths": (MagFace, 1, 0.6, True), "labels": (lambda: PerClass(torch.linspace(0, 0.5, 11, dtype=f64)), 1, None, False),
}


def played(module: ModuleType, ranks: int, kind: str, v: int, label: int = -1) -> tuple[list, list]:
    "Loss, dx, dw, statistics and the sampler's step of all ranks; and those of one process"
    make, k, rate, sparse = KINDS[kind]
    g = torch.Generator().manual_seed(v)
    x, w, y = torch.randn(9, 4, generator=g, dtype=f64), torch.randn(v * k, 4, generator=g, dtype=f64), torch.randint(v, (9,), generator=g)
    y[4], x = label, x.requires_grad_()
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
            head = type("Rank", (module.ShardedPartialFC,), dict(num_classes=v))(v, 4, **options())  # whose weight is a part of all
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
    state = lambda head: [head.margin.mean + head.margin.moves[0] if kind == "AdaFace" else torch.zeros(()), torch.tensor(0) if head.sampler is None else head.sampler.used]
    return [max(losses), sum(dxs), torch.cat(dws), *state(heads[-1])], [*exact, *state(one)]


PLAYED = [(kind, ranks, v) for (ranks, v), kind in itertools.product([(2, 4), (3, 11), (3, 4), (13, 5)], KINDS)]


def first_fault(module: ModuleType) -> str | None:
    "The first case in which ranks get something else than one process"
    for kind, ranks, v in PLAYED[6:18]:
        for name, a, e in zip(("loss", "dx", "dw", "statistics", "step"), *played(module, ranks, kind, v)):
            if a.shape != e.shape or not torch.allclose(a, e):
                return f"{name}, {kind}, {ranks}, {v}"
    whole = module.initial_rows(range(2 * module.BLOCK), 1, 5, "cpu", f64)
    if len(whole.unique()) < len(whole):
        return "blocks repeat"
    part = range(module.BLOCK - 3, module.BLOCK + 2)
    return None if torch.equal(module.initial_rows(part, 1, 5, "cpu", f64), whole[part.start:part.stop]) else "rows depend on who owns them"


@pytest.mark.parametrize("kind,ranks,v", few(PLAYED, *PLAYED[::5]))
def test_played_ranks_are_one_process(kind, ranks, v):
    torch.testing.assert_close(*played(sharded_heads, ranks, kind, v))


def test_a_label_outside_the_classes(monkeypatch):
    "Where nobody looks at labels, as on GPUs: the loss is NaN, and no gradient of any rank is"
    everywhere(monkeypatch, checks, "may_look", lambda t: False)
    (loss, *found, _, _), (wanted, *of_one, _, _) = played(sharded_heads, 3, "a sample", 11, 11)
    assert loss.isnan() and wanted.isnan() and not found[0][4].any()
    torch.testing.assert_close(found, of_one)


BUGS = {
    "gradients of another rank's rows": ("index = index + s.start * o.centers", "index = index + s.start"),
    "every rank draws as the first": ("sampler, sums, s.start)", "sampler, sums)"),
    "the negatives count on every rank": ("share = (lse - top - above).exp_().nan_to_num_(0.0)", "share = torch.ones_like(lse)"),
    "the largest sum alone": ("above = (of_ranks - top).exp_().sum(0).log_()", "above = (of_ranks - top).amax(0)"),
    "cosines of one rank": ("return top, above, cosines.sum(0), largest", "return top, above, cos, largest"),
    "the cosine's gradient is shared too": ("share * g_above, g_cos, None, None", "share * g_above, share * g_cos, None, None"),
    "no classes, and yet a score": ("lse, largest = x.new_full((2, len(x)), -torch.inf)", "lse, largest = x.new_zeros(2, len(x))"),
    "every rank has the lengths' gradient": ("head.num_classes, columns.x_rows >= 0)", "head.num_classes)"),
    "labels of this rank alone": ("plain_labels(y, ignore, 0, head.num_classes, sums)", "plain_labels(y, ignore, s.start, s.stop, sums)"),
    "rows without a label are observed": ("dim=-1)\n    head.margin.observe(norm, known)", "dim=-1)\n    head.margin.observe(norm, known | True)"),
    "the sample stands still": ("if sampler is not None: sampler.note_use()  # not for a step that raised\n    terms =", "terms ="),
    "blocks of a first weight repeat": ("generator.manual_seed(seed * 1_000_003 + block)", "generator.manual_seed(seed)"),
    "a first weight depends on its owner": ("out[first - rows.start:last - rows.start] = made[first - block * BLOCK:", "out[first - rows.start:last - rows.start] = made[:last - first] if first == rows.start else made[first - block * BLOCK:"),
}


def joined_loss(of_ranks: torch.Tensor, score: torch.Tensor, monkeypatch) -> tuple[torch.Tensor, torch.Tensor]:
    "Losses [N] of a target's score beside all ranks' lse [R,N], as `sharded_head_loss` joins these; and the gradient by each lse"
    everywhere(monkeypatch, sharded_heads, "all_gather", lambda t, s: torch.stack([torch.stack([lse, *t[1:]]) for lse in of_ranks]))
    grads = []
    for lse in of_ranks:
        own = lse.clone().requires_grad_()
        top, above, *_ = sharded_heads._JoinLse.apply(own, score, score, None)
        losses = torch.nn.functional.softplus(top - score + above, threshold=50)
        grads.append(torch.autograd.grad(losses.sum(), own)[0])
    return losses.detach(), torch.stack(grads)


def softmax_loss(of_ranks: torch.Tensor, score: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    "The same by PyTorch's `log_softmax`"
    of_ranks = of_ranks.clone().requires_grad_()
    losses = -torch.cat([score[None], of_ranks]).log_softmax(0)[0]
    return losses.detach(), torch.autograd.grad(losses.sum(), of_ranks)[0]


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e6])
def test_an_offset_of_all_scores_costs_no_digits_where_ranks_are_joined(offset, monkeypatch):
    "Sixteenths beside the offset are exact in float32"
    g = torch.Generator().manual_seed(0)
    of_ranks, score = (offset + torch.randint(-32, 33, size, generator=g) / 16 for size in ((3, 50), (50,)))
    errors = lambda got: torch.tensor([((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, softmax_loss(of_ranks.double(), score.double()))])
    ours, torchs = errors(joined_loss(of_ranks, score, monkeypatch)), errors(softmax_loss(of_ranks, score))
    assert (ours <= 4 * torchs + 16 * torch.finfo(torch.float32).eps).all(), (ours, torchs)


def test_ranks_without_any_class_have_no_share(monkeypatch):
    losses, grads = joined_loss(torch.full((3, 2), -math.inf), torch.zeros(2), monkeypatch)
    assert (losses == 0).all() and (grads == 0).all()


def test_a_step_that_raises_has_drawn_nothing(monkeypatch):
    head = sharded_heads.ShardedPartialFC(50, 4, sample_rate=0.5)
    everywhere(monkeypatch, sharded_heads, "local_statistics", None)
    with pytest.raises(TypeError):
        head(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    assert head.sampler.used == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_row_that_overflowed_does_not_count_in_the_statistics(bad):
    heads = [sharded_heads.ShardedPartialFC(50, 4, margin=AdaFace(momentum=0.5)) for _ in range(2)]
    x, y = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])
    spoilt = x.clone()
    spoilt[1, 0] = bad
    heads[0](spoilt, y), heads[1](x, torch.tensor([0, -1, 2, 3]))
    for head in heads:
        head.margin.advance()
    assert heads[0].margin.state_dict() == heads[1].margin.state_dict()


def test_the_unchanged_source_passes(tmp_path):
    assert first_fault(planted(sharded_heads, tmp_path, *unchanged(BUGS.values()))) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert fault_of(first_fault, sharded_heads, tmp_path, *BUGS[bug]), f"no case notices that {bug}"


# --- files of insightface's ranks ---

def insightface_files(folder, w: torch.Tensor, ranks: int, kind: str = "checkpoint", **more) -> list:
    "What its ranks save: `num_local` and `class_start` as its PartialFC computes them"
    folder.mkdir(exist_ok=True)
    paths = []
    for rank in range(ranks):
        num_local, class_start = len(w) // ranks + int(rank < len(w) % ranks), len(w) // ranks * rank + min(rank, len(w) % ranks)
        rows = w[class_start:class_start + num_local].clone()
        whole = dict(epoch=3, global_step=7, state_dict_backbone={"a": torch.ones(2)}, state_dict_softmax_fc={"weight": rows}, state_optimizer={"state": {}})
        paths.append(folder / (f"checkpoint_gpu_{rank}.pt" if kind == "checkpoint" else f"rank_{rank}_softmax_weight.pt"))
        torch.save(whole if kind == "checkpoint" else rows, paths[-1], **more)
    return paths


def files_fault(m: ModuleType, folder) -> str | None:
    "A word on files that are read or written otherwise than insightface would"
    w = torch.randn(23, 3, generator=torch.Generator().manual_seed(0))
    for ranks, kind in ((1, "weight"), (9, "checkpoint"), (30, "checkpoint"), (14, "weight")):
        theirs, head = insightface_files(folder / str(ranks), w, ranks, kind), PartialFC(23, 3)
        for files in (folder / str(ranks), [str(p) for p in theirs]):
            head.weight.data.zero_()
            m.load_insightface(head, files)
            if not torch.equal(head.weight, w):
                return f"{ranks} files are read in another order"
        ours = m.save_insightface(head, folder / f"ours {ranks}", ranks, kind=kind)
        for a, b in zip(theirs, ours, strict=True):
            a, b, name = *(torch.load(p, weights_only=True) for p in (a, b)), a.name
            a, b = (t if kind == "weight" else t["state_dict_softmax_fc"]["weight"] for t in (a, b))
            if b.shape != a.shape or not torch.equal(a, b) or b.untyped_storage().nbytes() != b.nbytes:
                return f"{name} has other rows"
    class Second(m.ShardedPartialFC):
        "A rank's head, without the others"
        num_classes, shards = 23, property(lambda self: m.Shards(23, 9, 14))

    part = Second(23, 3)
    m.load_insightface(part, theirs)
    if not torch.equal(part.weight, w[9:14]):
        return "a rank has other rows"
    for files, what in ((theirs[:-1], "a file less"), ([theirs[1], theirs[0], *theirs[2:]], "two files of one size"), (sorted(theirs, key=str), "files by name"), (theirs[::-1], "files backwards")):
        head = PartialFC(23, 3)
        before = head.weight.detach().clone()
        try:
            m.load_insightface(head, files)
        except ValueError as error:
            if not str(error).startswith("files: expected") or not torch.equal(head.weight, before):
                return f"{what}: {error}"
        else:
            return f"{what} is read"


def test_insightface_files(tmp_path):
    assert files_fault(sharded_heads, tmp_path) is None


def test_insightface_files_of_other_formats(tmp_path):
    w = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    head = PartialFC(7, 3, dtype=f64)
    for more in (dict(_use_new_zipfile_serialization=False), {}):  # files that cannot be mapped, and that can
        fl.load_insightface(head, insightface_files(tmp_path / "old", w, 2, **more))
        assert torch.equal(head.weight, w.double())
    named = [p.rename(p.with_name(f"part{i}.bin")) for i, p in enumerate(insightface_files(tmp_path / "named", w, 3, "weight"))]
    fl.load_insightface(head, named)  # other names say no rank: the order counts
    assert torch.equal(head.weight, w.double())


class Runs:
    "An object whose pickle would run a function when it is read"
    def __reduce__(self):
        return print, ("this file has run",)


def test_insightface_files_that_cannot_be(tmp_path, capsys):
    w = torch.randn(7, 3)
    head = PartialFC(7, 3)
    good, before = insightface_files(tmp_path / "good", w, 2), head.weight.detach().clone()
    insightface_files(tmp_path / "both", w, 2), insightface_files(tmp_path / "both", w, 2, "weight")
    (tmp_path / "none").mkdir()
    unsafe, other, empty = (tmp_path / f"{name}.pt" for name in ("unsafe", "other", "empty"))
    torch.save(Runs(), unsafe), torch.save({"weight": [1.0]}, other), empty.write_bytes(b"")
    cases = [([unsafe], r"weights_only=True\) reads, got unsafe.pt"), ([other], "files: expected a matrix"), ([empty], "got empty.pt"), ([], "files: expected a folder"),
             (tmp_path / "none", "got neither"), (tmp_path / "both", "got checkpoint and weight"), ([good[1], good[0]], "ranks 0, 1, ... in order"),
             ([good[0], good[0]], "ranks 0, 1, ... in order"), ([good[0]], "as insightface splits these classes"), (3, "files: expected a folder")]
    for files, words in cases:
        with pytest.raises(ValueError, match=words):
            fl.load_insightface(head, files)
    with pytest.raises(FileNotFoundError):
        fl.load_insightface(head, [tmp_path / "nowhere.pt"])
    for wrong in (PartialFC(7, 3, margin=SubCenter(2)), torch.nn.Linear(3, 7)):
        with pytest.raises(ValueError, match="head: expected"):
            fl.load_insightface(wrong, good)
    with pytest.raises(ValueError, match="files: expected rows of"):
        fl.load_insightface(PartialFC(7, 4), good)
    assert torch.equal(head.weight, before) and "has run" not in capsys.readouterr().out


def test_files_that_cannot_be_change_no_row(tmp_path):
    "The last of them cannot be taken: rows of the others are in no head, and the error names the file"
    w = torch.randn(6, 3)
    good, head = insightface_files(tmp_path, w, 2, "weight"), PartialFC(6, 3)
    before, bad = head.weight.detach().clone(), good[1]
    for held in (w[3:].to_sparse(), w[3:].to("meta"), torch.zeros(3, 3, dtype=torch.int64), {1: w[3:], "a": w}, {"weight": [1.0]}):
        torch.save(held, bad)
        with pytest.raises(ValueError, match=bad.name):
            fl.load_insightface(head, good)
    for content in (b"PK\x05\x06" + bytes(18), b"PK\x03\x04", bad.read_bytes()[:-30], b"\x80"):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=bad.name):
            fl.load_insightface(head, good)
    assert torch.equal(head.weight, before)
    insightface_files(tmp_path, w, 2, "weight")
    with pytest.raises(ValueError, match="head: expected class vectors in memory"):
        fl.load_insightface(PartialFC(6, 3, device="meta"), good)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_file_that_cannot_be_written_leaves_the_earlier_ones(error, tmp_path, monkeypatch):
    "The second of three cannot: all hold what they held, and nothing else is in the folder"
    head, written = PartialFC(6, 3), []
    paths = fl.save_insightface(head, tmp_path, 3)
    before = {p: p.read_bytes() for p in sorted(tmp_path.iterdir())}
    save = torch.save
    def save_one(held, path):
        written.append(path)
        save(held, path)
        if len(written) == 2:
            raise error("no space left")
    monkeypatch.setattr(torch, "save", save_one)
    with pytest.raises(error, match="no space left"):
        fl.save_insightface(PartialFC(6, 3), tmp_path, 3)
    assert {p: p.read_bytes() for p in sorted(tmp_path.iterdir())} == before and sorted(before) == paths


FILE_BUGS = {
    "PyTorch's split": ("return range(start, start + each + (rank < more))", "return shard_range(n_classes, ranks, rank)"),
    "the last ranks have more": ("start = each * rank + min(rank, more)\n    return range(start, start + each + (rank < more))",
                                 "start = each * rank + max(0, rank - (ranks - more))\n    return range(start, start + each + (rank >= ranks - more))"),
    "ranks by name": ("key=lambda p: rank_of(p, kind)) for kind", "key=str) for kind"),
    "names say nothing": ("in_order or set(ranks) == {None}", "True"),
    "sizes say nothing": ("expect(sizes == wanted,", "expect(True,"),
    "rows of another file": ("rows[start - theirs.start:stop - theirs.start]", "rows[:stop - start]"),
    "rows of another rank are saved": ("= here[start - s.start:stop - s.start]", "= here[:stop - start]"),
}


def test_the_unchanged_files_pass(tmp_path):
    assert files_fault(planted(sharded_heads, tmp_path, *unchanged(FILE_BUGS.values())), tmp_path) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", FILE_BUGS)
def test_a_planted_bug_in_files_is_noticed(bug, tmp_path):
    assert fault_of(lambda m: files_fault(m, tmp_path), sharded_heads, tmp_path, *FILE_BUGS[bug]), f"no case notices that {bug}"


# --- Lightning ---

def trained_by_lightning(lightning, folder, clip: float | None):
    "A module with backbone and head that Lightning has trained for six steps, and the losses; clipping by a hook of Lightning's"
    class Identities(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head, self.losses = torch.nn.Linear(6, 4), fl.PartialFC(50, 4, sample_rate=0.2), []

        def training_step(self, batch, i):
            loss = self.head(self.body(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, i):
            self.log("accuracy", (self.head(self.body(batch[0])).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self):
            return fl.RowSparse(torch.optim.SGD, self.parameters(), lr=0.1, momentum=0.9)

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            if clip:
                fl.clip_grad_norm_(self.parameters(), clip)

    g = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(24, 6, generator=g), torch.randint(50, (24,), generator=g))
    model, loader = Identities(), torch.utils.data.DataLoader(data, batch_size=8)
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
                                default_root_dir=folder, num_sanity_val_steps=1)
    trainer.fit(model, loader, loader)
    return model, loader, trainer


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_lightning_module_with_a_head(tmp_path):
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
    model, loader, trainer = trained_by_lightning(lightning, tmp_path, 0.5)
    torch.manual_seed(0)
    body, head, losses = torch.nn.Linear(6, 4), fl.PartialFC(50, 4, sample_rate=0.2), []
    optimizer = fl.RowSparse(torch.optim.SGD, [*body.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            losses.append(head(body(x), y))
            losses[-1].backward()
            fl.clip_grad_norm_([*body.parameters(), *head.parameters()], 0.5)
            optimizer.step()
    assert losses == model.losses and torch.equal(head.weight, model.head.weight)
    assert 0 <= trainer.callback_metrics["accuracy"] <= 1 and head.sampler.step == model.head.sampler.step == 6
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    state = torch.load(tmp_path / "all.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(state["head.weight"], head.weight) and state["head.sampler.step"] == 6
