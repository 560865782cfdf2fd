"""What a run measures beside the sweep because it was asked to: insides of steps, cold starts, quality."""

from __future__ import annotations

from pathlib import Path

from profiler.grid import Cell
from profiler.job.cold import fresh_starts
from profiler.job.measuring import Session
from profiler.probes.inside import hook_cell
from profiler.probes.quality import check_quality
from profiler.probes.silence import steps_after_silence
from profiler.probes.trace import trace_cell


def measure_wanted(session: Session, folder: Path) -> None:
    """Measure what the options ask for beside the sweep; a trace is written into `folder`."""
    wants, subject = session.prepared.options, session.subject
    if (wants.breakdown or wants.trace) and not subject.loaded.offloaded:
        session.stages.begin("looking inside", "looking inside a step")
        for name in (name for name, engine in subject.engines.items() if not engine.owns_model):
            with session.stages.optional(f"the look inside {name}", "its steps have no parts"):
                _look_inside(session, name, folder if wants.trace else None)
    if wants.cold:
        _start_cold(session)
    if quality_ids := session.prepared.quality_ids:
        session.stages.begin("quality", "holding the quantised model against the unquantised one")
        with session.stages.optional("the comparison with the unquantised model", "its quality is not known"):
            session.ledger.add(check_quality(subject.loaded, quality_ids))


def _look_inside(session: Session, engine: str, trace_folder: Path | None) -> None:
    """Groups within a step of every cell of an engine; kernels and gaps of the smallest and the largest."""
    cells = [cell for cell in session.ledger.gathered.visits if cell.engine == engine]
    for cell in cells:
        for hooked in hook_cell(session.subject, cell):
            session.ledger.add(hooked)
    for number, cell in enumerate(_ends(cells)):
        for activity in trace_cell(session.subject, cell, None if number else trace_folder):
            session.ledger.add(activity)


def _ends(cells: list[Cell]) -> list[Cell]:
    ordered = sorted(cells, key=lambda cell: cell.batch_size * cell.depth)
    return list(dict.fromkeys([*ordered[:1], *ordered[-1:]]))


def _start_cold(session: Session) -> None:
    subject = session.subject
    session.stages.begin("cold", "starting the model in a fresh process, and stepping it after silence")
    with session.stages.optional("the cold starts", "what a fresh process takes is not known"):
        for start in fresh_starts(session.prepared, subject.machine, subject.model_bytes):
            session.ledger.add(start)
    engine, cell = next(iter(session.subject.engines.values())), session.prepared.grid.cells[0]
    with session.stages.optional("the steps after a pause", "what a pause costs is not known"):
        for steps in steps_after_silence(engine, cell, session.subject.machine):
            session.ledger.add(steps)
