"""The calls that compute-sanitizer watches: each runs, on the device at hand."""
import kernels_once
import pytest


@pytest.mark.parametrize("part", [part.__name__ for part in kernels_once.PARTS])
def test_every_part_runs(part, capsys):
    kernels_once.main([part])
    assert capsys.readouterr().out.startswith(f"{part}: ")
