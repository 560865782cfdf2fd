"""Changes between runs as sentences, rows and JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from profiler.comparison.compare import Change, Comparison, History
from profiler.comparison.side import NOT_TOLD, PROCESSOR, CellId, Timed
from profiler.judge.breakdown import TERM_NAMES, TERMS
from profiler.stats import SAME, ChangeVerdict
from profiler.units import duration, percent, several, signed_duration

if TYPE_CHECKING:
    import pandas as pd

CHANGE_COLUMNS = ("cell", "before", "after", "change", "interval", "verdict", "moved, or why not")
# A difference between machines that is smaller than this is not worth a sentence.
_WORTH_SAYING = 0.005
_MOST_SENTENCES = 5
_NO_TERM = "no term stands out"
_MOST_RUNS = 6
"""Columns that a terminal has room for."""


def signed(share: float) -> str:
    """`0.071` -> `+7.1 %`."""
    return f"{100 * share:+.1f} %"


def change_words(change: Change) -> str:
    """`7.1 % (5.9 to 8.3) slower: dispatch +2.10 ms of +2.30 ms`; what was divided out is named."""
    if change.verdict not in ("slower", "faster"):
        return f"{change.verdict} ({change.because or interval_words(change)})"
    sign = 1 if change.verdict == "slower" else -1
    ends = sorted(100 * sign * end for end in (change.low, change.high))
    text = f"{100 * sign * change.change:.1f} % ({ends[0]:.1f} to {ends[1]:.1f}) {change.verdict}"
    moved = moved_words(change)
    return f"{text}: {moved}" if moved else text


def moved_words(change: Change) -> str:
    """`dispatch +2.10 ms of +2.30 ms`; nothing where no split is known."""
    if change.moved is None:
        return _NO_TERM if change.terms else ""
    return (
        f"{TERM_NAMES[change.moved]} {signed_duration(change.terms[change.moved])} of"
        f" {signed_duration(change.gained_s)}"
    )


def moved_briefly(change: Change) -> str:
    """`dispatch +2.10 ms`, for a row that holds the rest."""
    if change.moved is None:
        return _NO_TERM if change.terms and change.verdict in ("slower", "faster") else ""
    return f"{TERM_NAMES[change.moved]} {signed_duration(change.terms[change.moved])}"


def interval_words(change: Change) -> str:
    """`-1.2 .. +3.4 %`."""
    return f"{100 * change.low:+.1f} .. {100 * change.high:+.1f} %"


def comparison_sentences(comparison: Comparison) -> list[str]:
    """The answer: how many cells changed, the machine's own part, and the cells that changed most."""
    if not comparison.comparable:
        return [f"Not comparable ({comparison.refusal}): side by side, without a verdict."]
    counts = Counter(item.verdict for item in comparison.changes)
    told = [several(counts[name], f"is {word}", f"are {word}") for name, word in _COUNTED if counts[name]]
    unclear = several(counts["inconclusive"], "cannot be told", "cannot be told") if counts["inconclusive"] else ""
    cells = several(len(comparison.changes), "cell", "cells")
    found = [f"Of {cells} {', '.join([*told, *([unclear] if unclear else [])])}{_alone(comparison)}."]
    found += machine_sentences(comparison)
    claimed = [item for item in comparison.changes if item.verdict in ("slower", "faster")]
    claimed.sort(key=lambda item: -abs(math.log1p(item.change)))
    found += [f"{item.asked.name} is {change_words(item)}." for item in claimed[:_MOST_SENTENCES]]
    unclaimed = Counter(item.because for item in comparison.changes if item.because)
    if unclaimed:
        told = [f"{several(n, 'cell', 'cells')} ({why})" for why, n in unclaimed.most_common(3)]
        found.append(f"Not claimed: {', '.join(told)}.")
    return found


_COUNTED: tuple[tuple[ChangeVerdict, str], ...] = (
    ("slower", "slower"),
    ("faster", "faster"),
    ("same", "the same"),
)


def _alone(comparison: Comparison) -> str:
    if not comparison.only_before and not comparison.only_after:
        return ""
    first = several(comparison.only_before, "cell stands", "cells stand")
    return f"; {first} in the first alone, {comparison.only_after} in the second"


def machine_sentences(comparison: Comparison) -> list[str]:
    """What the machine itself did, where that is beyond doubt."""
    found = []
    for shift in comparison.shifts:
        if shift.is_claim and abs(shift.ratio - 1) > _WORTH_SAYING:
            word = "slower" if shift.ratio > 1 else "faster"
            by = f"{100 * abs(shift.ratio - 1):.0f} % {word}"
            roof_ratio = shift.roof_ratio if shift.told_by == "sentinel" else None
            roofs = f", and its roof by {signed(roof_ratio - 1)} of time" if roof_ratio else ""
            divided = any(item.machine for item in comparison.changes)
            told = "changes are told without it, times with it" if divided else "nothing is divided out"
            found.append(f"The machine itself was {by} at {shift.resource} (its {shift.told_by}{roofs}); {told}.")
    return found


def difference_lines(comparison: Comparison) -> list[str]:
    """What is not the same, what may explain a change on top, and what of the machines is not known."""
    lines = [f"differs: {item.words}" for item in comparison.differences]
    sides = (comparison.before, comparison.after)
    untold = [side.settings.get(PROCESSOR) for side in sides] == [NOT_TOLD, NOT_TOLD]
    name = comparison.before.settings.get("device", "")
    unknown = f"neither run tells its processor's family: several are named {name}"
    return (lines or ["nothing that is known differs between the two"]) + ([unknown] if untold else [])


def change_rows(comparison: Comparison, most: int | None = None) -> list[list[str]]:
    """The first `most` cells, or every one, in the order of the columns."""
    return [
        [
            item.asked.name,
            duration(item.before.median_s),
            duration(item.after.median_s),
            signed(item.change),
            interval_words(item) if item.visits and item.low < item.high else "-",
            item.verdict if comparison.comparable else "-",
            moved_briefly(item) or item.because,
        ]
        for item in comparison.changes[:most]
    ]


def column_words(comparison: Comparison) -> str:
    """What the columns of those rows hold, and when a verdict is open."""
    divided = any(item.machine for item in comparison.changes)
    own = "taken off (times hold it)" if divided else "not taken off"
    words = f"change: after over before, the machine's own drift {own}"
    if not comparison.comparable or all(item.verdict != "inconclusive" for item in comparison.changes):
        return words
    return f"{words}; inconclusive: its interval holds 0 and more than {percent(SAME)}, or as the last column says"


def cell_json(asked: CellId) -> dict[str, object]:
    """The columns that tell a cell."""
    return dict(asked._asdict())


def change_json(change: Change) -> dict[str, object]:
    """One cell of the contract; what is not known is null."""
    return {
        **cell_json(change.asked),
        "before_s": change.before.median_s,
        "after_s": change.after.median_s,
        "change": change.change,
        "low": change.low,
        "high": change.high,
        "verdict": change.verdict,
        "because": change.because,
        "moved": change.moved,
        "terms": dict(change.terms),
        "machine": change.machine,
        "before_visits": change.before.visits,
        "after_visits": change.after.visits,
    }


def comparison_json(comparison: Comparison) -> dict[str, object]:
    """The document of `roofscope compare A B --format json`."""
    return {
        "comparable": comparison.comparable,
        "before": comparison.before.name,
        "after": comparison.after.name,
        "differences": [asdict(item) for item in comparison.differences],
        "machine": [{**asdict(shift), "claimed": shift.is_claim} for shift in comparison.shifts],
        "answer": comparison_sentences(comparison),
        "only_before": comparison.only_before,
        "only_after": comparison.only_after,
        "cells": [change_json(change) for change in comparison.changes],
    }


def changes_frame(comparison: Comparison) -> pd.DataFrame:
    """The cells as a table: a row each, the gain of every term a column of its own."""
    import pandas as pd

    rows = []
    for change in comparison.changes:
        row = change_json(change)
        row.pop("terms")
        rows.append({**row, **{name: change.terms.get(name, math.nan) for name in TERMS}})
    return pd.DataFrame(rows)


def selected_history(history: History) -> list[int]:
    """The runs that a table has room for: the first, the last, and those at which most cells changed."""
    last = len(history.sides) - 1
    if last < _MOST_RUNS:
        return list(range(last + 1))
    changed = [number for number, _ in _steps(history).most_common() if 0 < number < last]
    return sorted({0, last, *changed[: _MOST_RUNS - 2]})


def history_rows(history: History, runs: Sequence[int]) -> list[list[str]]:
    """A cell a row, each of `runs` a column: its time, and what changed at that step."""
    rows = []
    for cell in history.cells:
        steps = {step.at: step.change for step in cell.steps}
        rows.append([cell.asked.name, *(_time_words(cell.times[number], steps.get(number)) for number in runs)])
    return rows


def _steps(history: History) -> Counter[int]:
    """How many cells changed at each run."""
    return Counter(step.at for cell in history.cells for step in cell.steps)


def _time_words(timed: Timed | None, change: Change | None) -> str:
    if timed is None:
        return "-"
    return duration(timed.median_s) + (f" ({signed(change.change)})" if change else "")


def history_sentences(history: History) -> list[str]:
    """The steps at which most cells changed, with what differed there."""
    at = _steps(history)
    refused = [item.words for of_run in history.differences for item in of_run if item.weight == "refuses"]
    found = [f"Not comparable throughout ({'; '.join(dict.fromkeys(refused))}): side by side there."] if refused else []
    for number in sorted(number for number, _ in at.most_common(_MOST_RUNS)):
        reasons = [item.words for item in history.differences[number]][:3]
        why = f" ({', '.join(reasons)})" if reasons else ""
        there = sum(cell.times[number] is not None for cell in history.cells)
        found.append(f"At {history.sides[number].name} {at[number]} of {there} cells changed{why}.")
        changes = [step.change for cell in history.cells for step in cell.steps if step.at == number]
        worst = max(changes, key=lambda item: abs(math.log1p(item.change)))
        found.append(f"{worst.asked.name} became {change_words(worst)}.")
    return found or [f"No cell changed over {len(history.sides)} runs, as far as can be told."]


def history_json(history: History) -> dict[str, object]:
    """The document of `roofscope compare` of more than two runs."""
    return {
        "runs": [{"name": side.name, "created": side.created, "tool": side.tool} for side in history.sides],
        "differences": [[asdict(item) for item in of_run] for of_run in history.differences],
        "answer": history_sentences(history),
        "cells": [
            {
                **cell_json(cell.asked),
                "times_s": [None if timed is None else timed.median_s for timed in cell.times],
                "steps": [{"at": step.at, **change_json(step.change)} for step in cell.steps],
            }
            for cell in history.cells
        ],
    }
