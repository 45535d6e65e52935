"""Bugs planted in the tiled loss, one at a time: the cases of `helpers` must notice each."""
from functools import partial
from types import ModuleType

import pytest

import fusedloss.tiles
from grids import few, thorough_but
from helpers import CASES, faults, planted, unchanged

MUTANTS = {  # what is wrong: (text of the source, what stands in its place)
    "the last class is left out": ("min(start + tile, size)", "min(start + tile, max(size - 1, 1))"),
    "only the last tile counts": ("online_sums(row_max[i], s[i], z)", "online_sums(row_max[i], 0 * s[i], z)"),
    "a later tile erases the target's score": ("score[i] += ", "score[i] = "),
    "the target's score is added in every tile": ("score[i] += torch.where(target.inside, z.gather(1, target.column), 0.0)", "score[i] += z.gather(1, target.column)"),
    "targets are sought from the first class": ("(y - j.start)[:, None]", "y[:, None]"),
    "the nearest column is always the target": ("Target(nearest, column == nearest)", "Target(nearest, nearest == nearest)"),
    "the margin lands on a neighbour": ("self.margin * target.inside", "self.margin * (target.inside | True)"),
    "the margin is not scaled": ("margin * (scale or 0.0)", "margin"),
    "zero vectors are divided by zero": ("self.rows = scale / row_norms(x)", "self.rows = scale / x.norm(dim=-1)"),
    "columns are not normalised in backward": ("z.mul_(columns); g_target", "g_target"),
    "the target's gradient is dropped": ("torch.where(target.inside, g_score[:, None], 0.0)", "0.0 * g_score[:, None]"),
    "the upstream gradient is dropped": ("torch.mul(z, g_sum[:, None],", "torch.mul(z, g_sum.mean(),"),
    "dw is left in its unit": ("slice_of_dw.mul_(unit)", "slice_of_dw"),
    "dx is left in its unit": ("dx.mul_(unit)", "dx"),
    "dw keeps its radial part": ("else remove_radial(dw, tiles.w[j])", "else dw"),
    "dx keeps its radial part": ("for i in tiles.tokens: remove_radial(dx[i], x[i])", "pass"),
    "dw takes the first tokens for all": ("add_product(dw, dz.T, tiles.x[i]", "add_product(dw, dz.T, tiles.x[:i.stop - i.start]"),
    "dx forgets the tiles before": ("add_product(dx, dz, tiles.w[j].to(tiles.dtype))", "dx.copy_(dz @ tiles.w[j].to(tiles.dtype))"),
    "one flag decides both gradients": ("*options, needs.x, needs.w,", "*options, needs.x, needs.x,"),
    "ignore_index is forgotten": ("linear_weight.shape[0],\n                       ignore_index, reduction)", "linear_weight.shape[0], -100, reduction)"),
    "the mean is over all tokens": ("linear_weight.shape[0],\n                       ignore_index, reduction)", "linear_weight.shape[0], ignore_index, 'none').mean()"),
    "the caller's weight is normalised": ("direction = t / row_norms(t)[:, None]", "direction = t.div_(row_norms(t)[:, None])"),
}
CHOSEN = few(MUTANTS, "the last class is left out", "a later tile erases the target's score", "targets are sought from the first class",
             "the margin is not scaled", "columns are not normalised in backward", "the upstream gradient is dropped", "dw is left in its unit",
             "dx forgets the tiles before", "one flag decides both gradients", "the caller's weight is normalised")


@pytest.fixture
def variant(tmp_path):
    "The tiles module with texts replaced"
    return partial(planted, fusedloss.tiles, tmp_path)


def first_fault(module: ModuleType) -> str | None:
    "The first case that the module's loss does not pass"
    for name, case in CASES.items():
        try:
            wrong = faults(module.tiled_linear_cross_entropy, case, "cpu")
        except (RuntimeError, IndexError) as error:
            wrong = [str(error)]
        if wrong:
            return f"{name}: {wrong}"
    return None


def test_the_unchanged_source_passes(variant):
    assert first_fault(variant(*unchanged(MUTANTS.values()))) is None


@pytest.mark.parametrize("bug", thorough_but(CHOSEN, "a later tile erases the target's score"))
def test_a_planted_bug_is_noticed(bug, variant):
    assert first_fault(variant(*MUTANTS[bug])), f"no case notices that {bug}"
