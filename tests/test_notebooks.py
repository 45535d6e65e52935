"""Every notebook is one test: the cells that `nbdev_test` runs, in a process and a copy of `nbs/` of its own."""
import os
import shutil
import subprocess
import sys

import pytest
from workbook import ROOT, notebooks

RUN = "import sys; from nbdev.test import nbdev_test; nbdev_test.__wrapped__(path=sys.argv[1], flags=sys.argv[2], n_workers=0)"


@pytest.mark.parametrize("notebook", [path.relative_to(ROOT).as_posix() for path in notebooks()])
def test_notebook(notebook, tmp_path):
    pytest.importorskip("nbdev")
    shutil.copytree(ROOT / "nbs", tmp_path / "nbs")  # on a GPU the cells write nbs/results
    shutil.copytree(ROOT / "examples", tmp_path / "examples")  # which a page shows
    shutil.copy(ROOT / "settings.ini", tmp_path)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", RUN, notebook, os.environ.get("FUSEDLOSS_FLAGS", "")], cwd=tmp_path,
                          env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=1800)
    if done.returncode or "Success." not in done.stdout:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
