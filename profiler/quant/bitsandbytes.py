"""Import bitsandbytes without its download; query its CPU support without an import."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from typing import Any

from profiler.device.device import resolve_device

_KERNELS = "kernels"


def import_bitsandbytes() -> Any:
    """`bitsandbytes.functional`, imported while the package `kernels` is hidden.

    At import on a CPU with AVX512-BF16, bitsandbytes downloads a compiled kernel from the hub with that package (0.50:
    backends/cpu/ops.py). It works without the package. Raises whatever a broken installation raises.
    """
    is_absent = _KERNELS not in sys.modules
    kernels = sys.modules.get(_KERNELS)
    sys.modules[_KERNELS] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("bitsandbytes.functional")
    finally:
        if is_absent:
            del sys.modules[_KERNELS]
        else:
            sys.modules[_KERNELS] = kernels  # type: ignore[assignment]


def four_bit_fuses_on_cpu() -> bool:
    """Whether bitsandbytes' 4-bit kernel on this CPU unpacks inside the product, for any number of rows.

    Loads only its CPU library, since importing the package takes half a second and 40 MB. On a machine with a GPU the
    package loads another library, without that kernel (0.50: cextension.py).
    """
    package = importlib.util.find_spec("bitsandbytes")
    if package is None or package.origin is None or resolve_device("auto").type == "cuda":
        return False
    try:
        return bool(ctypes.CDLL(str(Path(package.origin).with_name("libbitsandbytes_cpu.so"))).has_avx512bf16_cpu())
    except (OSError, AttributeError):  # an older library, or one for another processor
        return False
