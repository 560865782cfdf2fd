"""The ceilings of a device, and those of any GPU by its datasheet."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from profiler.data.datasheets import PEAK_DTYPES, Datasheet, gpu_called
from profiler.units import percent, scaled


@dataclass(frozen=True)
class CeilingSet:
    """The ceilings of one device."""

    name: str
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """By dtype."""
    room_bytes: float = math.inf
    """Bytes that a model may take of the device's memory (`data.free_memory`); infinite if unknown."""
    fuses_grouped_heads: bool = True
    """Whether it has a fused attention kernel for grouped heads in 16 bits."""
    sustained: Mapping[str, float] = field(default_factory=dict)
    """FLOP/s by dtype that a healthy one holds at its power limit, where that is known and below `flops_per_s`."""
    sustained_bytes_per_s: float | None = None
    """What copies of a healthy one attain of `bytes_per_s`, as others measured it; None where that is not known."""

    @property
    def device(self) -> str:
        """The name of the GPU or machine."""
        return self.name.rpartition(", ")[0]

    def peak(self, dtype: str, own: str) -> float:
        """Return the FLOP/s of a dtype; without a rate, that of the model's dtype `own`, or of float32.

        A GPU without bfloat16 units runs such a model in float16, which has as many bytes.
        """
        names = (dtype, own, "float16" if own == "bfloat16" else own, "float32")
        rates = filter(None, map(self.flops_per_s.get, names))
        return next(rates, max(self.flops_per_s.values()))


def ceilings_called(name: str) -> CeilingSet:
    """Return the ceilings of a GPU by its datasheet's name. Raises RequestError for an unknown name."""
    return datasheet_ceilings(gpu_called(name))


def datasheet_ceilings(sheet: Datasheet, gpus: int = 1) -> CeilingSet:
    """Return the dense peaks and the bandwidth of a datasheet; of several GPUs, those of all of them together."""
    peaks = {dtype: gpus * peak for dtype in PEAK_DTYPES if (peak := sheet.peak_flops_per_s(dtype))}
    return CeilingSet(
        f"{sheet.gpu if gpus == 1 else f'{gpus} x {sheet.gpu}'}, datasheet",
        gpus * sheet.bandwidth_bytes_per_s,
        peaks,
        gpus * sheet.room_bytes,
        sheet.fuses_grouped_heads,
        {sheet.sustained_dtype: gpus * held} if (held := sheet.sustained_flops_per_s) else {},
        gpus * copied if (copied := sheet.sustained_copy_bytes_per_s) else None,
    )


def sustained_words(name: str, bytes_per_s: float, sustained_bytes_per_s: float | None) -> list[str]:
    """A sentence on how near to a datasheet's bandwidth others came on that GPU; empty if that is not known."""
    if not sustained_bytes_per_s:
        return []
    share, gpu = percent(sustained_bytes_per_s / bytes_per_s), name.removesuffix(", datasheet")
    others = f"{gpu}: others attain {scaled(sustained_bytes_per_s, 'B/s')}, {share} of the datasheet's bandwidth"
    return [f"{others}; a step at {share} can hardly become faster."]
