# Two commands do everything: `make tour` and `make test`. Each sets up .venv first, once.
# PYTHON=python3 on the command line uses a Python that has torch, numpy and tqdm already, and sets up nothing.
.PHONY: help tour test test-all check-generated check-site pages pytest house outdated dev test-gpu test-gpu-many sanitize fuzz docs notebooks-gpu records-gpu bench stamp lab puzzles clean

ifneq ($(origin PYTHON),command line)
PYTHON := .venv/bin/python
READY := .venv/ready
NBDEV := .venv/bin/
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

dev: $(READY)  ## set up .venv, and git hooks that clean notebooks and check that modules equal them
	$(NBDEV)nbdev_install_hooks
	$(NBDEV)pre-commit install

tour: $(READY)  ## train a small model with the loss of every stage, on the device at hand
	$(PYTHON) -m workbook.tour

# one thread for each of pytest's workers: two that fight over two cores are ten times slower
test test-all check-generated check-site pytest: export TRITON_INTERPRET = 1
test test-all check-generated check-site pytest test-gpu: export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # many processes import the same modules
test: $(READY)  ## what must be right for users, on any machine, without a GPU: four minutes on two idle cores
	@$(MAKE) --no-print-directory --jobs 3 check-generated check-site pages pytest

check-generated: $(READY)
	$(PYTHON) tools/check_generated.py
	$(PYTHON) tools/check_workbook.py
	$(PYTHON) tools/check_house.py
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check fusedloss workbook

# rendered anew, elsewhere: docs/ itself is renewed by `make docs`
check-site: $(READY)
	$(PYTHON) tools/check_site.py

# as a person types it: the pages turn on Triton's interpreter themselves
pages: $(READY)
	env -u TRITON_INTERPRET $(NBDEV)nbdev_test

pytest: $(READY)
	$(PYTHON) -m pytest -n 2 --dist worksteal --durations 15 -m "not thorough"

test-all: export FUSEDLOSS_GRIDS = full
test-all: $(READY)  ## every test with the whole of its grids, planted bugs, the browser, every page in a kernel; for a night or a release
	$(PYTHON) -m pytest -n 2 --dist worksteal --durations 50

house: $(READY)  ## the directions of imports in the package
	$(PYTHON) tools/check_house.py

outdated: $(READY)  ## pages whose kernels have changed since their GPU outputs were made
	$(PYTHON) tools/outdated.py

# FUSEDLOSS_GRIDS=full make test-gpu: with the whole grids
test-gpu: export FUSEDLOSS_DEVICES = cuda
test-gpu: $(READY)  ## what needs a GPU, on the one at hand, in parallel; notebooks-gpu runs the pages
	workers=$$($(PYTHON) tools/gpu_workers.py) && $(PYTHON) -m pytest -n $$workers --dist worksteal --ignore tests/test_notebooks.py

test-gpu-many: $(READY)  ## distributed tests on two or more GPUs
	$(PYTHON) -c "import sys, torch; n = torch.cuda.device_count(); sys.exit(f'expected two GPUs or more, got {n}' if n < 2 else 0)"
	$(PYTHON) -m pytest tests/test_sharded.py tests/test_kernels.py tests/test_scans.py -k "several_gpus or second_device or not_the_current"

sanitize: export PYTHONPATH = $(CURDIR)
sanitize: $(READY)  ## every kernel under compute-sanitizer, on the GPU at hand
	$(PYTHON) tools/sanitize.py

fuzz: export PYTHONPATH = $(CURDIR)
fuzz: $(READY)  ## random calls of the losses against float64, SECONDS of them, on the GPU at hand or a CPU; RANKS=2: over ranks
	$(PYTHON) tools/fuzz.py --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0) --ranks $(or $(RANKS),1) $(LOSSES)

notebooks-gpu: $(READY)  ## run the notebooks on the GPUs at hand, JOBS at a time; save their outputs and nbs/results
	$(PYTHON) tools/run_notebooks.py --jobs $(or $(JOBS),1) $(NOTEBOOKS)

records-gpu: export PYTHONPATH = $(CURDIR)
records-gpu: $(READY)  ## whole models and first calls, on the GPU at hand: records that no notebook makes
	$(PYTHON) examples/whole_models.py
	$(PYTHON) examples/first_calls.py

bench: $(READY)  ## ratios of ours to eager at this commit, into nbs/results/trend: on the CPU, and on a GPU if there is one
	$(PYTHON) -m workbook.trend

stamp: $(READY)  ## write .commit: what a copy of the project without its history is a copy of
	$(PYTHON) tools/project.py stamp

docs: export TRITON_INTERPRET = 1
docs: $(READY)  ## README.md and docs/, from the notebooks
	$(PYTHON) tools/build_readme.py
	$(PYTHON) tools/build_site.py
	$(PYTHON) tools/check_site.py docs

lab: $(READY)  ## JupyterLab on the notebooks
	$(PYTHON) -m jupyterlab nbs

puzzles: export TRITON_INTERPRET = 1
puzzles: $(READY)  ## JupyterLab on eighteen kernels to fill in; no GPU needed
	$(PYTHON) -m jupyterlab nbs/puzzles

clean:  ## remove what make made, docs/ aside
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .hypothesis _proc
