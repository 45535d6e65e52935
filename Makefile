# Two commands do everything: `make tour` and `make test`. Each sets up .venv first, once.
# PYTHON=python3 on the command line uses a Python that has torch already, and sets up nothing.
.PHONY: help tour test test-gpu sanitize docs notebooks-gpu lab clean

ifneq ($(origin PYTHON),command line)
PYTHON := .venv/bin/python
READY := .venv/ready
endif
BASE_PYTHON ?= python3

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16

# The stamp is written last: an interrupted install is done again.
.venv/ready: settings.ini setup.py pyproject.toml constraints.txt
	@rm -f $@
	$(BASE_PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

tour: $(READY)  ## train a small model with the loss of every stage, on the device at hand
	$(PYTHON) -c "import sys; from fusedloss.tour import main; sys.exit(main(['tour']))"

# one thread for each of pytest's workers: two that fight over two cores are ten times slower
test: export TRITON_INTERPRET = 1
test: export OMP_NUM_THREADS = 1
test: $(READY)  ## everything that can be checked without a GPU
	$(PYTHON) tools/check_generated.py modules notebooks
	$(PYTHON) tools/check_workbook.py
	$(PYTHON) tools/check_generated.py readme site
	$(PYTHON) tools/check_site.py
	$(PYTHON) -m pytest -n 2

test-gpu: export FUSEDLOSS_FLAGS = cuda slow
test-gpu: $(READY)  ## every test, cuda cells included, on the GPU at hand
	$(PYTHON) -m pytest

sanitize: export PYTHONPATH = $(CURDIR)
sanitize: $(READY)  ## every kernel under compute-sanitizer, on the GPU at hand
	$(PYTHON) tools/sanitize.py

notebooks-gpu: $(READY)  ## run the notebooks on the GPU at hand; save their outputs and nbs/results
	$(PYTHON) tools/run_notebooks.py $(NOTEBOOKS)

docs: export TRITON_INTERPRET = 1
docs: $(READY)  ## README.md and docs/, from the notebooks
	$(PYTHON) tools/build_readme.py
	$(PYTHON) tools/build_site.py
	$(PYTHON) tools/check_site.py

lab: $(READY)  ## JupyterLab on the notebooks
	$(PYTHON) -m jupyterlab nbs

clean:  ## remove what make made, docs/ aside
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis _proc
