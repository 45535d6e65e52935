"""`python -m fusedloss doctor`: what this machine has, what the library takes of it, and what does not work, in lines for a report."""

__all__ = ["Finding", "implementations", "findings", "report"]


import ctypes
import os
import platform
import re
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from fusedloss.core import store
from fusedloss.core.devices import CPU, Device, Implementation, device_of, lacks

# Whatever imports Triton or CuPy, each of which may raise anything, is imported by the check that needs it.


class Finding(NamedTuple):
    "A line of the report."

    what: str
    text: str
    fault: str = ""  # what is broken

    def line(self) -> str:
        "The line, in ASCII, without the home directory's path."
        text = f"FAULT: {self.fault}; {self.text}" if self.fault else self.text
        return without_home(f"{self.what:<12} {text}").encode("ascii", "backslashreplace").decode()


HOMES = re.compile(r"(?<![\w.-])(?:/home/|/Users/|[A-Za-z]:\\+Users\\+)[^/\\\s'\",;:)]+")


def without_home(text: str) -> str:
    "`~` in place of a home directory, also of another user's, such as that of whoever called sudo."
    home = os.path.expanduser("~")
    for path in {home, os.path.realpath(home)}:
        if len(Path(path).parts) > 1:
            text = re.sub(rf"(?<![\w.-]){re.escape(path)}(?![\w.-])", "~", text)
    return HOMES.sub("~", text)


def brief(reason: str | BaseException) -> str:
    "An error in one line that is not long."
    text = reason if isinstance(reason, str) else repr(reason)
    return textwrap.shorten(text.replace("\\n", " "), 300, placeholder=" ...")


def sentence(parts: list[str], between: str = "; ") -> str:
    "Those parts that say something, one after the other."
    return between.join(filter(None, parts))


# ---- versions


@cache
def requirements(
    package: str = "fusedloss",
) -> tuple[str, ...]:
    "What a package's metadata require; nothing where it is not installed."
    try:
        return tuple(metadata.requires(package) or ())
    except metadata.PackageNotFoundError:
        return ()


def bounds(name: str, required: tuple[str, ...]) -> list[str]:
    "What requirements demand of a package: `>=` or `==` and a version."
    lines = [line for line in required if re.match(rf"{name}\b(?!-)", line)]
    return [bound for line in lines for bound in re.findall(r"(?:>=|==)[\d.]+\d", line.partition(";")[0])]


def numbers(version: str) -> tuple[int, ...]:
    "The numbers with which a version begins."
    return tuple(map(int, re.findall(r"\d+", re.match(r"[\d.]*", version)[0])))


def misfit(version: str, required: list[str]) -> str:
    "What a version lacks; empty if it fits, or says no numbers."
    here = numbers(version)
    for bound in required if here else ():
        wanted = numbers(bound[2:])
        if here < wanted if bound.startswith(">=") else here[: len(wanted)] != wanted:
            return f"expected {bound}, got {version}"
    return ""


def distributions(module: str) -> list[str]:
    "The packages that are installed and bring a module, with their versions."
    names = sorted({name for name in metadata.packages_distributions().get(module, ()) if name})
    return [f"{name} {metadata.version(name)}" for name in names]


def check_python() -> Finding:
    "Python, of the versions that the package's metadata list."
    here = "{}.{}".format(*sys.version_info)
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    try:
        classifiers = metadata.metadata("fusedloss").get_all("Classifier") or []
    except metadata.PackageNotFoundError:
        return Finding("Python", f"{text}; fusedloss is not installed, and does not say which versions it supports")
    known = [c.rpartition(" ")[2] for c in classifiers if c.startswith("Programming Language :: Python :: 3.")]
    supported = f"supported: {known[0]} to {known[-1]}" if known else ""
    fault = f"expected Python {known[0]} to {known[-1]}, got {here}" if known and here not in known else ""
    return Finding("Python", sentence([text, supported], ", "), fault)


def check_torch() -> Finding:
    "PyTorch, and the CUDA that it is built for."
    required, cuda = bounds("torch", requirements()), torch.version.cuda
    known = re.findall(r'extra == "cuda(\d+)"', " ".join(requirements()))
    about = [torch.__version__, supported(required)]
    if cuda is None:
        about.append(f"built for {'HIP ' + torch.version.hip if torch.version.hip else 'CPUs alone'}")
    else:
        about += [f"built for CUDA {cuda}", f"supported: {' '.join(known)}" if known else ""]
    unknown = bool(cuda and known) and cuda.partition(".")[0] not in known
    faults = [misfit(torch.__version__, required), f"expected CUDA {' or '.join(known)}, got {cuda}" if unknown else ""]
    return Finding("PyTorch", sentence(about, ", "), sentence(faults))


def supported(required: list[str]) -> str:
    "The bounds, in words."
    return f"supported: {' '.join(required)}" if required else ""


# ---- the GPU


def gpu() -> Device:
    "The current one, as PyTorch reaches it; `CPU` if there is none."
    return device_of("cuda") if torch.cuda.is_available() else CPU


def driver_numbers() -> tuple[int, int]:
    "How many GPUs NVIDIA's driver has for this process, and the CUDA it serves, 13000 for 13.0; zeros if there is no driver."
    from fusedloss.core.cuda import ask_driver

    count, version = ctypes.c_int(), ctypes.c_int()
    try:
        ask_driver("cuDriverGetVersion", ctypes.byref(version))
        ask_driver("cuInit", 0)
        ask_driver("cuDeviceGetCount", ctypes.byref(count))
    except (OSError, RuntimeError, AttributeError):
        pass  # what it did not answer stays 0
    return count.value, version.value


def driver_text() -> str:
    "The driver's release, and the CUDA it serves."
    _, version = driver_numbers()
    about = Path("/proc/driver/nvidia/version")
    release = re.search(r"Kernel Module\D*([\d.]+)", about.read_text()) if os.access(about, os.R_OK) else None
    serves = f"for CUDA {version // 1000}.{version % 1000 // 10}" if version else ""
    return sentence([f"driver {release[1]}" if release else "driver" if version else "", serves], " ")


def compute_failure() -> str:
    "What hinders PyTorch from adding two numbers on the current GPU; empty if nothing does."
    try:
        torch.ones(2, device="cuda").sum().item()
    except Exception as reason:
        return f"PyTorch does not compute on it: {brief(reason)}"
    return ""


def check_gpu() -> Finding:
    "The GPUs that PyTorch reaches, and the current one; a fault if the driver has some and PyTorch none."
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
    if not there:
        count, _ = driver_numbers()
        why = brief(str(heard[0].message)) if heard else f"PyTorch is {check_torch().text}"
        fault = f"PyTorch reaches none, and the driver has {count}: {why}" if count else ""
        return Finding(
            "GPU", driver_text() if count else "none of NVIDIA or AMD; PyTorch takes the place of all kernels", fault
        )
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    names = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    d = gpu()
    about = [
        ", ".join(name if count == 1 else f"{count} x {name}" for name, count in names.items()),
        "compute capability {}.{}".format(*d.capability) if d.vendor == "nvidia" else getattr(found, "gcnArchName", ""),
        f"{found.total_memory / 2**30:.1f} GiB, {d.multiprocessors} multiprocessors",
        driver_text(),
    ]
    return Finding("GPU", sentence(about, ", "), compute_failure())


# ---- compilers


def import_failure(module: str) -> str:
    "What a module raises as it is imported; empty if nothing."
    try:
        import_module(module)
    except (Exception, SystemExit) as reason:
        return brief(reason)
    return ""


def check_triton() -> Finding:
    "Triton, of a version that fits us and PyTorch."
    from fusedloss.core.triton import triton, triton_failure

    found = distributions("triton")
    if triton is None and not triton_failure():
        return Finding("Triton", "not installed; PyTorch takes the place of its kernels")
    ours, torchs = bounds("triton", requirements()), bounds("triton", requirements("torch"))
    version = found[0].partition(" ")[2] if found else str(getattr(triton, "__version__", "of no known version"))
    about = [version, supported(sorted({*ours, *torchs}, reverse=True))]
    if gpu() is CPU:
        said = f"is not imported, {brief(import_failure('triton'))}, and " if triton is None else ""
        return Finding(
            "Triton", sentence([*about, f"{said}not needed without a GPU"], ", "), misfit(version, ours + torchs)
        )
    failure = triton_failure()
    fault = sentence([misfit(version, ours + torchs), failure and f"it does not work: {brief(failure)}"])
    return Finding("Triton", sentence([*about, "PyTorch takes its place" if failure else "works"], ", "), fault)


def cupy_for(cuda: str) -> str:
    "The CuPy that belongs to a CUDA, by the package's metadata; empty if they say none."
    extra = f"cuda{cuda.partition('.')[0]}"
    return next((line.partition(";")[0].strip() for line in requirements() if f'extra == "{extra}"' in line), "")


def unfit_cupy(found: list[str]) -> str:
    "Why what is installed of CuPy is not what should be; empty if it is."
    names = [package.partition(" ")[0] for package in found]
    if len(names) > 1:
        return f"expected one CuPy, got {', '.join(names)}, which overwrite each other"
    wanted = cupy_for(torch.version.cuda or "")
    if names and wanted and names[0].startswith("cupy-cuda") and names[0] != wanted:
        return f"expected {wanted} beside a PyTorch of CUDA {torch.version.cuda}, got {names[0]}"
    return ""


def check_cupy() -> Finding:
    "CuPy, the first choice of compilers for `cuda/`."
    from fusedloss.core.cuda import compiler_failure

    found = distributions("cupy")
    if not found and find_spec("cupy") is None:
        return Finding("CuPy", "not installed; it is optional")
    text = ", ".join(found) or "of no known version"
    if gpu().vendor != "nvidia":
        failure = import_failure("cupy")
        said = f"is not imported, {failure}, and " if failure else ""
        return Finding("CuPy", f"{text}, {said}not needed without a GPU of NVIDIA")
    failure = compiler_failure("CuPy", torch.cuda.current_device())
    fault = sentence([unfit_cupy(found), failure and f"it does not compile: {brief(failure)}"])
    return Finding("CuPy", f"{text}, {'passed over' if failure else 'compiles'}", fault)


def check_nvrtc() -> Finding:
    "PyTorch's NVRTC, the second."
    from fusedloss.core.cuda import compiler_failure

    if gpu().vendor != "nvidia":
        return Finding("NVRTC", "not needed without a GPU of NVIDIA")
    failure = compiler_failure("PyTorch", torch.cuda.current_device())
    text = "PyTorch's is passed over" if failure else "PyTorch's compiles"
    return Finding("NVRTC", text, failure and f"it does not compile: {brief(failure)}")


# ---- kernels


KERNELS = (
    "kernels",
    "clusters",
    "core.ignored",
    "core.hopper",
    "fp8",
    "core.tiling",
    "scans",
    "ctc",
    "segments",
    "lattices",
)  # modules with kernels that not every GPU takes


def implementations() -> list[Implementation]:
    "Every way to compute something that needs something of a GPU."
    modules = [import_module(f"fusedloss.{name}") for name in KERNELS]
    found = [v for m in modules for v in vars(m).values() if isinstance(v, Implementation)]
    return list(dict.fromkeys(found))


def passed_over(i: Implementation, d: Device) -> str:
    "Why an implementation is not taken here; empty if it is."
    from fusedloss.core.cuda import COMPILERS, compiler_failure
    from fusedloss.core.triton import triton_works

    if lacks(d, "gpu") or i.lacks(d):
        return lacks(d, "gpu") or i.lacks(d)
    if "cuda/" not in i.source:
        return "" if triton_works() else "no Triton that works"
    index = torch.cuda.current_device()
    works = any(not compiler_failure(compiler, index) for compiler in COMPILERS)
    return "" if works else "neither CuPy nor NVRTC compiles"


def reasons() -> dict[str, list[Implementation]]:
    "By why they are passed over: implementations; those that are taken come under an empty reason."
    d, found = gpu(), {"": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton's line says it
        for i in implementations():
            found.setdefault(passed_over(i, d), []).append(i)
    return found


def check_taken() -> Finding:
    "Implementations that calls on the current GPU take."
    taken = reasons()[""]
    return Finding("taken", "; ".join(i.what for i in taken) or "no kernel")


def check_passed_over() -> Finding:
    "The others, by the reason, and what takes their place."
    found = {why: rows for why, rows in reasons().items() if why}
    every = len(found) == 1 and not reasons()[""]
    texts = [
        f"{why}: {'all' if every else ' / '.join(f'{i.what} (otherwise {i.otherwise})' for i in rows)}"
        for why, rows in found.items()
    ]
    return Finding("passed over", "; ".join(texts) or "no kernel")


# ---- what is kept on disk


def cache_folders() -> list[Path]:
    "Where compiled kernels and tuning are kept: ours, Triton's and CuPy's."
    home = os.path.expanduser("~")
    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.join(
        os.environ.get("TRITON_HOME") or home, ".triton", "cache"
    )
    cupy = os.environ.get("CUPY_CACHE_DIR") or os.path.join(home, ".cupy", "kernel_cache")
    others = [Path(path) for module, path in (("triton", triton), ("cupy", cupy)) if find_spec(module)]
    return [store.folder(), *others]


def folder_finding(folder: Path) -> tuple[str, str]:
    "What is said of a folder, and why nothing is kept there: empty if it is, or will be once the folder is made."
    place = next((p for p in (folder, *folder.parents) if os.path.exists(p)), folder)
    made, owner, user = place == folder, None, None
    if made and hasattr(os, "getuid"):
        owner, user = os.stat(folder).st_uid, os.getuid()
    text = f"{folder} {'not made yet' if not made else 'there' if owner is None else f'of user {owner}'}"
    if owner != user:
        return text, f"{folder}: expected a folder of user {user}, got one of user {owner}"
    if not os.path.isdir(place):
        return text, f"{place}: expected a folder, got a file"
    return text, "" if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written"


def check_caches() -> Finding:
    "The folders of caches, and who owns them."
    found = [folder_finding(folder) for folder in cache_folders()]
    return Finding("caches", "; ".join(text for text, _ in found), sentence([fault for _, fault in found]))


def check_tuning() -> Finding:
    "What was tuned for this machine before, and a file of choices if the environment names one."
    from fusedloss.core.rates import STORE
    from fusedloss.core.tuning import read_choices

    fault, choices = "", os.environ.get("FUSEDLOSS_CHOICES")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        counts = [f"{name}.json {len(store.read(name))} entries" for name in ("tuning", STORE)]
    try:
        counts += [f"FUSEDLOSS_CHOICES {len(read_choices(choices)['variants'])} variants"] if choices else []
    except ValueError as reason:
        fault = brief(str(reason))
    return Finding("tuning", ", ".join(counts), sentence([brief(str(w.message)) for w in heard] + [fault]))


CHECKS: dict[str, Callable[[], Finding]] = {
    "Python": check_python,
    "PyTorch": check_torch,
    "GPU": check_gpu,
    "Triton": check_triton,
    "CuPy": check_cupy,
    "NVRTC": check_nvrtc,
    "taken": check_taken,
    "passed over": check_passed_over,
    "caches": check_caches,
    "tuning": check_tuning,
}  # by what their lines begin with


def findings() -> Iterator[Finding]:
    "One check after the other; one that fails is a finding."
    for what, check in CHECKS.items():
        try:
            yield check()
        except (Exception, SystemExit) as reason:
            yield Finding(what, "the check itself failed", brief(reason))


def report() -> int:
    "Print a line as soon as it is found, and the verdict; 1 if something is broken, else 0."
    import fusedloss

    print(Finding("fusedloss", fusedloss.__version__).line(), flush=True)
    broken = []
    for found in findings():
        print(found.line(), flush=True)
        broken += [found.what] if found.fault else []
    verdict = f"broken: {', '.join(broken)}" if broken else "everything that this machine could use works"
    print(Finding("verdict", verdict).line(), flush=True)
    return int(bool(broken))
