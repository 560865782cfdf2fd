"""Tables of devices: measured roofs, datasheets, and the self-test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rich import box
from rich.table import Table

from profiler.diagnosis.regimes import Verdict
from profiler.machine.datasheet import Datasheet
from profiler.roofs.values import Ceilings, Roof
from profiler.units import duration, percent, scaled, significant


def gpus_table(gpus: Sequence[Datasheet]) -> Table:
    """Every datasheet: memory, bandwidth, dense peaks, and the ridge of 16-bit products."""
    table = _table("GPU", "year")
    for name in ("memory", "bandwidth", "fp32", "16 bit", "fp8", "int8", "ridge", "TDP"):
        table.add_column(name, justify="right")
    for gpu in gpus:
        best16 = gpu.peak_bf16_flops_per_s or gpu.peak_fp16_flops_per_s
        mark = " ?" if gpu.uncertain else ""
        table.add_row(
            gpu.gpu + mark,
            str(gpu.year),
            f"{gpu.memory_bytes / 2**30:.0f} GiB",
            f"{significant(gpu.bandwidth_bytes_per_s / 1e12)} TB/s",
            *(_tera(value) for value in (gpu.peak_fp32_flops_per_s, best16, gpu.peak_fp8_flops_per_s)),
            _tera(gpu.peak_int8_ops_per_s),
            significant(best16 / gpu.bandwidth_bytes_per_s) if best16 else "-",
            f"{gpu.tdp_w:.0f} W",
        )
    table.caption = "dense peaks in TFLOP/s (int8: TOP/s); ridge in FLOP/byte; ?: some cell differs between sources"
    return table


def ceilings_table(ceilings: Ceilings, datasheet_per_s: Mapping[str, float | None]) -> Table:
    """The measured roofs of one device, with quartiles and the datasheet beside them.

    `datasheet_per_s` has FLOP/s by dtype and bytes/s as `bandwidth`; it is empty where there is no datasheet.
    """
    table = _table("roof")
    for name in ("measured", "quartiles", "of datasheet", "clock", "samples"):
        table.add_column(name, justify="right")
    table.add_column("how")
    for name, roof in ceilings.compute.items():
        table.add_row(*_roof(name, "FLOP/s", roof, datasheet_per_s.get(name)))
    for name, roof in ceilings.memory.items():
        table.add_row(*_roof(name, "B/s", roof, datasheet_per_s.get("bandwidth")))
    for name, seconds in ceilings.launch.items():
        table.add_row(f"launch, {name.removesuffix('_s')}", duration(seconds), "", "-", "", "", "one tiny kernel")
    return table


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


class CheckedKernel(Protocol):
    """A known kernel and what it was called."""

    @property
    def name(self) -> str: ...

    @property
    def expected(self) -> str:
        """The label that it must have."""

    @property
    def latency_s(self) -> float: ...

    @property
    def verdict(self) -> Verdict: ...

    @property
    def right(self) -> bool:
        """Whether it has that label."""


def selftest_table(results: Sequence[CheckedKernel]) -> Table:
    """Each known kernel with its label and its evidence."""
    table = _table("known kernel", "must be", "is", "sure")
    table.add_column("time", justify="right")
    table.add_column("evidence")
    for item in results:
        verdict = item.verdict
        table.add_row(
            item.name,
            item.expected,
            verdict.regime + ("" if item.right else "  WRONG"),
            verdict.confidence,
            duration(item.latency_s),
            ", ".join(f"{signal.value:.2f}" for signal in verdict.evidence),
        )
    table.caption = "evidence: intensity over ridge, then the shares of time that bytes, FLOPs and dispatch explain"
    return table


def _table(*columns: str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")


def _tera(value: float | None) -> str:
    return significant(value / 1e12) if value else "-"
