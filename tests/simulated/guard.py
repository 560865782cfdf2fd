"""The device guard that torch asks for before it touches a tensor on `cuda`, for a torch built without CUDA."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static const bool answered = [] {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
  return true;
}();
"""


def why_not() -> str | None:
    """Why no card can be simulated here; None where one can."""
    if torch.version.cuda is not None:
        return "this torch drives real cards; a CPU build is simulated on"
    if shutil.which("g++") is None:
        return "g++ is missing, which compiles the device guard"
    return None


@functools.cache
def answer_guard() -> None:
    """Compile the guard, once for each torch, and load it. Raises CalledProcessError where it does not compile."""
    torch.ops.load_library(str(_compiled()))


def _compiled() -> Path:
    from torch.utils.cpp_extension import include_paths

    key = hashlib.sha256((_SOURCE + torch.__version__).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"roofscope-guard-{os.getuid()}-{key}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(_SOURCE)
        includes = [f"-I{path}" for path in include_paths()]
        links = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10"]
        command = ["g++", "-shared", "-fPIC", "-std=c++20", str(source), *includes, *links, "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True)
        own = library.with_suffix(f".{os.getpid()}")
        shutil.copyfile(built, own)
        own.replace(library)  # several workers may build it at once
    return library
