"""Tables of devices: measured roofs, datasheets, and the self-test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from profiler.machine.datasheet import Datasheet
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


def ceilings_table(document: dict[str, Any]) -> Table:
    """The measured roofs of one device, with quartiles and the datasheet beside them."""
    table = _table("roof")
    for name in ("measured", "quartiles", "of datasheet", "clock", "samples"):
        table.add_column(name, justify="right")
    table.add_column("how")
    for kind, unit in (("compute", "FLOP/s"), ("memory", "B/s")):
        for name, roof in document[kind].items():
            sheet = document["datasheet_per_s"].get(name if kind == "compute" else "bandwidth")
            table.add_row(
                name,
                scaled(roof["per_s"], unit),
                f"{scaled(roof['low_per_s'], '')}- {scaled(roof['high_per_s'], '')}",
                percent(roof["per_s"] / sheet) if sheet else "-",
                scaled(roof["clock_hz"], "Hz") if roof["clock_hz"] else "-",
                str(roof["samples"]),
                roof["method"],
            )
    for name, seconds in document["launch"].items():
        table.add_row(f"launch, {name.removesuffix('_s')}", duration(seconds), "", "-", "", "", "one tiny kernel")
    return table


def selftest_table(results: Sequence[dict[str, Any]]) -> Table:
    """Each known kernel with its label and its evidence."""
    table = _table("known kernel", "must be", "is")
    table.add_column("time", justify="right")
    table.add_column("evidence")
    for item in results:
        evidence = ", ".join(f"{signal['value']:.2f}" for signal in item["signals"])
        mark = "" if item["right"] else "  WRONG"
        table.add_row(
            item["name"],
            item["expected"],
            item["regime"] + mark,
            item["confidence"],
            duration(item["latency_s"]),
            evidence,
        )
    table.caption = "evidence: intensity over ridge, then the shares of time that bytes, FLOPs and dispatch explain"
    return table


def _table(*columns: str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")


def _tera(value: float | None) -> str:
    return significant(value / 1e12) if value else "-"
