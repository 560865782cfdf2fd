"""Waterfall charts of steps: from one engine's time to another's, or from nothing to the measured time, by term."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from profiler.grid.cells import PHASES
from profiler.judge.breakdown import TERMS
from profiler.report.engines import waterfalls
from profiler.report.plots.style import panel_grid, title
from profiler.report.selection import selected_cells
from profiler.store.folder import Run
from profiler.units import significant

_PANELS_A_PHASE = 2
_TOTAL_COLOR = "#888888"
# A term that changed by less than this share of the step is not drawn.
_WORTH_DRAWING = 0.002


@dataclass(frozen=True)
class Panel:
    """One cell: its two times, and the change of each term between them, in seconds."""

    name: str
    ends: tuple[str, str]
    times_s: tuple[float, float]
    terms: Mapping[str, float]


def waterfall(run: Run) -> Figure:
    """Return steps term by term: those in which an engine differs most from the first, or the first engine's own.

    A run of one engine, or whose engines differ by no more than noise, has the smallest and the largest cell of each
    phase.
    """
    results, panels = run.by_key(), []
    for phase in reversed(PHASES):
        differences = [item for item in waterfalls(run) if item.phase == phase]
        for item in sorted(differences, key=lambda item: -abs(item.saves_s))[:_PANELS_A_PHASE]:
            first = replace(item.key, cell=replace(item.key.cell, engine=item.against))
            ends = (results[first].latency_s, results[item.key].latency_s)
            name = f"{phase} {item.batch_size} x {item.key.cell.depth}"
            panels.append(Panel(name, (item.against, item.engine), ends, item.terms))
    for cell in [] if panels else selected_cells(run):
        terms = {term: getattr(cell, term) for term in TERMS}
        panels.append(Panel(cell.key.name, ("", "measured"), (0.0, cell.latency_s), terms))
    figure, row = panel_grid(1, len(panels), 3.4, 4.2, f"{title(run)}: term by term")
    for axes, panel in zip(row, panels, strict=True):
        _draw(axes, panel)
    row[0].set_ylabel("ms")
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    total_s, after_s = panel.times_s
    worth_s = _WORTH_DRAWING * max(panel.times_s)
    moved = {name: panel.terms[name] for name in TERMS if abs(panel.terms.get(name, 0.0)) > worth_s}
    names = [panel.ends[0], *(TERMS[name].name for name in moved), panel.ends[1]]
    axes.bar(0, 1e3 * total_s, color=_TOTAL_COLOR)
    at_s = least_s = total_s
    for position, (name, gain) in enumerate(moved.items(), 1):
        term = TERMS[name]
        axes.bar(position, 1e3 * abs(gain), bottom=1e3 * min(at_s, at_s + gain), color=term.color, hatch=term.hatch)
        axes.plot([position - 1, position], [1e3 * at_s] * 2, color=_TOTAL_COLOR, lw=0.8)
        at_s += gain
        least_s = min(least_s, at_s)
    axes.bar(len(names) - 1, 1e3 * after_s, color=_TOTAL_COLOR)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    # The axis begins at zero. If changes are small compared with the whole, it begins just below them, and slashes mark
    # the cut at the feet of the whole bars.
    least_ms = 1e3 * (min(least_s, after_s) - 2 * sum(map(abs, moved.values())) - 0.02 * total_s)
    axes.set_ylim(max(0.0, least_ms))
    foot = axes.get_xaxis_transform()
    for at, height in itertools.product((0, len(names) - 1), (0.015, 0.04)) if least_ms > 0 else ():
        axes.plot([at - 0.45, at + 0.45], [height - 0.01, height + 0.01], transform=foot, color="white", lw=2)
    cut = f"\n(axis cut at {significant(least_ms)} ms)" if least_ms > 0 else ""
    axes.set_title(panel.name + cut, fontsize=10)
