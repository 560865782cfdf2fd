"""Tables of devices: measured roofs, datasheets, and the self-test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rich import box
from rich.table import Table

from profiler.diagnosis.regimes import Verdict
from profiler.diagnosis.step_time import TERM_NAMES, Split
from profiler.machine.datasheet import Datasheet
from profiler.roofs.values import REFERENCE_HOST, Ceilings, HostPace, Roof
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
"""Columns of a datasheet that `gpus_table` shows, and where all of them come from."""


def gpus_table(gpus: Sequence[Datasheet]) -> Table:
    """Every datasheet: memory, bandwidth, dense peaks, and the ridge of 16-bit products."""
    table = _table("GPU", "year")
    for name in ("memory", "bandwidth", "fp32", "16 bit", "fp8", "int8", "ridge", "TDP"):
        table.add_column(name, justify="right")
    for gpu in gpus:
        best16 = gpu.peak_bf16_flops_per_s or gpu.peak_fp16_flops_per_s
        mark = " ?" if _SHOWN.intersection(gpu.uncertain) else ""
        table.add_row(
            gpu.gpu + mark,
            str(gpu.year),
            f"{gpu.memory_bytes / 2**30:.0f} GiB",
            scaled(gpu.bandwidth_bytes_per_s, "B/s"),
            *(_tera(value) for value in (gpu.peak_fp32_flops_per_s, best16, gpu.peak_fp8_flops_per_s)),
            _tera(gpu.peak_int8_ops_per_s),
            significant(best16 / gpu.bandwidth_bytes_per_s) if best16 else "-",
            f"{gpu.tdp_w:.0f} W",
        )
    table.caption = "dense peaks in TFLOP/s (int8: TOP/s); ridge in FLOP/byte; ?: sources differ on a figure shown here"
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


class Finding(Protocol):
    """One part of an installation: whether it works (None: not needed), whether it is slow, and the line about it."""

    @property
    def name(self) -> str: ...

    @property
    def works(self) -> bool | None: ...

    @property
    def says(self) -> str: ...

    @property
    def slow(self) -> bool: ...


_MARKS = {True: "ok", False: "NO", None: "-"}


def findings_table(findings: Sequence[Finding]) -> Table:
    """One line for each part of the installation, without a head."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for item in findings:
        table.add_row(item.name, "slow" if item.works and item.slow else _MARKS[item.works], item.says)
    return table


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


class CheckedKernel(Protocol):
    """A known kernel and what it was called."""

    @property
    def name(self) -> str: ...

    @property
    def expected(self) -> object:
        """The label that it must have."""

    @property
    def label(self) -> object:
        """The label that it was given."""

    @property
    def rounds(self) -> Mapping[str, int]:
        """How many rounds gave each label."""

    @property
    def split(self) -> Split: ...

    @property
    def verdict(self) -> Verdict: ...

    @property
    def memory_bytes_per_s(self) -> tuple[float, float]: ...

    @property
    def compute_flops_per_s(self) -> tuple[float, float]:
        """The lowest and the highest roof that were seen."""

    @property
    def right(self) -> bool: ...

    @property
    def wrong(self) -> bool:
        """Whether it was called what it is not; neither right nor wrong is inconclusive."""


def selftest_table(results: Sequence[CheckedKernel]) -> Table:
    """Each known kernel, what it was called, and where its time goes."""
    table = _table("known kernel", "must be", "is", "sure")
    for name in ("rounds", "time"):
        table.add_column(name, justify="right")
    table.add_column("where it goes")
    for item in results:
        called = "right" if item.right else f"{item.label}  WRONG" if item.wrong else "inconclusive"
        table.add_row(
            item.name,
            str(item.expected),
            called,
            item.verdict.confidence if item.right else "",
            f"{item.rounds.get(str(item.expected), 0)} of {sum(item.rounds.values())}",
            duration(item.split.latency_s),
            _largest_terms(item.split),
        )
    table.caption = "rounds: how many say so, each under the roofs of its own second"
    return table


def selftest_doubts(results: Sequence[CheckedKernel]) -> list[str]:
    """Why a kernel has no label, one line each."""
    return [
        f"inconclusive: {item.name}: {_rounds(item.rounds)}; memory gave {_range(item.memory_bytes_per_s, 'B/s')} and "
        f"products {_range(item.compute_flops_per_s, 'FLOP/s')} meanwhile"
        for item in results
        if not item.right and not item.wrong
    ]


_SHOWN_TERMS = 2
_SHOWN_SHARE = 0.05


def _largest_terms(parts: Split) -> str:
    shares = {name: getattr(parts, term) / parts.latency_s for term, name in TERM_NAMES.items()}
    largest = sorted(shares.items(), key=lambda item: -item[1])[:_SHOWN_TERMS]
    return ", ".join(f"{name} {percent(share)}" for name, share in largest if share >= _SHOWN_SHARE)


def _rounds(rounds: Mapping[str, int]) -> str:
    return "rounds say " + ", ".join(f"{label} ({count})" for label, count in rounds.items())


def _range(values: tuple[float, float], unit: str) -> str:
    return " to ".join(scaled(value, unit) for value in values)


def _table(*columns: str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")


def _tera(value: float | None) -> str:
    return significant(value / 1e12) if value else "-"
