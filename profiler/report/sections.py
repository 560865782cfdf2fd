"""The sections of a run's report, in their order. A further section is a function and a line in SECTIONS."""

from collections.abc import Callable

from profiler.report import cells, changes, device, overview, time_breakdown
from profiler.report.blocks import Section
from profiler.store.folder import Run

SECTIONS: list[Callable[[Run], Section | None]] = [
    overview.answer,
    cells.roofline,
    cells.cells,
    time_breakdown.breakdown,
    changes.ran,
    changes.changes,
    time_breakdown.inside,
    changes.engines,
    changes.conditions,
    cells.batch_sizes,
    device.device,
    overview.method,
]
"""Each returns a section of a run's report, or None where the run has nothing for it."""


def run_sections(run: Run) -> list[Section | None]:
    return [section(run) for section in SECTIONS]
