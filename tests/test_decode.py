"""Decoding: the best path and beams of prefixes, against the list of all paths and against a beam of dictionaries; bugs planted."""
import inspect
import itertools
import math
import re
import warnings

import pytest
import torch

import fusedloss as fl
import fusedloss.decode
from grids import few, grid
from helpers import fault_of, planted, unchanged

INF = math.inf
f32, f64 = torch.float32, torch.float64


def said(path, blank):
    "The labels of a path"
    return tuple(c for c, _ in itertools.groupby(path) if c != blank)


def add(*logs):
    "Logarithm of a sum, in plain Python"
    top = max(logs)
    return top if top == -INF else top + math.log(sum(math.exp(v - top) for v in logs))


def listed(z, blank):
    "The sum of each label sequence that can be, the largest first: every path of z [T,C], one by one"
    sums = {}
    for path in itertools.product(range(z.shape[1]), repeat=len(z)):
        sums.setdefault(said(path, blank), []).append(sum(z[t, c].item() for t, c in enumerate(path)))
    found = {y: add(*scores) for y, scores in sums.items()}
    return dict(sorted(((y, p) for y, p in found.items() if p > -INF), key=lambda item: -item[1]))


def narrow(z, blank, width):
    "A beam of dictionaries"
    beam = {(): (0.0, -INF)}
    for row in z.tolist():
        new = {}

        def arrive(y, p_blank, p_label):
            old = new.get(y, (-INF, -INF))
            new[y] = add(old[0], p_blank), add(old[1], p_label)
        for y, (p_blank, p_label) in beam.items():
            arrive(y, add(p_blank, p_label) + row[blank], p_label + row[y[-1]] if y else -INF)
            for c in set(range(len(row))) - {blank}:
                arrive(y + (c,), -INF, (p_blank if y[-1:] == (c,) else add(p_blank, p_label)) + row[c])
        beam = dict(sorted(((y, p) for y, p in new.items() if add(*p) > -INF), key=lambda item: -add(*item[1]))[:width])
    return {y: add(*p) for y, p in beam.items()}


def scores(T, N, C, seed=0, scale=2.0, dtype=f64):
    return (torch.randn(T, N, C, generator=torch.Generator().manual_seed(seed), dtype=f64) * scale).log_softmax(-1).to(dtype)


def found(d, n):
    "Label sequences and log-probabilities of a sequence; what does not exist is empty"
    rows = list(zip(d.labels[n].tolist(), d.lengths[n].tolist(), d.log_probs[n].tolist()))
    for y, length, p in rows:
        assert set(y[length:]) <= {-1} and all(c >= 0 for c in y[:length]) and (p > -INF or length == 0)
    return {tuple(y[:length]): p for y, length, p in rows if p > -INF}


def same(got, truth, tolerance=1e-12):
    return list(got) == list(truth) and all(abs(got[y] - p) <= tolerance * max(1, abs(p)) for y, p in truth.items())


SMALL = [(4, 3, 0), (5, 3, 2), (3, 5, 1), (6, 2, 0), (3, 1, 0), (0, 3, 0), (1, 4, 3), (2, 2, 1)]  # T, C, blank


def first_fault(m):
    "The first of a few checks that a version of the module does not pass"
    for T, C, blank in SMALL:
        z, frames = scores(T, 3, C), [T, max(T - 1, 0), T // 2]
        if T > 2:
            z[1, 1, 0] = -INF
        wide = m.ctc_decode(z, frames, blank=blank, beam_size=200, k=150)
        for n, steps in enumerate(frames):
            if not same(found(wide, n), dict(itertools.islice(listed(z[:steps, n], blank).items(), 150))):
                return f"all paths of {T, C, blank}"
        greedy = m.ctc_decode(z, frames, blank=blank)
        for n, steps in enumerate(frames):
            best, path = z[:steps, n].max(1)
            truth = {said(path.tolist(), blank): best.sum().item()} if best.sum() > -INF else {}
            if not same(found(greedy, n), truth):
                return f"the best path of {T, C, blank}"
    for seed in range(12):
        z, blank = scores(25, 3, 6, seed, 1.5), seed % 6
        for B in (2, 3, 7, 20):
            d = m.ctc_decode(z, blank=blank, beam_size=B, k=B)
            if not all(same(found(d, n), narrow(z[:, n], blank, B), 1e-10) for n in range(3)):
                return f"a beam of {B}, seed {seed}"
    z = scores(7, 3, 4)
    z[2, 1, 3] = math.nan
    for beam in (1, 4):
        d = m.ctc_decode(z, beam_size=beam)
        if d.log_probs.isnan().flatten().tolist() != [False, True, False] or d.lengths[1].any():
            return "NaN"


def test_all_checks_pass():
    assert first_fault(fusedloss.decode) is None


MUTANTS = {  # what is wrong: (text of the source, what stands in its place)
    "a frame beyond the end speaks": ("says = on & (path != blank)", "says = (path != blank)"),
    "repeats are said": ("& (path != before)", ""),
    "a repeat needs no blank": ("given = torch.where(again, b.p_blank[:, :, None], total[:, :, None])", "given = total[:, :, None].expand_as(again)"),
    "a new repeat needs no blank": ("torch.where(tried == last[..., None], b.p_blank[..., None], total[..., None])", "total[..., None].expand(tried.shape)"),
    "equal prefixes stay apart": (".scatter_(2, torch.where(parent, last[:, None], C), True)", ""),
    "a parent gives nothing": ("torch.logaddexp(b.p_label, given) + score", "b.p_label + score"),
    "the blank is a label": (".select(2, blank).fill_(True)", ""),
    "a prefix that comes back begins nothing": ("begins=beginnings(after, source, alive))", "begins=beginnings(after, source, alive) & (~grows[:, :, None] | torch.eye(B, dtype=torch.bool)))"),
    "every descendant of a source is one": ("begins & (same | (b.lengths == 0)[:, :, None])", "begins"),
    "too few labels are tried": ("min(2 * B, C)", "min(max(1, B // 2), C)"),
    "sequences that are over go on": ("(t < frames)[:, None]", "(t < frames + 1)[:, None]"),
    "NaN is decoded": ("~(z.amax(2) < torch.inf)", "(z.amax(2) == torch.inf)"),
}


@pytest.mark.thorough
def test_the_unchanged_source_passes(tmp_path):
    assert first_fault(planted(fusedloss.decode, tmp_path, *unchanged(MUTANTS.values()))) is None


@pytest.mark.thorough
@pytest.mark.parametrize("bug", few(MUTANTS, "repeats are said", "a repeat needs no blank", "equal prefixes stay apart", "a prefix that comes back begins nothing", "too few labels are tried"))
def test_a_planted_bug_is_noticed(bug, tmp_path):
    assert fault_of(first_fault, fusedloss.decode, tmp_path, *MUTANTS[bug]), f"no check notices that {bug}"


@pytest.mark.parametrize("dtype, beam, given", grid([f32, f64, torch.bfloat16, torch.float16], [1, 3], ["tensor", "list", "none"]))
def test_dtypes_lengths_and_single_sequences(dtype, beam, given, device):
    z = scores(9, 3, 5, dtype=dtype).to(device)
    frames = [9, 4, 0]
    lengths = {"tensor": torch.tensor(frames, device=device), "list": frames, "none": None}[given]
    d = fl.ctc_decode(z, lengths, beam_size=beam, k=beam)
    assert d.labels.shape == (3, beam, 9) and d.labels.dtype == d.lengths.dtype == torch.int64 and d.log_probs.shape == (3, beam)
    assert d.log_probs.dtype == (f64 if dtype == f64 else f32) and {t.device.type for t in d[:3]} == {torch.device(device).type}
    for n, steps in enumerate(frames if lengths is not None else [9] * 3):
        alone = fl.ctc_decode(z[:steps, n], beam_size=beam, k=beam)
        assert torch.equal(alone.labels, d.labels[n, :, :steps]) and torch.equal(alone.lengths, d.lengths[n])
        torch.testing.assert_close(alone.log_probs, d.log_probs[n])


def test_strides_gradients_and_the_input_do_not_matter():
    z = scores(8, 2, 5)
    for x in (z.clone().requires_grad_(), z.transpose(0, 1).contiguous().transpose(0, 1), torch.cat([z, z], 2)[..., :5]):
        before = x.detach().clone()
        for beam in (1, 4):
            d = fl.ctc_decode(x, beam_size=beam)
            plain = fl.ctc_decode(z, beam_size=beam)
            assert torch.equal(d.labels, plain.labels) and torch.equal(d.lengths, plain.lengths) and not d.log_probs.requires_grad
            torch.testing.assert_close(d.log_probs, plain.log_probs)
        assert torch.equal(x.detach(), before)


def test_nothing_to_decode():
    for beam in (1, 3):
        for T, N in ((0, 2), (4, 0), (0, 0)):
            d = fl.ctc_decode(torch.zeros(T, N, 3), beam_size=beam, k=beam)
            assert d.labels.shape == (N, beam, T) and not d.lengths.any()
            assert (d.log_probs[:, 0] == 0).all() and (d.log_probs[:, 1:] == -INF).all()
        never = fl.ctc_decode(torch.full((3, 1, 4), -INF), beam_size=beam, k=beam)
        assert (never.log_probs == -INF).all()
        blanks = fl.ctc_decode(torch.full((3, 1, 1), -2.0), beam_size=beam, k=beam)
        assert blanks.lengths.tolist() == [[0] * beam] and blanks.log_probs[0].tolist() == [-6.0] + [-INF] * (beam - 1)


def test_ties_and_impossible_scores():
    flat = torch.full((4, 1, 3), -math.log(3), dtype=f64)
    assert fl.ctc_decode(flat).lengths.item() == 0, "of equal classes the first"
    once, again = (fl.ctc_decode(flat, beam_size=6, k=6, timesteps=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again))
    z = scores(6, 3, 4)
    good = fl.ctc_decode(z, beam_size=5, k=5)
    z[5, 1, 2], z[0, 2, 0] = INF, math.nan
    for beam in (1, 5):
        d = fl.ctc_decode(z, beam_size=beam, k=beam)
        assert d.log_probs[1:].isnan().all() and not d.lengths[1:].any() and (d.labels[1:] == -1).all()
    assert all(torch.equal(a[0], b[0]) for a, b in zip(d[:3], good))
    assert not fl.ctc_decode(z, [6, 5, 0], beam_size=5).log_probs.isnan().any(), "beyond a length nothing is looked at"


def entered(z, y, blank):
    "The frames in which the best path of z [T,C] that says y enters its labels: of all paths, one by one"
    paths = [p for p in itertools.product(range(z.shape[1]), repeat=len(z)) if said(p, blank) == y]
    best = max(paths, key=lambda p: sum(z[t, c].item() for t, c in enumerate(p)))
    return [t for t, c in enumerate(best) if c != blank and (t == 0 or best[t - 1] != c)]


@pytest.mark.parametrize("beam", [1, 4])
def test_timesteps_are_the_first_frames_of_the_best_path(beam, device):
    z, frames = scores(6, 4, 3, seed=beam), [6, 5, 3, 0]
    d = fl.ctc_decode(z.to(device), frames, blank=1, beam_size=beam, k=beam, timesteps=True)
    assert d.timesteps.shape == d.labels.shape and d.timesteps.dtype == torch.int64
    plain = fl.ctc_decode(z.to(device), frames, blank=1, beam_size=beam, k=beam)
    assert plain.timesteps is None and all(torch.equal(a, b) for a, b in zip(plain[:3], d))
    for n, steps in enumerate(frames):
        for labels, at, m, p in zip(*(t[n].tolist() for t in (d.labels, d.timesteps, d.lengths, d.log_probs))):
            assert at[m:] == [-1] * (6 - m)
            assert p == -INF or at[:m] == entered(z[:steps, n], tuple(labels[:m]), 1)
    alone = fl.ctc_decode(z[:, 0].to(device), blank=1, beam_size=beam, k=beam, timesteps=True)
    assert torch.equal(alone.timesteps, d.timesteps[0])
    z[2, 0, 0] = math.nan
    assert (fl.ctc_decode(z.to(device), beam_size=beam, timesteps=True).timesteps[0] == -1).all()


def test_timesteps_of_nothing():
    for T, N in ((0, 2), (4, 0), (0, 0)):
        assert fl.ctc_decode(torch.zeros(T, N, 3), beam_size=2, k=2, timesteps=True).timesteps.shape == (N, 2, T)
    with pytest.raises(ValueError, match="timesteps: expected True or False, got 'yes'"):
        fl.ctc_decode(torch.zeros(2, 2, 3), timesteps="yes")


def test_a_found_sequence_has_its_likelihood():
    z = scores(10, 4, 4, scale=3.0)
    d = fl.ctc_decode(z, [10, 9, 7, 3], beam_size=400, k=3)
    for i in range(3):
        loss = fl.ctc_loss(z, d.labels[:, i], [10, 9, 7, 3], d.lengths[:, i], reduction="none")
        assert torch.equal(loss, fl.ctc_loss(z, d.labels[:, i], [10, 9, 7, 3], reduction="none")), "−1 is padding"
        assert ((loss + d.log_probs[:, i]).abs() < 1e-3).all() and (loss <= -d.log_probs[:, i] + 1e-12).all()


def test_what_is_refused():
    z = scores(7, 2, 4)
    for text, call in {"k: expected an integer from 1 to beam_size, 2, got 3": lambda: fl.ctc_decode(z, beam_size=2, k=3),
                       "k: expected an integer from 1 to beam_size, 1, got 0": lambda: fl.ctc_decode(z, k=0),
                       "beam_size: expected a positive integer, got 0": lambda: fl.ctc_decode(z, beam_size=0),
                       "blank: expected a class below 4, got 4": lambda: fl.ctc_decode(z, blank=4),
                       r"input_lengths\[1\] is 8: expected 0 ≤ length ≤ 7": lambda: fl.ctc_decode(z, [7, 8]),
                       r"are the scores \[N, T, ...\]\? transpose\(0, 1\)": lambda: fl.ctc_decode(z.transpose(0, 1), [7, 7])}.items():
        with pytest.raises(ValueError, match=text):
            call()


def test_the_old_name_of_beam_size_works_and_warns_once_a_line():
    z = scores(7, 2, 4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        found = [fl.ctc_decode(z, beam=4, k=2) for _ in range(3)]
        fl.ctc_decode(z, beam=1)
        expected = fl.ctc_decode(z, beam_size=4, k=2)
    assert [(w.category, str(w.message), w.filename) for w in said] == [(DeprecationWarning, "beam= is now beam_size=, and leaves in fusedloss 0.3.0", __file__)] * 2
    assert all(torch.equal(a, b) for hypotheses in found for a, b in zip(hypotheses[:3], expected[:3]))
    with pytest.raises(ValueError, match="beam: expected nothing beside beam_size, whose old name it is, got 4"):
        fl.ctc_decode(z, beam=4, beam_size=2)


def test_the_old_name_of_beam_size_compiles():
    z = scores(7, 2, 4)
    compiled = torch.compile(lambda z: fl.ctc_decode(z, beam=4, k=2)[:3], fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(z), fl.ctc_decode(z, beam_size=4, k=2)))


def test_the_old_name_of_beam_size_leaves_when_it_said():
    "In the release that the warning names, the name and this test go"
    left = re.search(r'renamed_argument\("beam".*leaves="([\d.]+)"\)', inspect.getsource(fl.ctc_decode))[1]
    assert tuple(map(int, fl.__version__.split(".")[:2])) < tuple(map(int, left.split(".")[:2]))


@pytest.mark.parametrize("beam", [1, 4])
def test_lengths_on_a_gpu_are_not_looked_at(beam, monkeypatch):
    monkeypatch.setattr(fusedloss.decode, "readable_on_host", lambda t: False)
    d = fl.ctc_decode(scores(6, 3, 4), [6, 7, -1], beam_size=beam)
    assert d.log_probs.isnan().flatten().tolist() == [False, True, True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_host_does_not_wait():
    z, frames = scores(50, 4, 9, dtype=f32).cuda(), torch.tensor([50, 40, 3, 0], device="cuda")
    calls = [lambda: fl.ctc_decode(z, frames), lambda: fl.ctc_decode(z, frames, beam_size=8, k=3)]
    truth = [call() for call in calls]
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [call() for call in calls]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b, beam in zip(truth, again, (1, 8)):
        host = fl.ctc_decode(z.cpu(), frames.cpu(), beam_size=beam, k=a.lengths.shape[1])
        assert all(torch.equal(x, y) for x, y in zip(a[:3], b[:3])) and torch.equal(a.labels.cpu(), host.labels)
