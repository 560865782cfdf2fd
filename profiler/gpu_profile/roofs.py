"""The roofs of a GPU that is not here: from its datasheet, or from a measured profile."""

from __future__ import annotations

from pathlib import Path

from profiler.counting.floor import RoofSet
from profiler.data.datasheets import Datasheet, gpu_called
from profiler.gpu_profile.profile import read_profile

_DTYPES = ("float32", "tfloat32", "float16", "bfloat16", "float8_e4m3fn", "int8")


def roofs_called(name: str) -> RoofSet:
    """Return the roofs of a GPU by its datasheet's name, or of a profile by its path.

    Raises RequestError for an unknown name.
    """
    if name.endswith(".json"):
        profile = read_profile(Path(name))
        peaks = {dtype: roof.per_s for dtype, roof in profile.ceilings.compute.items()}
        return RoofSet(f"{profile.name}, measured", profile.ceilings.memory_bytes_per_s, peaks, profile.room_bytes)
    return datasheet_roofs(gpu_called(name))


def datasheet_roofs(sheet: Datasheet) -> RoofSet:
    """Return the dense peaks and the bandwidth of a datasheet."""
    peaks = {dtype: peak for dtype in _DTYPES if (peak := sheet.peak_flops_per_s(dtype))}
    return RoofSet(
        f"{sheet.gpu}, datasheet", sheet.bandwidth_bytes_per_s, peaks, sheet.room_bytes, sheet.fuses_grouped_heads
    )
