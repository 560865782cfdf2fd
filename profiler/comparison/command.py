"""`compare`: runs and other tools' files, without torch or a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.comparison.compare import Comparison, History, compare_sides, history
from profiler.comparison.gate import Gate
from profiler.comparison.gate import gate as gate_of
from profiler.comparison.side import SettingDifference, Side, differences, in_order, read_side
from profiler.comparison.text import changes_frame
from profiler.errors import RequestError
from profiler.grid.cells import PHASES, Phase

if TYPE_CHECKING:
    import pandas as pd


def compare(before: str | PathLike[str], after: str | PathLike[str], *, anyway: bool = False) -> pd.DataFrame:
    """Two run folders, or files of other tools, cell by cell: a row a cell that both have.

    `change` is after / before - 1 with the machine's own change divided out, `low` and `high` its 95 % interval,
    `moved` the term of the split that moved, a column a term what it gained in seconds. Raises RequestError where the
    two are not comparable, unless `anyway`; then no row has a verdict.
    """
    return changes_frame(compared(Path(before), Path(after), anyway=anyway))


def compared(before: Path, after: Path, *, anyway: bool = False) -> Comparison:
    """Compare two folders or files, as a value. Raises RequestError."""
    found = compare_sides(read_side(before), read_side(after))
    for path, side in ((before, found.before), (after, found.after)):
        if not side.cells:
            raise RequestError(
                f"{path} holds no time of a prefill or a decode step whose shape it tells: nothing to compare;"
                " `roofscope place` reads what covers both, and asks for shapes."
            )
    if not anyway:
        refuse(found.differences)
    if not found.changes:
        raise RequestError(
            f"{before} and {after} have no cell in common: {found.only_before} cells of the one, {found.only_after} of"
            f" the other, such as {_first(found.before)} and {_first(found.after)}."
        )
    return found


def _first(side: Side) -> str:
    return in_order(list(side.cells))[0].name


def refuse(found: Sequence[SettingDifference]) -> None:
    """Raises RequestError where differences forbid a verdict."""
    reasons = [item.words for item in found if item.weight == "refuses"]
    if reasons:
        raise RequestError(f"not comparable: {'; '.join(reasons)}. --anyway shows them side by side.")


def history_of(paths: Sequence[Path], *, anyway: bool = False) -> History:
    """Several runs, oldest first. Raises RequestError where one of them is not comparable with the first."""
    found = history([read_side(path) for path in paths])
    if not anyway:
        for side in found.sides[1:]:
            refuse(differences(found.sides[0], side))
    return found


def gated(before: Path, after: Path, max_slowdown: str) -> Gate:
    """A gate over two runs; `max_slowdown` as `thresholds` reads it. Raises RequestError.

    Two that are not comparable give a gate that says so.
    """
    limits = thresholds(max_slowdown)
    found = gate_of(compared(before, after, anyway=True), limits)
    if found.comparison.comparable and not found.phases:
        raise RequestError(f"--max-slowdown {max_slowdown}: the two have no {' and no '.join(limits)} in common.")
    return found


def thresholds(text: str) -> dict[Phase, float]:
    """`3%`, `0.03`, or `decode=3%,prefill=5%` (phases that are not named are not looked at) as shares by phase.

    Raises RequestError.
    """
    found: dict[Phase, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().rpartition("=")
        phases = [phase for phase in PHASES if not equals or phase == name.strip()]
        if not phases:
            raise RequestError(f"--max-slowdown: {name.strip()!r} is no phase; use prefill or decode.")
        if twice := [phase for phase in phases if phase in found]:
            raise RequestError(f"--max-slowdown {text}: what {twice[0]} is allowed is told twice; give it once.")
        found |= dict.fromkeys(phases, _share(value))
    return found


def _share(text: str) -> float:
    try:
        share = float(text.rstrip("% ")) / (100 if text.rstrip().endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise RequestError(f"--max-slowdown {text!r} is no share; give 3%, 0.03, or decode=3%,prefill=5%.")
    return share
