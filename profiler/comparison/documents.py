"""The JSON documents of `compare` and `gate`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from profiler.comparison.compare import Change, Comparison, Shift
from profiler.comparison.gate import Decision, Gate, Outcome
from profiler.comparison.gate_formats import gate_line
from profiler.comparison.side import MatchKey, SettingDifference
from profiler.comparison.text import comparison_sentences
from profiler.grid.cells import Phase
from profiler.json_document import Document, view
from profiler.judge.breakdown import TERMS
from profiler.judge.difference import ChangeVerdict

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ChangeRow(MatchKey):
    """One cell on both sides."""

    before_s: float
    """Median time on the first side."""
    after_s: float
    """Median time on the second side."""
    change: float
    """after / before - 1 with the machine's own change divided out; 0.07 is 7 % slower."""
    low: float
    """Lower end of the 95 % interval of the change."""
    high: float
    """Upper end of the same interval."""
    verdict: ChangeVerdict
    """Whether the change is certain, and in which direction."""
    because: str
    """Why a verdict is inconclusive; empty otherwise."""
    moved: str | None
    """The term that moved most; null without a claimed change, without time breakdowns, or if none stands out."""
    terms: Mapping[str, float]
    """Seconds that each term gained; they add up to `after - before`."""
    machine: float
    """The part that was divided out: 0.04 if the machine itself was 4 % slower."""
    before_visits: int
    """Visits of the cell, or another tool's repetitions: 2 if only their spread is known, 0 if neither is."""
    after_visits: int
    """The same of the second side."""


def change_row(change: Change) -> ChangeRow:
    """Return one cell of a comparison as its JSON has it."""
    before, after = change.before, change.after
    return view(
        ChangeRow,
        change,
        **vars(change.asked),
        before_s=before.median_s,
        after_s=after.median_s,
        before_visits=before.visits,
        after_visits=after.visits,
    )


@dataclass(frozen=True)
class ShiftRow(Shift):
    """How much longer the same memory-bound or compute-bound work took on the machine itself."""

    claimed: bool = field(kw_only=True)
    """Whether it exceeds its interval, and roofs that were measured again moved in the same direction."""


@dataclass(frozen=True)
class ComparisonDocument(Document):
    """`roofscope compare A B --format json`."""

    comparable: bool
    """Whether model, device and settings allow a verdict."""
    before: str
    """Name of the first side."""
    after: str
    """Name of the second side."""
    differences: Sequence[SettingDifference]
    """Settings in which the sides differ."""
    machine: Sequence[ShiftRow]
    """How the machine itself shifted between the sides."""
    answer: Sequence[str]
    """The sentences of the answer."""
    only_before: int
    """Number of cells that only the first side has."""
    only_after: int
    """Number of cells that only the second side has."""
    cells: Sequence[ChangeRow]
    """All cells that both sides have."""


def comparison_document(comparison: Comparison) -> ComparisonDocument:
    """Return the document of a comparison of two sides."""
    return view(
        ComparisonDocument,
        comparison,
        before=comparison.before.name,
        after=comparison.after.name,
        machine=[ShiftRow(**vars(shift), claimed=shift.is_claim) for shift in comparison.shifts],
        answer=comparison_sentences(comparison),
        cells=[change_row(change) for change in comparison.changes],
    )


def changes_frame(comparison: Comparison) -> pd.DataFrame:
    """Return one row per cell; each term of the time breakdown has a column with the seconds that it gained."""
    import pandas as pd

    rows = []
    for change in comparison.changes:
        row = dict(vars(change_row(change)))
        terms = row.pop("terms")
        rows.append({**row, **{name: terms.get(name, math.nan) for name in TERMS}})
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class GateRow(ChangeRow):
    """One cell with the gate's decision."""

    gate: Decision
    pooled: float
    """The cell's change, pooled with all cells of its phase."""
    pooled_low: float
    pooled_high: float | None
    """95 % interval of `pooled`; null is infinite."""
    alone_high: float | None
    """Upper end of the 95 % interval from the cell's own visits only; null is infinite."""
    more_s: float | None
    """Seconds of further visits, per run, that would decide the cell; null if no budget would."""


@dataclass(frozen=True)
class GatePhase:
    """All cells of one phase together."""

    phase: Phase
    max_slowdown: float
    change: float | None
    """Mean change of the cells; null if all of them were disturbed."""
    low: float
    high: float | None
    """95 % interval of the mean; null is infinite."""
    gate: Decision


@dataclass(frozen=True)
class GateDocument(ComparisonDocument):
    """`roofscope gate --format json`: that of `compare`, with the outcome and decisions added."""

    outcome: Outcome
    """The decision about all cells together."""
    line: str
    """The outcome in one line."""
    more_s: float | None
    """Seconds of further visits, per run, that would decide all open cells; null if no budget would."""
    phases: Sequence[GatePhase]
    """The decision about each phase."""
    cells: Sequence[GateRow]
    """All cells that both sides have, each with its decision."""


def gate_document(gate: Gate) -> GateDocument:
    """Return the document of a gate."""
    return view(
        GateDocument,
        comparison_document(gate.comparison),
        outcome=gate.outcome,
        line=gate_line(gate),
        more_s=_finite(gate.more_s),
        phases=[
            GatePhase(item.phase, item.threshold, _finite(item.estimate), item.low, _finite(item.high), item.decision)
            for item in gate.phases
        ],
        cells=[
            GateRow(
                **vars(change_row(cell.change)),
                gate=cell.decision,
                pooled=cell.estimate,
                pooled_low=cell.low,
                pooled_high=_finite(cell.high),
                alone_high=_finite(cell.alone_high),
                more_s=_finite(cell.more_s),
            )
            for cell in gate.cells
        ],
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
