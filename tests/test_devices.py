"What a GPU can do, and which implementations take it; no test needs a GPU."
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fusedloss
from fusedloss import clusters, ctc, kernels, lattices, recompute, scans, segments, tiles
from fusedloss.core import cuda, devices, negatives, tiling, triton as with_triton
from fusedloss.core.devices import CPU, FEATURES, GPUS, Implementation, device_of, lacks
from fusedloss.filter import filter_tiling
from fusedloss.core.rates import H200, Machine
from fusedloss.core.options import LossOptions, NO_STATISTICS
from fusedloss.core.tiling import Tiling, shared_bytes
from fusedloss.semirings import Log
from fusedloss.core import products as core_products
from project import ROOT
from fusedloss.doctor import implementations
from workbook.records import machine_name, record
from workbook.support import gpu_rows, support_rows


@pytest.fixture
def properties(monkeypatch):
    "Let PyTorch report a GPU"
    def report(hip=None, **fields):
        given = SimpleNamespace(**fields)
        devices.recognised.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: given)
        monkeypatch.setattr(torch.version, "hip", hip)
    yield report
    devices.recognised.cache_clear()


@pytest.mark.parametrize("name", [name for name, d in GPUS.items() if d.vendor == "nvidia"])
def test_a_known_gpu_is_what_the_driver_describes(properties, name):
    d = GPUS[name]
    properties(name=d.name, major=d.capability[0], minor=d.capability[1], multi_processor_count=d.multiprocessors,
               shared_memory_per_block_optin=d.shared_memory)
    assert device_of("cuda") == device_of(0) == device_of(torch.device("cuda", 0)) == d


def test_a_capability_on_hip_is_not_nvidias(properties):
    properties(hip="6.4", name="AMD Instinct MI300X", major=9, minor=4, multi_processor_count=304, shared_memory_per_block=65536)
    d = device_of("cuda")
    assert d == GPUS["MI300X"]._replace(name="AMD Instinct MI300X")
    assert lacks(d, "nvidia") and lacks(d, "tma") and lacks(d, "clusters") and not lacks(d, "gpu")


def test_an_old_torch_reports_no_shared_memory_to_opt_in_to(properties):
    properties(name="unknown", major=9, minor=0, multi_processor_count=1)
    assert device_of("cuda").shared_memory == 49152


def test_what_is_no_gpu_has_no_vendor():
    places = "cpu", "meta", torch.zeros(2), torch.zeros(2, device="meta"), torch.device("cpu")
    assert all(device_of(place) is CPU for place in places)
    assert lacks(CPU, "gpu") == "no GPU"


def test_a_gpu_without_a_driver_is_no_gpu(properties, monkeypatch):
    properties()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(torch.device("cuda", 0)) is CPU

@pytest.mark.parametrize("d", GPUS.values(), ids=lambda d: d.name)
@pytest.mark.parametrize("busy", [False, True])
def test_tiles_and_what_is_tried_beside_them_fit_a_block(d, busy):
    for t in {tiling.cut(d, desc, busy) for desc in (False, d.tma)}:
        assert shared_bytes(t, d) <= d.shared_memory
        for stores in (False, True):
            deeper = [t._replace(stages=stages) for stages in tiling.deeper(t, d, stores)]
            assert all(t.stages < more.stages and shared_bytes(more, d, stores) <= d.shared_memory for more in deeper)


def test_an_h200_has_the_tiles_it_was_measured_with():
    cut = [tiling.cut(GPUS["H200"], desc, busy) for desc, busy in ((True, False), (True, True), (False, False))]
    assert cut == [Tiling(True, 128, 256, 64), Tiling(True, 128, 128, 64, stages=4), Tiling(False, 128, 128, 32)]
    assert [tiling.deeper(t, GPUS["H200"], stores) for t in cut for stores in (False, True)] == [(4,), (), (), (), (4,), (4,)]


def test_where_nothing_fits_the_smallest_tiles_are_taken():
    tiny = GPUS["H200"]._replace(shared_memory=1000)
    assert tiling.cut(tiny, True, False) == tiling.WIDE[-1] and tiling.deeper(tiling.WIDE[-1], tiny, True) == ()


def products(line):
    "Tiling of a launch of a product kernel, and whether it stores tiles; None of other kernels"
    (_, name), types, _, flags = json.loads(line)
    value = {k: v for k, (t, v) in types.items() if t == "constexpr"}
    if name not in ("lse_kernel", "dz_kernel", "negatives_lse_kernel", "cosine_dz_kernel", "tile_softmax_kernel"): return None
    t = Tiling(value["DESC"], value["BN"], value["BV"], value["BH"], flags["num_warps"], flags["num_stages"], value["GROUP"])
    return t, name not in ("lse_kernel", "negatives_lse_kernel")


COMPARED = [(arch, how) for arch in (80, 90, 100, 120) for how in ("plain", "busy", "scaled")]


@pytest.mark.thorough
@pytest.mark.parametrize("arch, how", COMPARED)
def test_the_bound_of_shared_memory_is_near_what_the_compiler_asks_for(arch, how, monkeypatch):
    pytest.importorskip("triton")
    from offline import lines_of
    from test_offline import linear
    from workbook.support import ONE_EACH
    from typed_launches import lowerer
    d, seen = GPUS[ONE_EACH[arch]], set()
    for line in lines_of(lambda: linear(torch.bfloat16, how, 2048), d, monkeypatch):
        if products(line):
            t, stores = products(line)
            bound, used = shared_bytes(t, d, stores), lowerer().usage(line, arch)["shared"]
            assert used <= bound <= used + 12 * 2**10, (line, used, bound)
            seen.add(stores)
    assert seen == {False, True}


@pytest.mark.parametrize("feature, implementation", [
    ("tma", tiling.BY_DESCRIPTORS), ("clusters", clusters.ROW_CLUSTERS), ("clusters", ctc.LATTICE_CLUSTERS),
    ("nvidia", clusters.REGISTER_LIMIT), ("nvidia", ctc.LATTICE), ("nvidia", segments.SEGMENTS), ("nvidia", scans.SCANS), ("nvidia", lattices.DIAGONALS)])
def test_what_a_gpu_lacks_is_not_chosen(feature, implementation):
    have = [d for d in GPUS.values() if not lacks(d, feature)]
    assert have and [d for d in GPUS.values() if not implementation.lacks(d)] == have
    assert implementation.lacks(GPUS["MI300X"]) and implementation.lacks(CPU)


@pytest.fixture
def told(monkeypatch):
    "Let tensors that have no memory lie on a GPU"
    pytest.importorskip("triton")
    from offline import told_of
    with ExitStack() as stack:
        yield lambda d: stack.enter_context(told_of(d, monkeypatch))


def chosen(d, told):
    "What is chosen on a GPU: descriptors, a cluster, registers, the lattice's shape, scans"
    from offline import cuda
    launches = told(d)
    x, z = cuda(4096, 512, dtype=torch.bfloat16), cuda(4096, 1, 32768, dtype=torch.bfloat16)
    y = cuda(4096, dtype=torch.int64)
    clusters.launch_turnaround(z, y, None, None, None, LossOptions())
    limited = any("maxnreg" in options for _, _, options in launches)
    frames = cuda(7, 2, 50)
    edges = cuda(5, 2, 4, 3)
    return dict(descriptors=tiling.tiling_of(x, x).desc, filtered=filter_tiling(x, LossOptions(), False).desc,
                cluster=clusters.row_cluster(z, None, LossOptions()) is not None, registers=limited,
                ctc=ctc.runs_kernels(frames), scans=scans.runs_kernel(edges, Log))


@pytest.mark.parametrize("name, expected", [("H200", "111111"), ("B200", "111111"), ("RTX 5090", "111111"), ("A100", "000111"),
                                            ("L4", "000111"), ("MI300X", "000000")])
def test_each_gpu_gets_what_it_can_run(name, expected, told):
    assert "".join(str(int(v)) for v in chosen(GPUS[name], told).values()) == expected


def test_nothing_is_compiled_by_nvrtc_on_hip(properties):
    properties(hip="6.4", name="AMD Instinct MI300X", major=9, minor=4, multi_processor_count=304, shared_memory_per_block=65536)
    cuda.compiler_failure.cache_clear()
    try: assert all("NVIDIA" in cuda.compiler_failure(compiler, 0) for compiler in cuda.COMPILERS)
    finally: cuda.compiler_failure.cache_clear()


@pytest.mark.parametrize("name", ["L4", "A100", "H200", "B200"])
def test_parts_and_launches_follow_the_multiprocessors(name):
    d = GPUS[name]
    assert kernels.scan_parts(1, 2**22, d.multiprocessors) == 2 * d.multiprocessors
    assert kernels.scan_parts(2 * d.multiprocessors, 2**22, d.multiprocessors) == 1
    z = torch.empty(d.multiprocessors, 1, 4096)
    assert clusters.turns_in_one_launch(z, d.multiprocessors) and not clusters.turns_in_one_launch(z[1:], d.multiprocessors)


def test_a_triton_that_cannot_compile_leaves_pytorch_and_says_why(monkeypatch):
    triton = pytest.importorskip("triton")
    class Broken:
        @property
        def active(self): raise RuntimeError("Failed to find C compiler")
    with_triton.triton_works.cache_clear()
    monkeypatch.setattr(triton.runtime, "driver", Broken())
    try:
        with pytest.warns(UserWarning, match="Failed to find C compiler"): assert not with_triton.triton_works()
        assert not with_triton.triton_works()  # without a second warning
    finally: with_triton.triton_works.cache_clear()


def test_everything_runs_without_triton_cupy_and_a_compiler():
    done = subprocess.run([sys.executable, "-W", "error", "without_kernels.py"], capture_output=True, text=True, cwd=Path(__file__).parent,
                          env=os.environ | {"PYTHONPATH": str(Path(fusedloss.__file__).parents[1])})
    assert done.returncode == 0, done.stderr
    rest = {"CrossEntropyStats", "margins", "semirings", "rewrite_gather"}  # a result, two modules, and what takes a graph
    assert {*done.stdout.split()} >= {*fusedloss.__all__} - rest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_into_float32_where_no_gpu_multiplies_so(dtype):
    a, b = torch.randn(9, 4).to(dtype), torch.randn(4, 5).to(dtype)
    assert not core_products.multiplies_in_float32(a.device)
    exact, total, out = a.double() @ b.double(), torch.ones(9, 5), torch.empty(9, 5).fill_(torch.nan)
    tiles.add_product(total, a, b)
    negatives.product_into(out, a, b)
    for got in (tiles.wide_product(a, b), out, total - 1):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("t", [*tiling.WIDE, *tiling.BUSY, *tiling.POINTERS], ids=str)
def test_tilings_of_other_gpus_agree_here(t):
    d = device_of("cuda")
    if t.desc and not d.tma or shared_bytes(t, d) > d.shared_memory: pytest.skip("these tiles want another GPU")
    o, g = LossOptions(), torch.ones(300, device="cuda")
    x, w = (torch.randn(n, 96, device="cuda").bfloat16() for n in (300, 1003))
    y = torch.randint(1003, (300,), device="cuda")
    def run(tiling):
        losses, lse, entropy, rows = recompute.launch_lse(x, w, y, None, None, None, None, o, NO_STATISTICS, tiling)
        return lse, *recompute.kernel_bwd((g, None, None), x, w, y, None, None, None, None, rows, entropy, o, 0, (True, True, False), tiling)[:2]
    scores = x.double() @ w.double().T
    torch.testing.assert_close(run(t)[0].double(), scores.logsumexp(1), rtol=1e-5, atol=1e-5)
    for got, expected in zip(run(t)[1:], run(tiling.tiling_of(x, w))[1:]):
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))


def test_the_table_names_every_source():
    found = implementations()
    columns, rows = support_rows(found, [GPUS["H200"], GPUS["A100"], GPUS["MI300X"], GPUS["T4"]])
    assert columns == ["", "kernels", "H200", "A100", "MI300X", "T4", "otherwise"]
    assert all(row[2].startswith("measured") for row in rows)
    assert not any("measured" in cell for row in rows for cell in row[3:6]) and {row[3] for row in rows} >= {"passed over: no clusters", "compiled only"}
    assert {row[5] for row in rows if "passed" not in row[5]} == {row[5] for row in rows if row[5].startswith("not tried")}


def test_a_gpu_is_measured_where_a_record_names_one_of_its_boards(tmp_path):
    def levels():
        columns, rows = gpu_rows(implementations(), GPUS.values(), [tmp_path, tmp_path / "trend"])
        assert {row[0] for row in rows} == {*GPUS} and all(len(row) == len(columns) for row in rows)
        return {row[0]: row[2] for row in rows}, rows
    before, _ = levels()
    record(tmp_path / "trend" / "a.json", "loss", {}, torch.float32, time=1.0)
    (tmp_path / "b.json").write_text((tmp_path / "trend" / "a.json").read_text().replace(machine_name(), "NVIDIA H100 PCIe"), encoding="utf-8")
    after, rows = levels()
    assert set(before.values()) == {"compiled only", "not tried"} and after == before | {"H100": "measured"}
    assert rows[0] == ["H100", "9.0", "measured", f"{len(implementations())} of {len(implementations())}", ""]
    (tmp_path / "trend" / "a.json").write_text((tmp_path / "b.json").read_text().replace("H100 PCIe", "H200"), encoding="utf-8")
    assert levels()[0] == after | {"H200": "measured"}
    lesser = next(row for row in rows if row[0] == "A100")
    assert lesser[2:4] == ["compiled only", f"{sum(not i.lacks(GPUS['A100']) for i in implementations())} of {len(implementations())}"] and "no clusters: 2" in lesser[4]


def test_a_plan_says_what_a_gpu_is_passed_over_for():
    def last(name, dtype=torch.bfloat16, features=2048):
        machine = Machine(name, H200.bandwidth, H200.rates, GPUS.get(name, CPU))
        return {row[0]: row[-1] for row in fusedloss.plan(8192, 65536, features, dtype, machine=machine).table.rows}
    there = last("A100")
    assert there["recompute"].endswith("operands by pointers: no tensor descriptors") and there["chunks"].endswith("rows by Triton: no clusters")
    assert not any(";" in verdict for name in ("H200", "RTX 5090", "a machine that does not say") for verdict in last(name).values())
    assert last("H200", torch.float32)["recompute"].endswith("by PyTorch: not of 16 bits")
    assert last("H200", features=2049)["recompute"].endswith("operands by pointers: H is no multiple of 8")
    assert last("MI300X")["recompute"].endswith("operands by pointers: not of NVIDIA")


def test_every_cuda_source_has_a_row():
    sources = " ".join(i.source for i in implementations())
    assert all(f"cuda/{path.name}" in sources for path in (ROOT / "cuda").glob("*.cu"))


def test_implementations_say_what_a_gpu_lacks():
    spare = Implementation("spare", "none", ("tma",), "nothing")
    assert [spare.lacks(GPUS[name]) for name in ("L4", "H100")] == ["no tensor descriptors", ""]
    assert lacks(GPUS["A100"], "nvidia", "tma") == "no tensor descriptors" and lacks(GPUS["MI300X"], "gpu", "nvidia") == "not of NVIDIA"
    assert not any(lacks(GPUS[name], *FEATURES) for name in ("H200", "B200", "RTX 5090"))
