"""The C++ part of the simulation: compiled once, then cached."""

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

_SOURCES = sorted((Path(__file__).parent / "cpp").iterdir())


def why_not() -> str | None:
    """Return why no card can be simulated here; None if one can."""
    if torch.version.cuda is not None and torch.cuda.is_available():
        return "this torch drives a real card; cards are simulated where none answers"
    if shutil.which("g++") is None:
        return "g++ is missing, which compiles the cards"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers are missing, which the cards are compiled with"
    return None


@functools.cache
def native() -> Any:
    """Return the module. Raises CalledProcessError if it does not compile."""
    found = importlib.util.spec_from_file_location("native", _compiled())
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _compiled() -> Path:
    from torch.utils.cpp_extension import include_paths

    sources = b"".join(source.read_bytes() for source in _SOURCES)
    versions = f"{torch.__version__} {sysconfig.get_config_var('EXT_SUFFIX')}"
    key = hashlib.sha256(sources + versions.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"roofscope-cards-{os.getuid()}-{key}.so"
    if library.exists():
        return library
    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    links = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    command = ["g++", "-shared", "-fPIC", "-O2", "-std=c++20", "-fvisibility=hidden"]
    command += [str(source) for source in _SOURCES if source.suffix == ".cpp"]
    own = library.with_suffix(f".{os.getpid()}")
    subprocess.run([*command, *includes, *links, "-o", str(own)], check=True, capture_output=True)
    return own.replace(library)  # several test workers may build it at once
