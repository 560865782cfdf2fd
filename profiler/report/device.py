"""Tables of devices: datasheets, measured roofs, health of several GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from profiler.data.datasheets import Datasheet
from profiler.facts.roofs import REFERENCE_HOST, Ceilings, HostPace, Roof
from profiler.judge.device_health import DeviceHealth
from profiler.report.blocks import TextTable, text_table
from profiler.units import duration, percent, scaled, significant

_SHOWN = frozenset(
    {
        "memory_bytes",
        "bandwidth_bytes_per_s",
        "tdp_w",
        "peak_fp32_flops_per_s",
        "peak_fp16_flops_per_s",
        "peak_bf16_flops_per_s",
        "peak_fp8_flops_per_s",
        "peak_int8_ops_per_s",
        "source",
    }
)
"""Columns of a datasheet that `gpus_table` shows, and their source."""


def gpus_table(gpus: Sequence[Datasheet]) -> TextTable:
    """Return a row per datasheet: memory, bandwidth, dense peaks, and the ridge point of 16-bit matmuls."""
    headings = ("GPU", "year", "memory", "bandwidth", "fp32", "16 bit", "fp8", "int8", "ridge", "TDP")
    caption = "dense peaks in TFLOP/s (int8: TOP/s); ridge in FLOP/byte; ?: sources differ on a figure shown here"
    return text_table(headings, [_gpu(gpu) for gpu in gpus], caption=caption)


def _gpu(gpu: Datasheet) -> list[str]:
    best16 = gpu.peak_bf16_flops_per_s or gpu.peak_fp16_flops_per_s
    peaks = (gpu.peak_fp32_flops_per_s, best16, gpu.peak_fp8_flops_per_s, gpu.peak_int8_ops_per_s)
    return [
        gpu.gpu + (" ?" if _SHOWN.intersection(gpu.uncertain) else ""),
        str(gpu.year),
        f"{gpu.memory_bytes / 2**30:.0f} GiB",
        scaled(gpu.bandwidth_bytes_per_s, "B/s"),
        *map(_tera, peaks),
        significant(best16 / gpu.bandwidth_bytes_per_s) if best16 else "-",
        f"{gpu.tdp_w:.0f} W",
    ]


def ceilings_table(ceilings: Ceilings, datasheet_per_s: Mapping[str, float | None]) -> TextTable:
    """Return the measured roofs of one device, with quartiles and the datasheet's values.

    `datasheet_per_s` has FLOP/s by dtype and bytes/s as `bandwidth`; it is empty where there is no datasheet.
    """
    rows = [_roof(name, "FLOP/s", roof, datasheet_per_s.get(name)) for name, roof in ceilings.compute.items()]
    rows += [_roof(name, "B/s", roof, datasheet_per_s.get("bandwidth")) for name, roof in ceilings.memory.items()]
    rows += [
        [f"launch, {name.removesuffix('_s')}", duration(seconds), "", "-", "", "", "one tiny kernel"]
        for name, seconds in ceilings.launch.items()
    ]
    headings = ("roof", "measured", "quartiles", "of datasheet", "clock", "samples", "how")
    return text_table(headings, rows, wrapped=("how",))


def host_words(host: HostPace) -> str:
    """`this host dispatches 1.9x slower than the reference, an AMD EPYC (Zen 4, 2.6 GHz)`."""
    index = host.index
    pace = (
        f"{index:.1f}x slower than"
        if index >= 1.05
        else f"{1 / index:.1f}x faster than"
        if index <= 0.95
        else "as fast as"
    )
    return f"this host dispatches {pace} the reference, an {REFERENCE_HOST}"


def _roof(name: str, unit: str, roof: Roof, sheet: float | None) -> list[str]:
    return [
        name,
        scaled(roof.per_s, unit),
        f"{scaled(roof.low_per_s, '')}- {scaled(roof.high_per_s, '')}",
        percent(roof.per_s / sheet) if sheet else "-",
        scaled(roof.clock_hz, "Hz") if roof.clock_hz else "-",
        str(roof.samples),
        roof.method,
    ]


def _tera(value: float | None) -> str:
    return significant(value / 1e12) if value else "-"


def health_lines(found: Sequence[DeviceHealth]) -> list[str]:
    """Which card is ill; or that none is."""
    ill = [item.words for item in found if item.ill]
    if ill:
        return ill
    furthest = max(found, key=lambda item: item.behind)
    return [
        f"No card is ill: {' and '.join(item.device for item in found)} agree ({furthest.device} is"
        f" {percent(furthest.behind)} behind at most, of which more than noise in {percent(furthest.surely)} of the"
        " cells)."
    ]
