"""Core-seconds of each test file: what `make test` allows, and what a run used, in all of its processes."""
import os
import time
from collections import Counter

import pytest
import torch

ALLOWED = {  # core-seconds of each file under `make test`
    "test_arguments.py": 6,
    "test_bad_arguments.py": 6,
    "test_baseline.py": 2,
    "test_browse.py": 60,
    "test_budgets.py": 3,
    "test_catalogues.py": 13,
    "test_check_generated.py": 4,
    "test_check_house.py": 2,
    "test_check_workbook.py": 2,
    "test_chunks.py": 9,
    "test_cluster.py": 5,
    "test_contrast.py": 8,
    "test_cosine.py": 7,
    "test_ctc.py": 60,
    "test_cuda.py": 5,
    "test_decode.py": 4,
    "test_devices.py": 12,
    "test_divergence.py": 12,
    "test_drawing.py": 6,
    "test_examples.py": 24,
    "test_exponentials.py": 12,
    "test_filter.py": 27,
    "test_glossary_links.py": 1,
    "test_graphs.py": 2,
    "test_grids.py": 2,
    "test_host.py": 8,
    "test_iota.py": 30,
    "test_kernels.py": 9,
    "test_kernels_once.py": 10,
    "test_kernels_triton.py": 22,
    "test_large.py": 1,
    "test_learned_scale.py": 14,
    "test_linear_ctc.py": 60,
    "test_losses.py": 20,
    "test_logprobs.py": 14,
    "test_many_gpus.py": 2,
    "test_margins.py": 10,
    "test_measure.py": 6,
    "test_memory.py": 14,
    "test_movement.py": 8,
    "test_mutations.py": 2,
    "test_notebooks.py": 60,
    "test_nvrtc.py": 8,
    "test_offline.py": 12,
    "test_operators.py": 14,
    "test_package.py": 16,
    "test_package_code.py": 3,
    "test_partial_fc.py": 18,
    "test_peers.py": 2,
    "test_plan_widget.py": 8,
    "test_plans.py": 5,
    "test_planted.py": 3,
    "test_product.py": 24,
    "test_puzzles.py": 14,
    "test_rates.py": 6,
    "test_readme.py": 6,
    "test_recipes.py": 25,
    "test_recompute.py": 19,
    "test_row_sparse.py": 8,
    "test_records.py": 2,
    "test_reference_page.py": 12,
    "test_run_notebooks.py": 2,
    "test_safe_reading.py": 3,
    "test_sampling.py": 8,
    "test_sanitize.py": 2,
    "test_saved_tensors.py": 14,
    "test_scans.py": 30,
    "test_semirings.py": 15,
    "test_sharded.py": 77,
    "test_sharded_heads.py": 8,
    "test_sharded_product.py": 40,
    "test_site.py": 6,
    "test_snapshot.py": 5,
    "test_sources.py": 2,
    "test_store.py": 2,
    "test_target_rank.py": 5,
    "test_targets.py": 17,
    "test_tiles.py": 10,
    "test_tour.py": 32,
    "test_triton.py": 4,
    "test_tuning.py": 8,
    "test_tutorials_identities.py": 3,
    "test_tutorials_language_model.py": 3,
    "test_tutorials_policy.py": 4,
    "test_tutorials_reading.py": 3,
    "test_typed_launches.py": 8,
    "test_transformers.py": 24,
    "test_trl.py": 70,  # where TRL is installed; else none
    "test_types.py": 9,
    "test_weights.py": 4,
}
NORMAL = 0.13  # core-seconds of `yardstick` on the processor on which ALLOWED was found
FACTOR = 2  # for a neighbour on the same core and cold caches


def core_seconds() -> float:
    "What this process and the children it has waited for have used so far"
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def yardstick() -> float:
    "Core-seconds of a fixed piece of work like that of the tests: small tensors, much Python; the best of three"
    x, used = torch.ones(16, 16), []
    for _ in range(3):
        start = time.process_time()
        for _ in range(20000):
            (x @ x).sum().add(1)
            [str(n) for n in range(20)]
        used.append(time.process_time() - start)
    return min(used)


def too_slow(used: dict[str, float], slower: float) -> list[str]:
    "Files that used more than they may, in words, on a processor that takes `slower` times as long"
    limits = {name: FACTOR * max(1.0, slower) * ALLOWED.get(name, 0) for name in used}
    return [f"{name} used {used[name]:.0f} core-seconds; it may use {ALLOWED.get(name, 0)}, here {limits[name]:.0f}"
            for name in sorted(used) if used[name] > limits[name]]


class CoreSeconds:
    "Adds up what tests use, in workers too, and ends a run that used too much as a failure"

    def __init__(self, config: pytest.Config):
        self.used, self.enforced = Counter(), config.getoption("--budgets")
        self.slower = yardstick() / NORMAL if self.enforced and not hasattr(config, "workerinput") else 1.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        "A test and the fixtures that it is the first to need"
        start = core_seconds()
        done = yield
        self.used[item.nodeid] += core_seconds() - start
        return done

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        "A worker of pytest-xdist has ended"
        self.used.update(getattr(node, "workeroutput", {}).get("core_seconds", {}))

    def by_file(self) -> Counter:
        "Core-seconds by file name"
        files = Counter()
        for nodeid, used in self.used.items():
            files[nodeid.partition("::")[0].rpartition("/")[2]] += used
        return files

    def pytest_sessionfinish(self, session):
        "A worker hands its figures over; the run fails where a file used too much"
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["core_seconds"] = dict(self.used)
        elif self.enforced and session.exitstatus == 0 and too_slow(self.by_file(), self.slower):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        "The table, the longest tests, and what was too slow"
        if not self.enforced:
            return
        line, files = terminalreporter.write_line, self.by_file()
        terminalreporter.section(f"core-seconds, on a processor that takes {self.slower:.2f} times as long as the table's")
        for name, used in files.most_common():
            line(f"{used:7.1f} of {ALLOWED.get(name, 0):4}  {name}")
        line(f"{files.total():7.1f} of {sum(ALLOWED.values()):4}  all")
        for nodeid, used in self.used.most_common(10):
            line(f"{used:7.1f}  {nodeid}")
        for text in too_slow(files, self.slower):
            line(text, red=True)
