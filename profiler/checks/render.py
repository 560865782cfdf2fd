"""Tables of `doctor` and `selftest`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from profiler.judge.breakdown import TERM_NAMES, TimeBreakdown
from profiler.report.blocks import Lines, Section, TextColumn, TextTable, text_table
from profiler.units import duration, percent, scaled

if TYPE_CHECKING:
    from profiler.checks.doctor import Examination
    from profiler.checks.selftest import SelftestRow
    from profiler.facts.telemetry import Contention

_MARKS = {True: "ok", False: "NO", None: "-"}


def examination_section(examination: Examination) -> Section:
    """The command to run first, and a row for each part of the installation."""
    rows = [
        [item.name, "slow" if item.works and item.slow else _MARKS[item.works], item.says]
        for item in examination.findings
    ]
    columns = (TextColumn(""), TextColumn(""), TextColumn("", wrap=True))
    return Section("", [Lines([f"run first: {examination.first}"]), TextTable(columns, rows)])


def selftest_section(results: Sequence[SelftestRow]) -> Section:
    """A table of the known kernels, and the reason why each inconclusive one has no label."""
    reasons = [
        f"inconclusive: {item.name}: the rounds gave"
        f" {', '.join(f'{label} ({count})' for label, count in item.rounds.items())}; during them memory reached"
        f" {_range(item.memory_bytes_per_s, 'B/s')} and matmuls {_range(item.compute_flops_per_s, 'FLOP/s')}"
        for item in results
        if not item.right and not item.wrong
    ]
    return Section("", [_selftest_table(results), Lines(reasons)])


def _selftest_table(results: Sequence[SelftestRow]) -> TextTable:
    """A row per known kernel: expected label, result, and the largest parts of its time."""
    headings = ("known kernel", "expected", "result", "confidence", "rounds", "time", "where it goes")
    caption = "rounds: how many gave the expected label, each under the roofs that it measured"
    rows = [
        [
            item.name,
            item.expected_label,
            "right" if item.right else f"{item.label}  WRONG" if item.wrong else "inconclusive",
            item.confidence if item.right else "",
            f"{item.rounds.get(item.expected_label, 0)} of {sum(item.rounds.values())}",
            duration(item.latency_s),
            _largest_terms(item.split),
        ]
        for item in results
    ]
    return text_table(headings, rows, texts=headings[:4], wrapped=headings[-1:], caption=caption)


def contention_line(contention: Contention, results: Sequence[SelftestRow]) -> str:
    """Return the warning that other processes kept cores busy, so that kernels could not be judged."""
    unknown = sum(not item.right and not item.wrong for item in results)
    return (
        f"The machine is busy: {contention.who} kept {contention.busy_cores} busy, and {unknown} of {len(results)}"
        " known kernels are inconclusive. Stop that work and run selftest again."
    )


_SHOWN_TERMS = 2
_SHOWN_SHARE = 0.05


def _largest_terms(parts: TimeBreakdown) -> str:
    shares = {name: getattr(parts, term) / parts.latency_s for term, name in TERM_NAMES.items()}
    largest = sorted(shares.items(), key=lambda item: -item[1])[:_SHOWN_TERMS]
    return ", ".join(f"{name} {percent(share)}" for name, share in largest if share >= _SHOWN_SHARE)


def _range(values: tuple[float, float], unit: str) -> str:
    return " to ".join(scaled(value, unit) for value in values)
