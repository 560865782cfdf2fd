"""The sections of a run's report, in their order. A further section is a function and a line in SECTIONS."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from profiler.report import cells, changes, conditions, engines, hardware, noise, overview, time_breakdown
from profiler.report.blocks import Section
from profiler.report.terminal import print_sections
from profiler.store.folder import Run

SECTIONS: list[Callable[[Run], Section | None]] = [
    overview.answer,
    overview.interrupted,
    overview.setting,
    overview.warnings,
    cells.cells,
    time_breakdown.breakdown,
    time_breakdown.terms,
    cells.waiting,
    cells.roofline,
    time_breakdown.operators,
    overview.explore,
    changes.ran,
    changes.levers,
    changes.other_gpus,
    cells.regimes,
    cells.regime_map,
    time_breakdown.inside,
    time_breakdown.activity,
    engines.engines,
    engines.generate,
    conditions.ragged,
    conditions.experts,
    engines.cold,
    conditions.ranks,
    conditions.forecast,
    cells.doubling,
    hardware.precision,
    hardware.quality,
    noise.noise,
    hardware.roofs,
    hardware.health,
    overview.cost_of_measuring,
    overview.words,
    overview.method,
    overview.last_warnings,
]
"""Each returns a section of a run's report, or None where the run has nothing for it."""


def run_sections(run: Run) -> list[Section | None]:
    """Return the sections of a run's report, in their order."""
    return [section(run) for section in SECTIONS]


def print_run(run: Run, console: Console) -> None:
    """Print the report of a run on the terminal."""
    print_sections(run_sections(run), console)
