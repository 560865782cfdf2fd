"""Import bitsandbytes without its network fetch; query CPU support without importing it."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from typing import Any

from profiler.device.device import resolve_device

_KERNELS = "kernels"


def import_bitsandbytes() -> Any:
    """`bitsandbytes.functional`, imported while the package `kernels` is out of its sight.

    On CPUs with AVX512-BF16 bitsandbytes (0.50: backends/cpu/ops.py) has that package fetch a compiled kernel from the
    hub as it is imported, and does without where it is missing. Raises whatever a broken installation raises.
    """
    absent = _KERNELS not in sys.modules
    kernels = sys.modules.get(_KERNELS)
    sys.modules[_KERNELS] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("bitsandbytes.functional")
    finally:
        if absent:
            del sys.modules[_KERNELS]
        else:
            sys.modules[_KERNELS] = kernels  # type: ignore[assignment]


def four_bit_fuses_on_cpu() -> bool:
    """Whether bitsandbytes' 4-bit kernel on this machine's CPU unpacks inside the product, for any number of rows.

    Its CPU library is asked itself: importing the package takes half a second and 40 MB, which a run in any other
    format has no use for. Beside a card it loads another library, without that kernel (0.50: cextension.py).
    """
    package = importlib.util.find_spec("bitsandbytes")
    if package is None or package.origin is None or resolve_device("auto").type == "cuda":
        return False
    try:
        return bool(ctypes.CDLL(str(Path(package.origin).with_name("libbitsandbytes_cpu.so"))).has_avx512bf16_cpu())
    except (OSError, AttributeError):  # an older one, or one for another processor
        return False
