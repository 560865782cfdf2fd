"""`compare` and `gate`: compare run folders and other tools' files, without torch or a device; their JSON documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.comparison.compare import Change, Comparison, Shift, compare_sides
from profiler.comparison.gate import Gate, GatedCell, Outcome, PhaseGate, gate
from profiler.comparison.gate_formats import gate_line
from profiler.comparison.side import SettingDifference, in_order, read_side
from profiler.comparison.text import comparison_sentences, measuring
from profiler.errors import RequestError
from profiler.grid.cells import PHASES, Phase
from profiler.json_document import Finite, dumped, view
from profiler.judge.breakdown import TERMS

if TYPE_CHECKING:
    import pandas as pd


def compare(before: str | PathLike[str], after: str | PathLike[str], *, anyway: bool = False) -> pd.DataFrame:
    """Compare two run folders, or files of other tools: one row per cell that both contain.

    `change` is after / before - 1 with the machine's own change divided out; `low` and `high` are its 95 % interval.
    `moved` is the term of the time breakdown that moved. One column per term has the seconds that it gained. Raises
    RequestError if the two are not comparable, unless `anyway`; then no row has a verdict.
    """
    import pandas as pd

    rows = []
    for change in compared(Path(before), Path(after), anyway=anyway).changes:
        row = dumped(change)
        terms = row.pop("terms")
        rows.append({**row, **{name: terms.get(name, math.nan) for name in TERMS}})
    return pd.DataFrame(rows)


def compared(before: Path, after: Path, *, anyway: bool = False, tp: Sequence[int] = ()) -> Comparison:
    """Compare two run folders or files of other tools.

    `tp` are the GPUs that shared each step: of both sides, or of each one; empty if the sides say it or nobody knows.
    Raises RequestError if one has no cell or they have none in common, or, unless `anyway`, if they are not comparable.
    """
    if len(tp) > 2 or any(gpus < 1 for gpus in tp):
        raise RequestError("--tp: give one number of GPUs, or one for each of the two sides.")
    gpus = tp if len(tp) == 2 else 2 * [*tp, 0][:1]
    comparison = compare_sides(*map(read_side, (before, after), gpus))
    for path, side in ((before, comparison.before), (after, comparison.after)):
        if not side.cells:
            raise RequestError(
                f"{path} holds no time of a prefill or a decode step with its shape, so there is nothing to compare;"
                " `roofscope place` reads whole generations and takes shapes as options."
            )
    if not (anyway or comparison.comparable):
        raise RequestError(f"not comparable: {comparison.refusal}. --anyway shows them side by side.")
    if not comparison.changes:
        first, other = (in_order(list(side.cells))[0].name for side in (comparison.before, comparison.after))
        raise RequestError(
            f"{before} and {after} have no cell in common: the first has {comparison.only_before}, the second"
            f" {comparison.only_after}, such as {first} and {other}"
            f"{measuring('second', comparison.after, comparison.before)}."
        )
    return comparison


def gated(before: Path, after: Path, max_slowdown: str) -> Gate:
    """Decide a gate over two runs; `thresholds` gives the syntax of `max_slowdown`.

    Runs that are not comparable give a gate with that outcome. Raises RequestError for a bad `max_slowdown`, or if the
    runs have no cell of its phases in common.
    """
    limits = thresholds(max_slowdown)
    result = gate(compared(before, after, anyway=True), limits)
    if result.comparison.comparable and not result.phases:
        raise RequestError(f"--max-slowdown {max_slowdown}: the two have no {' and no '.join(limits)} in common.")
    return result


def thresholds(text: str) -> dict[Phase, float]:
    """Parse `3%`, `0.03`, or `decode=3%,prefill=5%` into a share per phase; phases that are not named have no limit.

    Raises RequestError.
    """
    limits: dict[Phase, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().rpartition("=")
        phases = [phase for phase in PHASES if not equals or phase == name.strip()]
        if not phases:
            raise RequestError(f"--max-slowdown: {name.strip()!r} is not a phase; use prefill or decode.")
        if duplicates := [phase for phase in phases if phase in limits]:
            raise RequestError(f"--max-slowdown {text}: {duplicates[0]} has two limits; give one.")
        limits |= dict.fromkeys(phases, _share(value))
    return limits


def _share(text: str) -> float:
    try:
        share = float(text.rstrip("% ")) / (100 if text.rstrip().endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise RequestError(
            f"--max-slowdown {text!r} is not a share between 0 and 1; give 3%, 0.03, or decode=3%,prefill=5%."
        )
    return share


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
