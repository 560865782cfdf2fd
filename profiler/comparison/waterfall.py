"""The waterfall picture between two runs: the time that each term of the time breakdown gained."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from profiler.comparison.compare import Change, compare_sides
from profiler.comparison.side import side_of_run
from profiler.errors import RequestError
from profiler.grid.cells import PHASES
from profiler.report.plots import COMPARISONS
from profiler.report.plots.waterfall import PANELS_A_PHASE, Panel, waterfall_figure
from profiler.store.folder import Run


def waterfall(runs: Sequence[Run]) -> Figure:
    """Draw the cells of each phase that changed most between the first run and the last, with each term's gain.

    Raises RequestError if the two are not comparable, or have no cell with a time breakdown in common.
    """
    comparison = compare_sides(side_of_run(runs[0]), side_of_run(runs[-1]))
    if not comparison.comparable:
        raise RequestError(f"not comparable: {comparison.refusal}. `devices` draws both under their own roofs.")
    shown = [change for phase in reversed(PHASES) for change in _most_changed(comparison.changes, phase)]
    if not shown:
        raise RequestError(f"{runs[0].folder} and {runs[-1].folder} have no cell with a time breakdown in common.")
    panels = [
        Panel(
            f"{change.asked.name}: {change.verdict}",
            ("before", "after"),
            (change.before.median_s, change.after.median_s),
            change.terms,
        )
        for change in shown
    ]
    return waterfall_figure(panels, f"{runs[0].folder.name} to {runs[-1].folder.name}")


def _most_changed(changes: Sequence[Change], phase: str) -> list[Change]:
    changes = [change for change in changes if change.asked.phase == phase and change.terms]
    return sorted(changes, key=lambda change: -abs(change.change))[:PANELS_A_PHASE]


COMPARISONS["waterfall"] = waterfall
