"""The sections of a run's report, in their order. A further section is a function and a line in SECTIONS."""

from __future__ import annotations

from collections.abc import Callable

from profiler.report import cells, changes, conditions, engines, hardware, overview, time_breakdown
from profiler.report.blocks import Section
from profiler.store.folder import Run

SECTIONS: list[Callable[[Run], Section | None]] = [
    overview.answer,
    overview.advice,
    overview.interrupted,
    overview.warnings,
    cells.roofline,
    overview.setting,
    overview.host,
    cells.cells,
    cells.measured_cells,
    time_breakdown.breakdown,
    time_breakdown.corners,
    time_breakdown.terms,
    cells.waiting,
    time_breakdown.operators,
    time_breakdown.gemms,
    overview.explore,
    changes.ran,
    changes.levers,
    changes.other_gpus,
    cells.regimes,
    time_breakdown.inside,
    time_breakdown.activity,
    engines.engines,
    engines.generate,
    conditions.ragged,
    conditions.experts,
    engines.drafting,
    conditions.ranks,
    cells.doubling,
    hardware.precision,
    hardware.quality,
    cells.noise,
    hardware.roofs,
    hardware.health,
    overview.cost_of_measuring,
    overview.words,
    overview.method,
    overview.last_warnings,
    overview.doubts,
    overview.end,
]
"""Each returns a section of a run's report, or None where the run has nothing for it."""


def run_sections(run: Run) -> list[Section | None]:
    """Return the sections of a run's report, in their order."""
    return [section(run) for section in SECTIONS]
