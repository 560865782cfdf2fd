"""One side of a comparison: a run or another tool's file, its settings and its timed cells."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import stdev
from typing import Literal, NamedTuple

from profiler.errors import RequestError
from profiler.facts.roofs import Ceilings, DriftReading, swing
from profiler.facts.visits import Visit, phase_medians, phase_samples
from profiler.grid.cells import PHASES, Cell, CellKey, Phase
from profiler.judge.breakdown import TERMS
from profiler.judge.cells import CellResult
from profiler.readers.detect import read_foreign
from profiler.readers.figures import Figure, ForeignFile
from profiler.stats import VisitSpread, estimate, spread_of, student_t
from profiler.store.document import RunDocument
from profiler.store.folder import Run, read_gathered, read_run
from profiler.units import duration, scaled

Weight = Literal["refuses", "explains", "context"]
"""What a difference means: the two are not to be compared, it may explain a change, or it hardly matters."""

PROCESSOR, NOT_TOLD = "processor", "not told"
"""A CPU's family and model, which older runs do not tell: several have one name, such as AMD EPYC."""

_REFUSING = ("model", "parameters", "architecture", "device", PROCESSOR)
_CONTEXT = ("memory", "budget")
# Clocks of one card differ by a few MHz from look to look.
_CLOCK_TOLERANCE = 0.02


class CellId(NamedTuple):
    """What was asked for: never a column that the number of new tokens shifts."""

    phase: Phase
    batch_size: int
    prompt_len: int
    context_len: int
    """Cached tokens before the step: 0 where a prompt was prefilled."""
    engine: str = ""
    """Empty where the sides have no engine in common."""
    settings: tuple[tuple[str, str], ...] = ()
    """What else tells cells of one side apart, by name: another tool's file may hold a sweep of threads."""

    @property
    def depth(self) -> int:
        """Tokens in the cache when decoding begins, or the prompt."""
        return self.prompt_len or self.context_len

    @property
    def name(self) -> str:
        """`decode 1 x 512 (static)`, `decode 1 x 512, threads 2`."""
        engine = f" ({self.engine})" if self.engine not in ("", "eager") else ""
        settings = "".join(f", {name} {value}" for name, value in self.settings)
        return f"{self.phase} {self.batch_size} x {self.depth}{engine}{settings}"


@dataclass(frozen=True, slots=True)
class Timed:
    """One cell's time on one side."""

    median_s: float
    low_s: float
    high_s: float
    """Its 95 % interval; the median itself, twice, where nothing is known of its spread."""
    visits: int
    """0 where another tool's file does not tell how often it was measured, or how far that lay apart."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """The split in seconds; empty where it is not known."""
    half_widths_s: Mapping[str, float] = field(default_factory=dict)
    drift: float = 0.0
    """One standard deviation of what all cells of the run did together, as a share: more cells do not average it."""
    visit_s: float = 0.0
    """Wall seconds of one visit."""
    foreign_cores: float = 0.0
    """CPU cores that others kept busy meanwhile."""


@dataclass(frozen=True)
class MachineState:
    """What one run knows of its machine, apart from its cells: the roofs and the same small work again and again."""

    memory_bytes_per_s: float
    memory_half_width: float
    compute_flops_per_s: float
    compute_half_width: float
    roofs_at_unix_s: float
    """When the roofs were measured: two runs of a day may share them."""
    looks: tuple[DriftReading, ...] = ()


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a run folder, or a file of another tool."""

    name: str
    created: str
    tool: str
    settings: Mapping[str, str]
    """Everything that two sides may differ in, by name, the most telling first."""
    cells: Mapping[CellId, Timed]
    clock_hz: float | None = None
    witness: MachineState | None = None
    is_cpu: bool = True

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines of its cells, in their order."""
        return tuple(dict.fromkeys(asked.engine for asked in self.cells))


@dataclass(frozen=True)
class SettingDifference:
    """Something that is not the same on both sides."""

    name: str
    before: str
    after: str
    weight: Weight

    @property
    def words(self) -> str:
        """`transformers 5.22.0 -> 5.23.0`."""
        return f"{self.name} {self.before} -> {self.after}"


def differences(before: Side, after: Side) -> tuple[SettingDifference, ...]:
    """What is not the same on both sides: what refuses a comparison first, then what may explain a change."""
    found = [
        _difference(name, before.settings[name], after.settings[name])
        for name in before.settings
        if name in after.settings and before.settings[name] != after.settings[name]
    ]
    if before.clock_hz and after.clock_hz and abs(after.clock_hz / before.clock_hz - 1) > _CLOCK_TOLERANCE:
        found.append(SettingDifference("clock", _mhz(before.clock_hz), _mhz(after.clock_hz), "explains"))
    order = ("refuses", "explains", "context")
    return tuple(sorted(found, key=lambda item: order.index(item.weight)))


def _difference(name: str, before: str, after: str) -> SettingDifference:
    weight: Weight = "context" if name in _CONTEXT else "explains"
    if name in _REFUSING and NOT_TOLD not in (before, after):
        weight = "refuses"
    return SettingDifference(name, before, after, weight)


def _mhz(clock_hz: float) -> str:
    return f"{clock_hz / 1e6:.0f} MHz"


def aligned(sides: Sequence[Side]) -> list[Mapping[CellId, Timed]]:
    """The cells of each side by keys that all of them share.

    Where no engine is common, as for two tools, each side stands with its first one. Other tools know no difference
    between a cache that a prompt has filled and one that was filled directly: with one of them, depth alone counts.
    Settings that differ within one side tell the cells of all of them apart.
    """
    common = set.intersection(*(set(side.engines) for side in sides))
    by_depth = len({side.tool for side in sides}) > 1 or any(side.tool != "roofscope" for side in sides)
    swept = tuple(dict.fromkeys(name for side in sides for asked in side.cells for name, _ in asked.settings))
    return [dict(_keyed(side, bool(common), by_depth, swept)) for side in sides]


def _keyed(side: Side, by_engine: bool, by_depth: bool, swept: Sequence[str]) -> Iterator[tuple[CellId, Timed]]:
    engines = side.engines if by_engine else side.engines[:1]
    for asked, timed in side.cells.items():
        if asked.engine not in engines:
            continue
        prompted = asked._replace(prompt_len=asked.depth, context_len=0)
        # Where this side has both of one depth, the one that was filled directly stays what it is.
        if by_depth and asked.phase == "decode" and prompted not in side.cells:
            asked = prompted
        if swept:
            told = {**side.settings, **dict(asked.settings)}
            asked = asked._replace(settings=tuple((name, told.get(name, NOT_TOLD)) for name in swept))
        yield asked if by_engine else asked._replace(engine=""), timed


def in_order(keys: Sequence[CellId]) -> list[CellId]:
    """By phase, engine, batch and depth, as a table's rows stand."""
    return sorted(keys, key=lambda key: (PHASES.index(key.phase), key.engine, key.batch_size, key.depth, key.settings))


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
        if (asked := cell_id(row.key)) in cells:
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


def _witness(ceilings: Ceilings, dtype: str, looks: Sequence[DriftReading]) -> MachineState:
    return MachineState(
        memory_bytes_per_s=ceilings.memory_bytes_per_s,
        memory_half_width=ceilings.memory_half_width,
        compute_flops_per_s=ceilings.compute_flops_per_s(dtype),
        compute_half_width=ceilings.compute_half_width(dtype),
        roofs_at_unix_s=ceilings.measured_at_unix_s,
        looks=tuple(looks),
    )


def cell_id(key: CellKey) -> CellId:
    """What was asked for in a cell of a run."""
    cell = key.cell
    return CellId(key.phase, cell.batch_size, cell.prompt_len, cell.context_len, cell.engine)


def timed_cells(
    visits: Mapping[Cell, Sequence[Visit]], looks: Sequence[DriftReading] = (), busy_elsewhere: float = 0.0
) -> dict[CellId, Timed]:
    """The time of every cell from its visits, by today's rules; without its split.

    `busy_elsewhere` are cores that others kept busy over the whole run: they count where visits were too short to see.
    """
    samples = {key: phase_samples(key.phase, known) for cell, known in visits.items() if known for key in cell.keys}
    spreads: dict[Phase, VisitSpread] = {
        phase: spread_of(
            (phase_medians(phase, visits[key.cell]) for key in samples if key.phase == phase), swing(looks)
        )
        for phase in PHASES
    }
    return {
        cell_id(key): _timed(visits[key.cell], of_cell, spreads[key.phase], busy_elsewhere)
        for key, of_cell in samples.items()
        if any(of_cell)
    }


def _timed(
    visits: Sequence[Visit], samples: Sequence[tuple[float, ...]], spread: VisitSpread, busy_elsewhere: float
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
    cells: dict[CellId, Timed] = {}
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


def _asked(figure: Figure) -> CellId:
    """What was asked for: of a server the sequences that it was allowed, however many there came to be."""
    batch_size = figure.cap or figure.batch_size or 1
    prompt_len, context_len = figure.prompt_len or 0, figure.context_len or 0
    return CellId(figure.step_phase, batch_size, prompt_len, context_len, "", figure.settings)


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
