"""Every notebook is one test: the cells that `nbdev_test` runs, in a process of its own."""
import os
import subprocess
import sys

import pytest
from workbook import ROOT, notebooks

RUN = "import sys; from nbdev.test import nbdev_test; nbdev_test.__wrapped__(path=sys.argv[1], flags=sys.argv[2], n_workers=0)"


@pytest.mark.parametrize("notebook", [path.relative_to(ROOT).as_posix() for path in notebooks()])
def test_notebook(notebook):
    pytest.importorskip("nbdev")
    done = subprocess.run([sys.executable, "-c", RUN, notebook, os.environ.get("FUSEDLOSS_FLAGS", "")],
                          cwd=ROOT, capture_output=True, text=True, timeout=1800)
    if done.returncode or "Success." not in done.stdout:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
