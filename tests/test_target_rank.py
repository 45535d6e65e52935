"""The rank that log-probabilities tell of each target: beside its definition, with ties, ignored tokens and promises, from logits and hidden states."""
import pytest
import torch

import fusedloss as fl
from fusedloss.core import softmax
from fusedloss.core.options import Statistics, loss_options
from fusedloss.core.triton import jit, tl
from fusedloss.kernels import launch_scan
from fusedloss.recompute import launch_lse
from helpers import everywhere, interpreted

N, V, H = 9, 50, 16


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a weight whose classes 2 and 3 are equal, labels of which one is ignored, and a temperature of each token.
    Multiples of 1/64: a score is the same number in whatever order its products are added, and a tie is one"""
    torch.manual_seed(0)
    x, w = (torch.randn(n, H).mul(64).round() / 64 for n in (N, V))
    y, temperature = torch.randint(4, V, (N,)), 0.5 + torch.rand(N)
    w[3] = w[2]
    x[:2] = 2 * w[2]  # it leads there
    x[2] = x[3]
    y[:5] = torch.tensor([2, 3, 3, 2, -100])
    y[5] = (x[5] @ w.T).argmax()
    return x, w, y, temperature


def ranks(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    "How many classes have a higher score than the target, or an equal one before it; -1 for an ignored one"
    own = scores.gather(-1, y.clamp(min=0)[:, None])
    ahead = (scores > own) | ((scores == own) & (torch.arange(V) < y[:, None]))
    return torch.where(y == -100, -1, ahead.sum(-1))


@pytest.mark.parametrize("more", [{}, dict(max_valid=8), dict(batch_invariant=True)], ids=str)
def test_of_hidden_states(more):
    x, w, y, temperature = drawn()
    expected = ranks(x @ w.T, y)
    assert expected[:6].tolist() == [0, 1, expected[2], expected[3], -1, 0] and expected[2] == expected[3] + 1
    x.requires_grad_()
    for score in (dict(temperature=temperature), dict(temperature=0.6, softcap=3.0, logit_scale=0.7)):  # none of them changes an order
        found = fl.linear_log_probs(x, w, y, target_rank=True, mean_logits=True, entropy=True, **score, **more)
        assert found.target_rank.dtype == torch.int64 and torch.equal(found.target_rank, expected) and not found.target_rank.requires_grad
        alone = fl.linear_log_probs(x, w, y, mean_logits=True, entropy=True, **score, **more)
        assert alone.target_rank is None
        for a, b in zip(alone[:3], found[:3]):
            torch.testing.assert_close(a, b)
        gradients = (torch.autograd.grad((f.log_probs + f.entropy).sum(), x)[0] for f in (found, alone))
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("lead", [(N,), (3, 3), (1, 3, 3)], ids=str)
def test_of_logits(lead):
    x, w, y, temperature = drawn()
    found = fl.log_probs((x @ w.T).view(*lead, V), y.view(lead), temperature=temperature.view(lead), target_rank=True, mean_logits=True)
    assert torch.equal(found.target_rank, ranks(x @ w.T, y).view(lead))
    means = ((x @ w.T).mean(-1) / temperature).masked_fill(y == -100, 0)
    torch.testing.assert_close(found.mean_logits, means.view(lead), rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
def test_of_the_kernels():
    x, w, y, temperature = drawn()
    options, asked = loss_options(dict(ignore_index=-100)), Statistics(entropy=True, ranks=True, mean=True)
    rows = launch_lse(x, w, y, None, None, None, None, options, asked, None, 0, temperature)[3]
    assert torch.equal(rows[2].long(), ranks(x @ w.T, y))
    means = ((x @ w.T).mean(-1) / temperature)[y != -100]
    torch.testing.assert_close(rows[-1][y != -100], means, rtol=1e-4, atol=1e-5)


@jit
def higher_in_a_block(raw, o):
    "A block's scores, rounded up, and a target's own score, as it is"
    return tl.where(len(raw.shape) > 1, raw * 1.0001, raw), 1.0


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("of", ["logits", "hidden states"])
def test_a_target_is_not_ahead_of_itself(of, monkeypatch):
    "Though its score is rounded twice, alone and among all, and may be higher there"
    made = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, H, generator=made) for n in (N, V))
    z, o = x @ w.T, loss_options(dict(ignore_index=-100))
    everywhere(monkeypatch, softmax, "score_fn", lambda o: higher_in_a_block)
    y, asked = z.argmax(1), Statistics(ranks=True)
    assert (z.amax(1) > 0).all()
    rows = launch_scan(z[:, None], y, None, None, o, asked)[3] if of == "logits" else launch_lse(x, w, y, None, None, None, None, o, asked)[3]
    assert not rows[2].any()


def test_a_flag_that_is_none():
    x, w, y, _ = drawn()
    with pytest.raises(ValueError, match="target_rank"):
        fl.linear_log_probs(x, w, y, target_rank="yes")
