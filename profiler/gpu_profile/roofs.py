"""The roofs of a GPU that is not here: from its datasheet, or from a measured profile."""

from __future__ import annotations

from pathlib import Path

from profiler.counting.floor import RoofSet
from profiler.data.datasheets import PEAK_DTYPES, Datasheet, gpu_called
from profiler.gpu_profile.profile import read_profile


def roofs_called(name: str) -> RoofSet:
    """Return the roofs of a GPU by its datasheet's name, or of a profile by its path.

    Raises RequestError for an unknown name.
    """
    if name.endswith(".json"):
        profile = read_profile(Path(name))
        return RoofSet.measured(profile.name, profile.ceilings, profile.room_bytes)
    return datasheet_roofs(gpu_called(name))


def datasheet_roofs(sheet: Datasheet, gpus: int = 1) -> RoofSet:
    """Return the dense peaks and the bandwidth of a datasheet; of several GPUs, those of all of them together."""
    peaks = {dtype: gpus * peak for dtype in PEAK_DTYPES if (peak := sheet.peak_flops_per_s(dtype))}
    return RoofSet(
        f"{sheet.gpu if gpus == 1 else f'{gpus} x {sheet.gpu}'}, datasheet",
        gpus * sheet.bandwidth_bytes_per_s,
        peaks,
        gpus * sheet.room_bytes,
        sheet.fuses_grouped_heads,
        {sheet.sustained_dtype: gpus * held} if (held := sheet.sustained_flops_per_s) else {},
    )
