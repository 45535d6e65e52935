"""The loader of `cuda/*.cu`: one order of compilers for every kernel, and one neutral warning for a source that none compiles."""
import ctypes
import re
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import fusedloss.clusters
import fusedloss.ctc
import fusedloss.fp8
import fusedloss.lattices
import fusedloss.linear_ctc
import fusedloss.scans
import fusedloss.segments
from fusedloss.core import cuda, hopper, ignored
from fusedloss.core.devices import GPUS
from fusedloss.core.lattice import ScanShape
from fusedloss.ctc import LOGITS
from fusedloss.semirings import Log
from helpers import everywhere

f32 = torch.float32
SHAPE = ScanShape(1, 8, 1, 4)
SCORES = torch.zeros(2, 1, 3, 2)
LOOP = torch.zeros(3, 2, dtype=torch.int64)


def turnaround():
    z, y = torch.zeros(1, 1, 5000), torch.zeros(1, dtype=torch.int64)
    return fusedloss.clusters.launch_cluster(z, z, y, None, None, None, fusedloss.clusters.LossOptions(), fusedloss.clusters.Cluster(1, 8, 256, 4))


def scan():
    return fusedloss.scans.launch_scan(SCORES, LOOP, None, torch.zeros(3, 1, 3), Log) or None


def fused():
    return fusedloss.scans.fused_compiles(fusedloss.scans.FusedShape(32, 1, 3), Log, SCORES) or None


def ctc():
    return fusedloss.ctc.kernels_for(0, f32, 40, LOGITS, SHAPE)


def linear_ctc():
    return fusedloss.segments.compile_kernels(0, f32, SHAPE, True)


def transducer():
    return fusedloss.lattices.cuda_lattice(0, 100, False, True)


def product():
    return hopper.form_kernel("exponentials", hopper.IN_TURN, torch.bfloat16, 0)


def zeros():
    return ignored.zero_rows(0, 3, 64, -100)


def rounding():
    return fusedloss.fp8.rounding_kernel(0)


USERS = {"turnaround": turnaround, "sparse_scan": scan, "sparse_logz": fused, "ctc": ctc, "linear_ctc": linear_ctc, "transducer": transducer, "product_sm90": product, "zero_rows": zeros, "round_fp8": rounding}  # by their source


class Kernel:
    "As CuPy and as PyTorch hand it out"
    kernel, func = SimpleNamespace(ptr=11), SimpleNamespace(value=11)

    def __call__(self, *given, **options):
        pass

    def set_shared_memory_config(self, size):
        pass


class Driver:
    "Launches of a kernel of `addresses` addresses, three integers and a float, as it would read them; `errors` come first"
    def __init__(self, addresses=0, errors=()):
        self.addresses, self.errors, self.seen, self.asked = addresses, list(errors), [], []

    def cuLaunchKernel(self, function, *rest):
        *grid, shared, stream, places, extra = rest
        if self.errors:
            return self.errors.pop(0)
        kinds = [ctypes.c_uint64] * self.addresses + [ctypes.c_int, ctypes.c_longlong, ctypes.c_int, ctypes.c_double][:len(places) - self.addresses]
        self.seen.append((function.value, grid, shared, stream.value or 0, [kind.from_address(place).value for kind, place in zip(kinds, places)], extra))
        return 0

    def __getattr__(self, name):
        return lambda *given: self.asked.append(name)


class Compilers:
    "Stand-ins for CuPy and for PyTorch's NVRTC; `failing` ones compile nothing but what holds `accepted`"
    def __init__(self, monkeypatch):
        self.patch, self.compiled = monkeypatch, []
        monkeypatch.setattr(torch.cuda, "_compile_kernel", self.by_torch("", RuntimeError("no GPU")), raising=False)
        everywhere(monkeypatch, cuda, "null_pointer", lambda: torch.empty(0))
        everywhere(monkeypatch, cuda, "driver", Driver)
        everywhere(monkeypatch, cuda, "device_of", lambda index: GPUS["H200"])
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        self.cupy(None)

    def compile(self, compiler, source, name, accepted, error):
        if accepted not in source:
            raise error
        self.compiled.append((compiler, name))
        return Kernel()

    def cupy(self, accepted, error=None):
        "None: CuPy is absent. Else it compiles sources that hold `accepted`"
        def RawModule(code, options):
            assert ("-arch=sm_90a" in options) == ("wgmma" in code)
            return SimpleNamespace(get_function=lambda name: self.compile("CuPy", code, name, accepted, error))
        module = None
        if accepted is not None:
            module = ModuleType("cupy")
            module.RawModule = RawModule
        self.patch.setitem(sys.modules, "cupy", module)

    def broken_cupy(self, error):
        "CuPy is there, but its import raises"
        class Broken(ModuleType):
            def __getattr__(self, name):
                raise error
        self.patch.setitem(sys.modules, "cupy", Broken("cupy"))

    def by_torch(self, accepted, error=None):
        def compile_kernel(source, name, arch, nvcc_options):
            assert arch == ("90a" if "wgmma" in source else None)
            if accepted == "":
                raise error
            return self.compile("PyTorch", source, name, accepted, error)
        return compile_kernel

    def torch(self, accepted, error=None):
        self.patch.setattr(torch.cuda, "_compile_kernel", self.by_torch(accepted, error), raising=False)

    def of_ours(self):
        "Which compilers made kernels of the sources"
        return {compiler for compiler, name in self.compiled if name != "empty_kernel"}


MADE = ignored.zero_rows, cuda.compiled_kernel, cuda.cuda_kernel, fusedloss.clusters.bound_launches, fusedloss.ctc.kernels_for, fusedloss.segments.compile_kernels, fusedloss.lattices.cuda_lattice, fusedloss.fp8.rounding_kernel


def forget():
    "Nothing compiled, nothing warned of"
    for cached in (cuda.compiler_failure, *MADE):
        cached.cache_clear()
    cuda.warned_sources.clear()


@pytest.fixture
def compilers(monkeypatch):
    forget()
    monkeypatch.delenv("FUSEDLOSS_DEBUG", raising=False)
    yield Compilers(monkeypatch)
    forget()


ANY = "__global__"
BROKEN = [ImportError("libcudart.so.12"), AttributeError("numpy"), RuntimeError("CUDA 12 where CUDA 13 is"), OSError("no libnvrtc")]


@pytest.mark.parametrize("source", USERS)
def test_cupy_comes_first(source, compilers):
    compilers.cupy(ANY)
    compilers.torch(ANY)
    with warnings.catch_warnings(action="error"):
        assert USERS[source]() is not None
    assert compilers.of_ours() == {"CuPy"}


@pytest.mark.parametrize("source", USERS)
def test_pytorch_takes_the_place_of_a_cupy_that_is_absent(source, compilers):
    compilers.torch(ANY)
    with warnings.catch_warnings(action="error"):
        assert USERS[source]() is not None
    assert compilers.of_ours() == {"PyTorch"}


@pytest.mark.parametrize("error", BROKEN, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("source", USERS)
def test_pytorch_takes_the_place_of_a_cupy_that_does_not_import(source, error, compilers):
    compilers.broken_cupy(error)
    compilers.torch(ANY)
    with warnings.catch_warnings(action="error"):
        assert USERS[source]() is not None
    assert compilers.of_ours() == {"PyTorch"}


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("source", USERS)
def test_pytorch_takes_the_place_of_a_cupy_that_compiles_nothing(source, debug, compilers, monkeypatch):
    monkeypatch.setenv("FUSEDLOSS_DEBUG", debug)  # a compiler that does not work is no mistake in a source
    compilers.cupy("nothing holds this", RuntimeError("CuPy failed to load libnvrtc.so.12"))
    compilers.torch(ANY)
    with warnings.catch_warnings(action="error"):
        assert USERS[source]() is not None
    assert compilers.of_ours() == {"PyTorch"}


@pytest.mark.parametrize("source", USERS)
def test_one_warning_a_source_where_nothing_compiles(source, compilers):
    with pytest.warns(UserWarning, match=rf"cuda/{source}\.cu was not compiled.*CuPy: .*PyTorch: .*no GPU") as told:
        assert USERS[source]() is None
    assert len(told) == 1
    for cached in MADE:
        cached.cache_clear()  # other constants and other kernels of the source
    with warnings.catch_warnings(action="error"):
        assert USERS[source]() is None


@pytest.mark.parametrize("source", USERS)
def test_a_mistake_in_a_source_is_named(source, compilers, monkeypatch):
    compilers.cupy("empty_kernel", ValueError("expected a ;"))
    compilers.torch("empty_kernel", RuntimeError("expected a }"))
    with pytest.warns(UserWarning, match="CuPy: .*expected a ;.*PyTorch: .*expected a }") as told:
        assert USERS[source]() is None
    assert len(told) == 1
    monkeypatch.setenv("FUSEDLOSS_DEBUG", "1")
    forget()
    with pytest.raises(ValueError, match="expected a ;"):
        USERS[source]()


def test_what_shared_memory_a_launch_may_have_follows_the_compiler(compilers, monkeypatch):
    monkeypatch.setattr(torch.cuda._utils, "_CudaKernel", object, raising=False)  # as in a PyTorch that cannot ask for more
    compilers.broken_cupy(OSError("no libnvrtc"))
    assert not cuda.large_shared_memory(0)
    forget()
    compilers.cupy(ANY)
    assert cuda.large_shared_memory(0)


@pytest.mark.parametrize("names, made", [(("ctc_loss", "ctc_loss"), 1), (("ctc_loss", "ctc_grad"), 2)], ids=["one kernel", "two kernels"])
def test_threads_compile_each_kernel_once_and_wait_only_for_their_own(names, made, monkeypatch):
    forget()
    compiled, together = [], threading.Barrier(made)

    def compile_slowly(source, name, options, arch=""):
        if name != "empty_kernel":
            compiled.append(name)
            together.wait(30)  # two kernels are compiled at the same time, or this raises
            time.sleep(0.05)  # the other thread is here by now
        return lambda *given, **options: name
    everywhere(monkeypatch, cuda, "device_of", lambda index: GPUS["H200"])
    monkeypatch.setattr(cuda, "COMPILERS", {"a counter": compile_slowly})
    try:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda name: cuda.cuda_kernel(name, 0, ("ctc",), C=3), names)
        assert sorted(compiled) == sorted(set(names)) and (first is second) == (made == 1) and first() == names[0]
    finally:
        forget()


def test_handles_are_of_kernels_that_may_take_the_shared_memory(compilers, monkeypatch):
    made = SimpleNamespace(max_dynamic_shared_size_bytes=0, kernel=SimpleNamespace(ptr=17), func=SimpleNamespace(value=17))
    made.set_shared_memory_config = lambda size: setattr(made, "max_dynamic_shared_size_bytes", size)
    monkeypatch.setattr(compilers, "compile", lambda *_: made)
    compilers.cupy(ANY), compilers.torch(ANY)
    for compiler, size in zip(cuda.COMPILERS.values(), (100000, 200000)):
        assert compiler(cuda.EMPTY_KERNEL, "empty_kernel", cuda.OPTIONS).handle(size, 0) == 17 and made.max_dynamic_shared_size_bytes == size


def bound(driver, monkeypatch, *numbers):
    "A kernel of two addresses that the driver is asked to launch"
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    return cuda.Bound(SimpleNamespace(handle=lambda shared, arguments: 11), 2, 7, 128, 2, *numbers)


def test_what_the_driver_reads_of_a_bound_kernel(monkeypatch):
    "Addresses of each launch, numbers of all, also as narrower integers; the stream that is the current one then"
    launch = bound(driver := Driver(2), monkeypatch, -100, 2**40, 5, 0.125)
    launch(at := torch.zeros(3), None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 9)
    launch(3, 2**63)
    how = 11, [7, 1, 1, 128, 1, 1], 0
    assert driver.seen == [(*how, 102, [at.data_ptr(), 0, -100, 2**40, 5, 0.125], None), (*how, 9, [3, 2**63, -100, 2**40, 5, 0.125], None)]


def test_a_thread_without_a_context_gets_one(monkeypatch):
    bound(driver := Driver(2, [201]), monkeypatch)(1, 2)
    assert driver.asked == ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"] and [seen[4] for seen in driver.seen] == [[1, 2]]


@pytest.mark.parametrize("errors", [[1], [201, 700]])
def test_an_error_of_the_driver_is_raised(errors, monkeypatch):
    with pytest.raises(RuntimeError, match=f"cuLaunchKernel: the driver answers with error {errors[-1]}"):
        bound(Driver(2, errors), monkeypatch)(1, 2)


def test_threads_launch_with_their_own_addresses(monkeypatch):
    launch = bound(driver := Driver(2), monkeypatch, 5)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: launch(n, n + 1), range(400)))
    assert sorted(seen[4][:2] for seen in driver.seen) == [[n, n + 1] for n in range(400)]


def test_every_source_has_a_user_above():
    assert set(USERS) == {path.stem for path in (Path(fusedloss.__file__).parents[1] / "cuda").glob("*.cu")}


@pytest.mark.parametrize("answer", [0, 201])  # done; a thread without a context
def test_a_kernel_goes_to_the_driver_from_its_second_launch_on(answer, compilers, monkeypatch):
    "With its arguments as a kernel reads them; what the driver refuses CuPy launches"
    by_cupy, by_driver, t = [], [], torch.zeros(3)

    class Kernel:
        kernel = SimpleNamespace(ptr=1234)
        def __call__(self, grid, block, args, **options): by_cupy.append((grid, block, args))

    def driver(function, *given):
        *sizes, shared, stream, places, extra = given
        values = list(places)
        by_driver.append((function.value, sizes, ctypes.c_uint64.from_address(values[0]).value, ctypes.c_int.from_address(values[1]).value,
                          ctypes.c_double.from_address(values[2]).value, ctypes.c_uint64.from_address(values[3]).value, ctypes.c_int64.from_address(values[4]).value))
        return answer
    everywhere(monkeypatch, cuda, "driver", lambda: SimpleNamespace(cuLaunchKernel=driver))
    compilers.cupy(ANY)
    sys.modules["cupy"].RawModule = lambda code, options: SimpleNamespace(get_function=lambda name: Kernel())
    launch = cuda.CompiledByCupy("__global__ void name(float* at, int i, double d, void* none, long long n) {}", "name", ())
    for _ in range(2):
        launch(7, 64, t, -5, 0.25, None, 2**40)
    assert by_driver == [(1234, [7, 1, 1, 64, 1, 1], t.data_ptr(), -5, 0.25, 0, 2**40)]
    assert len(by_cupy) == (1 if answer == 0 else 2) and by_cupy[0][:2] == ((7,), (64,))


KERNELS = [(path.stem, name) for path in sorted((Path(fusedloss.__file__).parents[1] / "cuda").glob("*.cu"))
           for name in re.findall(r"__global__[^;{}]*?(\w+)\(\n", path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("compiler", cuda.COMPILERS)
@pytest.mark.parametrize("file, name", KERNELS)
def test_a_launch_with_other_than_all_arguments_raises_before_the_driver_reads_them(file, name, compiler, compilers, monkeypatch):
    "By each way: a call, a bound launch, a handle"
    compilers.cupy(ANY), compilers.torch(ANY)
    launch = cuda.COMPILERS[compiler](cuda.cuda_source(file), name, cuda.OPTIONS, "90a" if file == "product_sm90" else "")
    count = declared(file, name)
    for wrong in (count - 1, count + 1):
        message = rf"{name}: expected {count} arguments, got {wrong}"
        with pytest.raises(ValueError, match=message):
            launch(1, 32, *[0] * wrong)
        with pytest.raises(ValueError, match=message):
            cuda.Bound(launch, 0, 1, 32, 1, *[0] * (wrong - 1))
    launch.check_arguments(count)


@pytest.mark.parametrize("file, name", KERNELS)
def test_a_kernel_is_compiled_without_the_others_of_its_source(file, name):
    source = cuda.cuda_source(file)
    found, others = cuda.kernel_alone(source, name), source.count("__global__ ") - 1
    assert re.findall(r"__global__[^;{}]*?(\w+)\(\n", found) == [name]
    blank = lambda text: cuda.KERNEL.sub(lambda kernel: "\n" * kernel[0].count("\n"), text)
    assert blank(found) == blank(source) and (len(found) < len(source)) == (others > 0)
    for kernel in cuda.KERNEL.finditer(cuda.COMMENTS.sub(lambda c: "\n" * c[0].count("\n"), source)):  # no function between two of them
        assert kernel[0].count("{") == kernel[0].count("}") and kernel[0].count("__global__") == 1 and "INLINE" not in kernel[0]


def test_the_compiler_gets_the_kernel_alone(compilers):
    given = []
    compilers.cupy("")
    compilers.compile = lambda compiler, source, name, *rest: given.append(source) or Kernel()
    product()
    assert "score_statistics(" in (Path(fusedloss.__file__).parents[1] / "cuda/product_sm90.cu").read_text(encoding="utf-8")
    assert "exponentials(" in given[-1] and "score_statistics(" not in given[-1]


def test_a_kernel_that_is_not_compiled_although_others_are_raises(monkeypatch):
    "A launch without it would read nothing's handle"
    monkeypatch.setattr(hopper, "form_kernel", lambda *how: None)
    hopper.form_handle.cache_clear()
    with pytest.raises(RuntimeError, match="product_sm90.cu: score_maxima is not compiled"):
        hopper.form_handle("score_maxima", hopper.IN_TURN, torch.bfloat16, 0, 3)


def test_a_first_call_within_a_captured_graph_raises_and_a_later_one_compiles(compilers, monkeypatch):
    compilers.cupy("empty_kernel", RuntimeError("a module cannot be loaded"))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="cuda/zero_rows.cu: expected a call before the CUDA graph is captured"):
        everywhere(patch, cuda, "in_graph", lambda: True)
        zeros()
    compilers.cupy("")
    assert zeros() is not None


def declared(file: str, name: str) -> int:
    "The parameters of a kernel, each a type and a word, as its source lists them"
    text = "\n".join(line.split("//")[0] for line in cuda.cuda_source(file).splitlines())
    begin = text.index(f" {name}(\n") + len(name) + 2
    return len(text[begin:text.index(") {", begin)].split(","))


def test_a_kernel_that_the_source_does_not_have_is_named():
    assert cuda.parameter_count("__global__ void f(int a, /* b, c */ int d) {} __global__ void g( ) {}", "f") == 2
    assert cuda.parameter_count("__global__ void f(int a) {} __global__ void g( ) {}", "g") == 0
    with pytest.raises(ValueError, match="expected a kernel h, got none"):
        cuda.parameter_count("__global__ void f(int h) {}", "h")
