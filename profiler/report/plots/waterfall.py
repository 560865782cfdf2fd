"""From one run's time to another's, term by term."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from profiler.diagnosis.compare import Change, compare
from profiler.diagnosis.step_time import TERM_NAMES
from profiler.errors import RequestError
from profiler.grid import PHASES
from profiler.record.run import Run
from profiler.record.sides import side_of_run
from profiler.report.plots.style import TERM_STYLE

_PANELS_A_PHASE = 2
_TOTAL_COLOR = "#888888"
# A term that moved less than this share of the step is left out.
_WORTH_DRAWING = 0.002


def waterfall(runs: Sequence[Run]) -> Figure:
    """The cells of each phase that changed most between the first run and the last: what each term gained.

    Raises RequestError where the two have no cell with a split in common.
    """
    comparison = compare(side_of_run(runs[0]), side_of_run(runs[-1]))
    shown = [change for phase in reversed(PHASES) for change in _most_changed(comparison.changes, phase)]
    if not shown:
        raise RequestError(f"{runs[0].folder} and {runs[-1].folder} have no cell with a split in common.")
    figure, axes_row = plt.subplots(1, len(shown), figsize=(3.4 * len(shown), 4.2), squeeze=False)
    for axes, change in zip(axes_row[0], shown, strict=True):
        _draw(axes, change)
    axes_row[0][0].set_ylabel("ms")
    figure.suptitle(f"{runs[0].folder.name} to {runs[-1].folder.name}", x=0.01, ha="left", fontsize=12)
    return figure


def _most_changed(changes: Sequence[Change], phase: str) -> list[Change]:
    known = [change for change in changes if change.asked.phase == phase and change.terms]
    return sorted(known, key=lambda change: -abs(change.change))[:_PANELS_A_PHASE]


def _draw(axes: Axes, change: Change) -> None:
    """One cell: its time before, the gain of each term from there on, its time after."""
    total_s = change.before.median_s
    moved = {name: gain for name, gain in change.terms.items() if abs(gain) > _WORTH_DRAWING * total_s}
    names = ["before", *(TERM_NAMES[name] for name in moved), "after"]
    axes.bar(0, 1e3 * total_s, color=_TOTAL_COLOR)
    at_s = total_s
    for position, (name, gain) in enumerate(moved.items(), 1):
        color, hatch = TERM_STYLE[name]
        axes.bar(position, 1e3 * abs(gain), bottom=1e3 * min(at_s, at_s + gain), color=color, hatch=hatch)
        axes.plot([position - 1, position], [1e3 * at_s] * 2, color=_TOTAL_COLOR, lw=0.8)
        at_s += gain
    axes.bar(len(names) - 1, 1e3 * change.after.median_s, color=_TOTAL_COLOR)
    # Gains are small beside the whole: the axis begins a little below the least that is drawn.
    least_s = min(total_s, change.after.median_s, at_s)
    axes.set_ylim(1e3 * max(0.0, least_s - 2 * sum(map(abs, moved.values())) - 0.02 * total_s))
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axes.set_title(f"{change.asked.name}: {change.verdict}", fontsize=10)
