"""What a comparison holds against another: a run folder, or another tool's file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import stdev

from profiler.diagnosis.cell import CellResult
from profiler.diagnosis.sides import NOT_TOLD, PROCESSOR, Asked, Side, Timed, Witness
from profiler.diagnosis.step_time import TERMS
from profiler.errors import RequestError
from profiler.grid import PHASES, Cell, CellKey, Phase
from profiler.record.document import RunDocument
from profiler.record.readers.figures import Figure, ForeignFile
from profiler.record.readers.reading import read_foreign
from profiler.record.run import Run, read_gathered, read_run
from profiler.roofs.values import Ceilings, Look, swing
from profiler.timing.outcomes import Visit, phase_medians, phase_samples
from profiler.timing.sampling import Spread, estimate, spread_of, student_t
from profiler.units import duration, scaled

ROOFSCOPE = "roofscope"


def read_side(path: Path) -> Side:
    """A run folder, or a file of another tool, as one side of a comparison. Raises RunError or RequestError."""
    return side_of_file(read_foreign(path)) if path.is_file() else side_of_run(read_run(path))


def side_of_run(run: Run) -> Side:
    """A run as one side: its times estimated again from the raw samples, its splits as they were judged.

    Raises RunError for samples that cannot be read.
    """
    document = run.document
    gathered = read_gathered(run.folder, document)
    half_widths = {item.key: item.split_half_widths_s for item in document.evidence}
    readings = document.health.readings
    busy = readings.busy_cores_elsewhere.median if readings and readings.busy_cores_elsewhere else 0.0
    cells = timed_cells(gathered.visits, gathered.looks, busy)
    for row in run.measured:
        if (asked := asked_of(row.key)) in cells:
            cells[asked] = _with_split(cells[asked], row, half_widths.get(row.key, {}))
    ceilings = document.ceilings.ceilings
    return Side(
        name=str(run.folder),
        created=document.created,
        tool=ROOFSCOPE,
        settings=_settings(document),
        cells=cells,
        clock_hz=readings.clock_hz.median if readings and readings.clock_hz else None,
        witness=_witness(ceilings, document.model.dtype, gathered.looks) if ceilings.judges else None,
        is_cpu=document.device.kind == "cpu",
    )


def _witness(ceilings: Ceilings, dtype: str, looks: Sequence[Look]) -> Witness:
    return Witness(
        memory_bytes_per_s=ceilings.memory_bytes_per_s,
        memory_half_width=ceilings.memory_half_width,
        compute_flops_per_s=ceilings.compute_flops_per_s(dtype),
        compute_half_width=ceilings.compute_half_width(dtype),
        roofs_at_unix_s=ceilings.measured_at_unix_s,
        looks=tuple(looks),
    )


def asked_of(key: CellKey) -> Asked:
    """What was asked for in a cell of a run."""
    cell = key.cell
    return Asked(key.phase, cell.batch_size, cell.prompt_len, cell.context_len, cell.engine)


def timed_cells(
    visits: Mapping[Cell, Sequence[Visit]], looks: Sequence[Look] = (), busy_elsewhere: float = 0.0
) -> dict[Asked, Timed]:
    """The time of every cell from its visits, by today's rules; without its split.

    `busy_elsewhere` are cores that others kept busy over the whole run: they count where visits were too short to see.
    """
    samples = {key: phase_samples(key.phase, known) for cell, known in visits.items() if known for key in cell.keys}
    spreads: dict[Phase, Spread] = {
        phase: spread_of(
            (phase_medians(phase, visits[key.cell]) for key in samples if key.phase == phase), swing(looks)
        )
        for phase in PHASES
    }
    return {
        asked_of(key): _timed(visits[key.cell], of_cell, spreads[key.phase], busy_elsewhere)
        for key, of_cell in samples.items()
        if any(of_cell)
    }


def _timed(
    visits: Sequence[Visit], samples: Sequence[tuple[float, ...]], spread: Spread, busy_elsewhere: float
) -> Timed:
    time_s = estimate(samples, spread)
    busy = [(visit.foreign_cores, visit.wall_s) for visit in visits if visit.foreign_cores is not None]
    watched_s = sum(wall_s for _, wall_s in busy)
    return Timed(
        median_s=time_s.median_s,
        low_s=time_s.low_s,
        high_s=time_s.high_s,
        visits=len(samples),
        drift=spread.drift,
        visit_s=sum(visit.wall_s for visit in visits) / len(visits),
        foreign_cores=sum(cores * wall_s for cores, wall_s in busy) / watched_s if watched_s else busy_elsewhere,
    )


def _with_split(timed: Timed, row: CellResult, half_widths_s: Mapping[str, float]) -> Timed:
    terms = {name: getattr(row, name) for name in TERMS}
    # The split is of the time as it was judged then; what today's rules make of that time is not explained.
    terms["unexplained_s"] += timed.median_s - row.latency_s
    known = all(map(math.isfinite, terms.values()))
    return replace(timed, terms=terms if known else {}, half_widths_s=half_widths_s)


def _settings(document: RunDocument) -> dict[str, str]:
    """Everything that two runs may differ in, what decides most first.

    A folder's or a GGUF file's name is no identity, since a model before and after a change have one each.
    """
    model, device, engine = document.model, document.device, document.engine
    named = model.kind in ("card", "hub")
    settings = {
        "model" if named else "model's name": model.id,
        "parameters": str(model.params),
        "architecture": model.architecture,
        "device": device.name,
        **({PROCESSOR: NOT_TOLD} if device.kind == "cpu" else {}),
        "revision": model.revision or "-",
        "precision": model.precision,
        "compute dtype": model.compute_dtype,
        "double quantisation": _yes(model.double_quant),
        "weights": model.weights,
        "attention": model.attention,
        "engine": ", ".join(engine.names),
        "threads": str(device.threads),
        "offloaded": ", ".join(sorted(model.offloaded_bytes)) or "nothing",
        "new tokens": str(document.grid.new_tokens),
    }
    for where, path in document.counting.paths.items():
        settings |= {f"{where}: {name}": str(value) for name, value in asdict(path).items()}
    settings |= {name: version for name, version in document.software.items() if name != "system"}
    settings["system"] = document.software.get("system", "-")
    known = {name: value for name, value in document.health.settings.items() if name != PROCESSOR or value}
    settings |= {name: str(value) for name, value in known.items()}
    settings["roofscope"] = document.roofscope
    settings["last-level cache"] = scaled(device.last_level_cache_bytes, "B")
    settings["instructions"] = device.compute_capability
    settings["memory"] = scaled(device.memory_bytes, "B")
    settings["budget"] = f"{engine.budget_s:g} s"
    return settings


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def side_of_file(file: ForeignFile) -> Side:
    """Another tool's file as one side; what names no shape is left out.

    Raises RequestError for two figures of one shape that nothing tells apart.
    """
    cells: dict[Asked, Timed] = {}
    for figure in file.figures:
        if not figure.has_step:
            continue
        asked, timed = _asked(figure), _foreign(figure)
        if asked in cells:
            times = f"{duration(cells[asked].median_s)} and {duration(timed.median_s)}"
            raise RequestError(
                f"{file.name} holds {asked.name} more than once, {times}, and nothing that tells them apart: keep one."
            )
        cells[asked] = timed
    return Side(file.name, file.created, file.tool, dict(file.settings), cells)


def _asked(figure: Figure) -> Asked:
    """What was asked for: of a server the sequences that it was allowed, however many there came to be."""
    batch_size = figure.cap or figure.batch_size or 1
    prompt_len, context_len = figure.prompt_len or 0, figure.context_len or 0
    return Asked(figure.step_phase, batch_size, prompt_len, context_len, "", figure.settings)


def _foreign(figure: Figure) -> Timed:
    """A foreign figure's time, of a decode that of a token; each repetition of it is a visit of its own.

    How far another tool's repetitions lie apart they alone tell: two or three that agree by luck claim nothing, which
    is what Student's t is for (Biometrika 6, 1908, 1-25). One without a spread is known no better than one visit with
    the usual spread, and none at all stands behind a spread of nobody knows how many repetitions. What a file rounds is
    known no better than to half of its last digit.
    """
    middle, visits = figure.seconds, figure.repeats
    low, high = middle - figure.half_width_s, middle + figure.half_width_s
    if len(figure.samples_s) > 1:
        time_s = estimate([[value] for value in figure.samples_s])
        middle, visits = time_s.median_s, len(figure.samples_s)
        half = student_t(visits - 1) * stdev(figure.samples_s) / math.sqrt(visits)
        low, high = min(time_s.low_s, middle - half), max(time_s.high_s, middle + half)
    elif not figure.half_width_s or not figure.repeats:
        low, high = min(low, middle * _ONCE.low_s), max(high, middle * _ONCE.high_s)
        visits = int(figure.repeats == 1)
    low, high = max(low - figure.rounding_s, 0.01 * middle), high + figure.rounding_s
    tokens = figure.step_tokens
    return Timed(middle / tokens, low / tokens, high / tokens, visits)


_ONCE = estimate([[1.0]])
"""A time that was measured once, as a share of it."""
