"""Importing bitsandbytes without letting it fetch code."""

from __future__ import annotations

import importlib
import sys
from typing import Any

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
