"""The oracle: right in every case, and clear about what it refuses."""
import pytest
import torch
import torch.nn.functional as F

from fusedloss.baseline import BaselineSoftmax, BaselineSoftmaxNllLoss, Sample, baseline_linear_cross_entropy, linear_scores, reduce_loss, row_norms, sample_data, unit_rows
from fusedloss.core.checks import acc_dtype
from fusedloss.tiles import tiled_linear_cross_entropy
from workbook.measure import relative_error
from helpers import CASES, Case, faults, gradients, reference

LOSSES = dict(baseline=baseline_linear_cross_entropy, tiles=tiled_linear_cross_entropy)
BAD = {
    "weight of one dimension": (dict(w=torch.ones(3)), r"linear_weight: expected shape \[V, H\], got \[3\]"),
    "input of other width": (dict(x=torch.ones(4, 2)), r"input: expected shape \[..., 3\], got \[4, 2\]"),
    "input of no dimension": (dict(x=torch.tensor(1.0)), r"input: expected shape \[..., 3\], got \[\]"),
    "too few targets": (dict(y=torch.zeros(3).long()), r"target: expected shape \[4\], got \[3\]"),
    "targets of two dimensions": (dict(y=torch.zeros(4, 1).long()), r"target: expected shape \[4\], got \[4, 1\]"),
    "floating targets": (dict(y=torch.zeros(4)), "target: expected an integer dtype, got torch.float32"),
    "Boolean targets": (dict(y=torch.zeros(4).bool()), "target: expected an integer dtype, got torch.bool"),
    "integer input": (dict(x=torch.ones(4, 3).long()), "input: expected a floating dtype of 16, 32 or 64 bits, got torch.int64"),
    "integer weight": (dict(w=torch.ones(5, 3).int()), "linear_weight: expected a floating dtype of 16, 32 or 64 bits, got torch.int32"),
    "mixed dtypes": (dict(w=torch.ones(5, 3).double()), "linear_weight: expected .* torch.float32, got torch.float64"),
    "target elsewhere": (dict(y=torch.zeros(4, device="meta").long()), "target: expected the input's device cpu, got meta"),
    "weight elsewhere": (dict(w=torch.ones(5, 3, device="meta")), "linear_weight: expected the input's device cpu, got meta"),
    "unknown reduction": (dict(reduction="avg"), "reduction: expected 'none', 'mean' or 'sum', got 'avg'"),
    "no reduction": (dict(reduction=None), "reduction: expected .*, got None"),
    "scale of zero": (dict(scale=0.0), "scale: expected a positive number or None, got 0.0"),
    "negative scale": (dict(scale=-1.0), "scale: expected a positive number or None, got -1.0"),
    "scale of NaN": (dict(scale=float("nan")), "scale: expected a positive number or None, got nan"),
}


def call(fn, x=None, w=None, y=None, **options):
    "`fn` on four tokens of width three and five classes, some of them replaced"
    x, w = torch.ones(4, 3) if x is None else x, torch.ones(5, 3) if w is None else w
    return fn(x, w, torch.zeros(4, dtype=torch.int64) if y is None else y, **options)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_baseline_is_the_definition(case, device):
    assert faults(baseline_linear_cross_entropy, case, device, tiled=False) == []


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_baseline_is_torch_cross_entropy(reduction, device):
    s = Case(ignored=(2,)).sample(device)
    expected = F.cross_entropy(F.linear(s.input, s.weight), s.target, reduction=reduction)
    torch.testing.assert_close(baseline_linear_cross_entropy(*s, reduction=reduction), expected)


@pytest.mark.parametrize("fault", BAD, ids=BAD)
@pytest.mark.parametrize("loss", LOSSES)
def test_bad_input_says_expected_and_got(loss, fault):
    given, message = BAD[fault]
    with pytest.raises(ValueError, match=message):
        call(LOSSES[loss], **given)


@pytest.mark.parametrize("label", [-1, 5, 8, 2**40, -2**63, 2**63 - 1])
@pytest.mark.parametrize("loss", LOSSES)
def test_bad_label_is_named_with_its_position(loss, label):
    y = torch.tensor([0, 4, label, label])
    with pytest.raises(IndexError, match=rf"target\[2\] is {label}: expected 0 ≤ label < 5, or -100 to ignore"):
        call(LOSSES[loss], y=y)


@pytest.mark.parametrize("loss", LOSSES)
def test_bad_label_of_two_dimensions_is_named_with_both(loss):
    with pytest.raises(IndexError, match=r"target\[1, 0\] is 7: expected 0 ≤ label < 5, or 9 to ignore"):
        call(LOSSES[loss], x=torch.ones(2, 2, 3), y=torch.tensor([[0, 9], [7, 8]]), ignore_index=9)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("loss", LOSSES)
def test_bad_label_of_a_narrow_type_is_not_ignored_by_wrap_around(loss, dtype):
    bad = torch.tensor([0, 156 if dtype == torch.uint8 else 5, 1, 2]).to(dtype)  # 156 is −100 in eight bits
    with pytest.raises(IndexError, match=r"target\[1\]"):
        call(LOSSES[loss], y=bad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("label", [-1, 10, 2**40])
@pytest.mark.parametrize("loss", LOSSES)
def test_bad_label_on_a_gpu_is_nan_for_its_token_alone(loss, label, scale):
    good = Case((7, 3, 10)).sample("cuda")
    y = good.target.clone()
    y[2] = label
    got = gradients(LOSSES[loss], Sample(*good[:2], y), torch.ones(7, device="cuda").double(), reduction="none", scale=scale)
    ignored = torch.where(y == label, -100, y)
    losses, dx, dw = gradients(reference, Sample(*good[:2], ignored), torch.ones(7, device="cuda").double(), reduction="none", scale=scale)
    losses[2] = float("nan")
    for a, b in zip(got, (losses, dx, dw)):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("loss", LOSSES)
def test_bad_label_on_a_gpu_raises_under_debug(loss, monkeypatch):
    monkeypatch.setenv("FUSEDLOSS_DEBUG", "1")
    s = sample_data(4, 3, 5, device="cuda")
    with pytest.raises(IndexError, match=r"target\[0\] is 5"):
        LOSSES[loss](s.input, s.weight, torch.full_like(s.target, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction, shape", [("none", (0,)), ("mean", ()), ("sum", ())])
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_no_tokens_give_no_loss_and_zero_gradients(loss, scale, reduction, shape, dtype, device):
    got, dx, dw = gradients(LOSSES[loss], sample_data(0, 3, 5, dtype, device), reduction=reduction, scale=scale)
    assert got.shape == shape and got.dtype == torch.float32 and got.sum() == 0
    assert dx.shape == (0, 3) and dx.dtype == dtype
    assert torch.equal(dw, torch.zeros(5, 3, dtype=dtype, device=device))


@pytest.mark.parametrize("loss", LOSSES)
def test_no_classes_and_only_ignored_tokens_give_zero(loss, device):
    x, w = torch.ones(4, 3, device=device, requires_grad=True), torch.ones(0, 3, device=device, requires_grad=True)
    got, dx, dw = gradients(LOSSES[loss], Sample(x, w, torch.full((4,), -100, device=device)))
    assert got == 0 and torch.equal(dx, torch.zeros_like(x)) and dw.shape == (0, 3)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_features_give_the_log_of_the_number_of_classes(loss, device):
    s = sample_data(4, 0, 5, device=device)
    torch.testing.assert_close(LOSSES[loss](*s).item(), torch.tensor(5.0).log().item())


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (3, 1, 2)])
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_any_number_of_token_dimensions(loss, scale, shape, device):
    x, w, y = sample_data(6, 3, 10, torch.float64, device, requires_grad=False)
    n = 6 if shape else 1
    s = Sample(x[:n].view(*shape, 3).requires_grad_(), w.requires_grad_(), y[:n].view(shape))
    for got, exact in zip(gradients(LOSSES[loss], s, reduction="none", scale=scale), gradients(reference, s, reduction="none", scale=scale)):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


def test_modules_return_log_probabilities_probabilities_and_their_sum(device):
    x, w, y = Case((6, 3, 10)).sample(device)
    x, y = x.view(2, 3, 3), y.view(2, 3)
    weight = torch.nn.Parameter(w.detach())
    logp, p, loss = BaselineSoftmax(weight)(x), BaselineSoftmax(weight, log_softmax=False)(x), BaselineSoftmaxNllLoss(weight)(x, y)
    torch.testing.assert_close(logp, F.log_softmax(x @ w.T, -1))
    torch.testing.assert_close(p, logp.exp())
    torch.testing.assert_close(loss, -logp.gather(-1, y[..., None]).sum())


def test_modules_know_the_margin(device):
    x, w, y = Case().sample(device)
    options = dict(margin=0.2, scale=30.0)
    logp = BaselineSoftmax(torch.nn.Parameter(w.detach()), **options)(x, y)
    loss = BaselineSoftmaxNllLoss(torch.nn.Parameter(w.detach()), **options)(x, y)
    exact = reference(x, w, y, reduction="none", **options)
    torch.testing.assert_close(-logp.gather(1, y[:, None])[:, 0], exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss, exact.sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_probabilities_are_kept_in_float32_at_least(dtype, device):
    s = sample_data(4, 3, 5, dtype, device)
    assert BaselineSoftmax(torch.nn.Parameter(s.weight.detach()))(s.input).dtype == acc_dtype(dtype)


def test_lmcl_without_targets_gives_cosines(device):
    s = Case().sample(device)
    cosines = F.cosine_similarity(s.input[:, None], s.weight[None], dim=-1)
    torch.testing.assert_close(linear_scores(s.input, s.weight, scale=5.0), 5.0 * cosines, rtol=1e-12, atol=1e-12)


def test_margin_is_taken_off_in_float64(device):
    s = Case().sample(device)
    taken = linear_scores(s.input, s.weight, margin=0.0, scale=8.0) - linear_scores(s.input, s.weight, s.target, 0.35, 8.0)
    expected = 8.0 * 0.35 * F.one_hot(s.target, 10).double()
    torch.testing.assert_close(taken, expected, rtol=0, atol=1e-13)


def test_rows_have_length_one_or_zero(device):
    t = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-15, 0.0], [1e15, 1e15]], device=device)
    torch.testing.assert_close(row_norms(t).tolist(), [5.0, 1.0, 1e-15, 2**0.5 * 1e15])
    torch.testing.assert_close(unit_rows(t).norm(dim=1).tolist(), [1.0, 0.0, 1.0, 1.0])


def test_sample_is_the_same_for_the_same_seed_only(device):
    one, two, other = (sample_data(5, 3, 7, device=device, seed=seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, one, two)) and not any(map(torch.equal, one, other))


@pytest.mark.parametrize("sizes", [(0, 3, 5), (4, 0, 5), (4, 3, 1)])
def test_sample_takes_any_sizes(sizes, device):
    s = sample_data(*sizes, torch.bfloat16, device, requires_grad=False)
    assert (s.input.shape, s.weight.shape, s.target.shape) == (sizes[:2], (sizes[2], sizes[1]), sizes[:1])
    assert s.input.dtype == s.weight.dtype == torch.bfloat16 and not s.input.requires_grad


def test_sampled_scores_have_unit_variance(device):
    s = sample_data(256, 64, 256, device=device, requires_grad=False)
    assert abs((s.input @ s.weight.T).var().item() - 1) < 0.1


def test_reduction_marks_labels_out_of_range(device):
    losses, y = torch.tensor([1.0, 2.0, 4.0, 8.0], device=device), torch.tensor([0, 7, -100, 2], device=device)
    torch.testing.assert_close(reduce_loss(losses, y, 5, -100, "none").tolist(), [1.0, float("nan"), 0.0, 8.0], equal_nan=True)
    torch.testing.assert_close(reduce_loss(losses, y, 8, -100, "mean").item(), 11 / 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loss_of_many_tokens_is_summed_in_float32(dtype, device):
    s = sample_data(4096, 4, 16, dtype, device, requires_grad=False)
    assert relative_error(baseline_linear_cross_entropy(*s), reference(*s)) < 1e-3  # 4096 roundings of a score, averaged
