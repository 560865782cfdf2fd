"""Where a cell stands on the roofline: rates, and shares of datasheet peaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """One cell against the roofs. Rates are model work over time, so that a wasteful path cannot inflate them."""

    intensity: float
    """Model FLOPs per model byte."""
    flops_per_s: float
    bytes_per_s: float
    mfu: float | None
    """Model FLOP/s over the datasheet's dense peak (PaLM, arXiv:2204.02311); None without a datasheet."""
    mbu: float | None
    """Model bytes/s over the datasheet's bandwidth; None without a datasheet."""


def place(
    latency_s: float,
    model_flops: float,
    model_bytes: float,
    peak_flops_per_s: float | None = None,
    peak_bytes_per_s: float | None = None,
) -> Placement:
    """Place a measured cell on the roofline."""
    flops_per_s = model_flops / latency_s
    bytes_per_s = model_bytes / latency_s
    return Placement(
        intensity=model_flops / model_bytes,
        flops_per_s=flops_per_s,
        bytes_per_s=bytes_per_s,
        mfu=flops_per_s / peak_flops_per_s if peak_flops_per_s else None,
        mbu=bytes_per_s / peak_bytes_per_s if peak_bytes_per_s else None,
    )


def ridge_flops_per_byte(compute_flops_per_s: float, memory_bytes_per_s: float) -> float:
    """The intensity at which the compute roof and the memory roof meet."""
    return compute_flops_per_s / memory_bytes_per_s
