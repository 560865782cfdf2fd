"""The JSON documents of `compare` and `gate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler.comparison.compare import Change, Comparison, Shift
from profiler.comparison.gate import Gate, GatedCell, Outcome, PhaseGate
from profiler.comparison.gate_formats import gate_line
from profiler.comparison.side import SettingDifference
from profiler.comparison.text import comparison_sentences
from profiler.json_document import Finite, dumped, view
from profiler.judge.breakdown import TERMS

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ComparisonDocument:
    """`roofscope compare A B --format json`."""

    comparable: bool
    """Whether model, device and settings allow a verdict."""
    before: str
    """Name of the first side."""
    after: str
    """Name of the second side."""
    differences: Sequence[SettingDifference]
    """Settings in which the sides differ."""
    machine: Sequence[Shift]
    """How the machine itself shifted between the sides."""
    answer: Sequence[str]
    """The sentences of the answer."""
    only_before: int
    """Number of cells that only the first side has."""
    only_after: int
    """Number of cells that only the second side has."""
    cells: Sequence[Change]
    """All cells that both sides have."""


@dataclass(frozen=True)
class GateDocument(ComparisonDocument):
    """`roofscope gate --format json`: that of `compare`, with the outcome and decisions added."""

    outcome: Outcome
    """The decision about all cells together."""
    line: str
    """The outcome in one line."""
    more_s: Finite
    """Seconds of further repetitions, per run, that would decide all open cells; null if no budget would."""
    phases: Sequence[PhaseGate]
    """The decision about each phase."""
    cells: Sequence[GatedCell]
    """All cells that both sides have, each with its decision."""


def comparison_document(comparison: Comparison) -> ComparisonDocument:
    return view(
        ComparisonDocument,
        comparison,
        before=comparison.before.name,
        after=comparison.after.name,
        machine=comparison.shifts,
        answer=comparison_sentences(comparison),
        cells=comparison.changes,
    )


def gate_document(gate: Gate) -> GateDocument:
    shared = vars(comparison_document(gate.comparison)) | {"cells": gate.cells}
    return view(GateDocument, gate, **shared, line=gate_line(gate))


def changes_frame(comparison: Comparison) -> pd.DataFrame:
    """Return one row per cell; each term of the time breakdown has a column with the seconds that it gained."""
    import pandas as pd

    rows = []
    for change in comparison.changes:
        row = dumped(change)
        terms = row.pop("terms")
        rows.append({**row, **{name: terms.get(name, math.nan) for name in TERMS}})
    return pd.DataFrame(rows)
