"""One side of a comparison: a run or another tool's file, its settings and its timed cells."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import stdev
from typing import Literal

from profiler.device.device import ENVIRONMENT
from profiler.errors import RequestError
from profiler.facts.ceilings import Ceiling, DriftReading, swing
from profiler.facts.repetitions import foreign_cores, phase_samples, repetition_spreads
from profiler.grid.cells import PHASES, CellKey, Phase
from profiler.judge.breakdown import TERMS
from profiler.readers.detect import read_foreign
from profiler.readers.figures import Figure, ForeignFile
from profiler.stats import Estimate, estimate, student_t
from profiler.store.document import RunDocument
from profiler.store.folder import Run, read_gathered, read_run
from profiler.units import duration, scaled, significant

Resource = Literal["memory", "compute"]

PROCESSOR, NOT_RECORDED = "processor", "not recorded"
"""A CPU's family and model, which older runs did not record; several CPUs have one name, such as AMD EPYC."""

NEW_TOKENS, GPUS = "new tokens", "tp_size"
ROOFSCOPE = "roofscope"

_REFUSING = ("model", "parameters", "architecture", "device", PROCESSOR)
_CONTEXT = ("memory", "budget")
# Readings of one GPU's clock differ by a few MHz.
_CLOCK_TOLERANCE = 0.02


@dataclass(frozen=True)
class MatchKey:
    """What cells of several sides must share to be compared; not their new tokens, which other tools' files lack."""

    phase: Phase
    """`prefill` or `decode`."""
    batch_size: int
    """Sequences per batch."""
    prompt_len: int
    """Prompt tokens per sequence."""
    context_len: int
    """Cached tokens before the step; 0 if a prompt was prefilled."""
    engine: str
    """Empty if the sides have no engine in common."""
    settings: Sequence[tuple[str, str]]
    """(name, value) of settings that differ between cells of one side, such as a sweep of threads in a file."""

    @property
    def depth(self) -> int:
        """Tokens in the cache after the prefill: of the prompt, and of a prefix that was cached before."""
        return self.prompt_len + self.context_len

    @property
    def name(self) -> str:
        """`decode 1 x 512 (static)`, `decode 1 x 512, threads 2`, `prefill 1 x 512, 448 cached`."""
        engine = f" ({self.engine})" if self.engine not in ("", "eager") else ""
        settings = "".join(f", {name} {value}" for name, value in self.settings)
        cached = f", {self.context_len} cached" if self.phase == "prefill" and self.context_len else ""
        return f"{self.phase} {self.batch_size} x {self.depth}{cached}{engine}{settings}"


@dataclass(frozen=True, slots=True)
class CellTime:
    """The time of one cell on one side."""

    time: Estimate
    """Both ends of its interval equal the median if its spread is unknown."""
    repetitions: int
    """Repetitions, or another tool's runs: 2 if only their spread is known, 0 if neither is."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Time breakdown in seconds; empty if it is not known."""
    half_widths_s: Mapping[str, float] = field(default_factory=dict)
    """Half width of each term's 95 % interval."""
    drift: float = 0.0
    """Standard deviation of the drift that all cells of the run share, as a share; more cells do not average it out."""
    repetition_s: float = 0.0
    """Wall time of one repetition; 0 if it is not known."""
    foreign_cores: float = 0.0
    """CPU cores that other processes kept busy during the repetitions."""
    is_foreign: bool = False
    """Whether another tool measured it, whose repetitions are whole runs."""
    new_tokens: int | None = None
    """Tokens per sequence that another tool generated; None if its file does not say."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a run folder, or another tool's file."""

    name: str
    created: str
    tool: str
    settings: Mapping[str, str]
    """Settings that two sides may differ in, by name, the most important first."""
    cells: Mapping[MatchKey, CellTime]
    clock_hz: float | None = None
    ceilings: Mapping[Resource, Ceiling] = field(default_factory=dict)
    """The measured ceilings of a run's machine; empty for another tool's file, and for a run without one of them."""
    ceilings_at_unix_s: float = 0.0
    """When the ceilings were measured; two runs of one day may share them."""
    drift_readings: Sequence[DriftReading] = ()
    """The readings of a run's drift probe."""
    is_cpu: bool = True
    command: str = ""
    """The command that repeats a run; empty for another tool's file."""
    remarks: tuple[str, ...] = ()
    """Sentences about another tool's file: what was left out, and what its reader should know first."""

    @property
    def engines(self) -> tuple[str, ...]:
        """The distinct engines of the cells, in order of appearance."""
        return tuple(dict.fromkeys(cell.engine for cell in self.cells))


@dataclass(frozen=True)
class SettingDifference:
    """A setting whose value differs between the sides."""

    name: str
    before: str
    after: str
    # It forbids a comparison, may explain a change, or hardly matters.
    weight: Literal["refuses", "explains", "context"]

    @property
    def refuses(self) -> bool:
        return self.weight == "refuses"

    @property
    def words(self) -> str:
        """`transformers 5.22.0 -> 5.23.0`."""
        return f"{self.name} {self.before} -> {self.after}"


def differences(before: Side, after: Side) -> tuple[SettingDifference, ...]:
    """Settings that differ between the sides: first those that forbid a comparison, then those that may explain it."""
    items = []
    for name, first in before.settings.items():
        second = after.settings.get(name, first)
        refuses = name in _REFUSING and NOT_RECORDED not in (first, second)
        if first != second:
            items.append(
                SettingDifference(
                    name,
                    first,
                    second,
                    weight="refuses" if refuses else "context" if name in _CONTEXT else "explains",
                )
            )
    if before.clock_hz and after.clock_hz and abs(after.clock_hz / before.clock_hz - 1) > _CLOCK_TOLERANCE:
        first, second = (f"{clock_hz / 1e6:.0f} MHz" for clock_hz in (before.clock_hz, after.clock_hz))
        items.append(SettingDifference("clock", first, second, "explains"))
    return tuple(sorted(items, key=lambda item: ("refuses", "explains", "context").index(item.weight)))


def aligned(*sides: Side) -> list[dict[MatchKey, CellTime]]:
    """The cells of each side under keys that are comparable between sides.

    Without a common engine, as for two tools, each side contributes its first engine. Other tools do not distinguish a
    cache that a prompt filled from one that was filled directly, so with them only the depth counts. Settings that
    differ within one side become part of every key.
    """
    common = set.intersection(*(set(side.engines) for side in sides))
    by_depth = any(side.tool != ROOFSCOPE for side in sides)
    swept = tuple(dict.fromkeys(name for side in sides for cell in side.cells for name, _ in cell.settings))
    return [dict(_keyed(side, bool(common), by_depth, swept)) for side in sides]


def _keyed(side: Side, by_engine: bool, by_depth: bool, swept: Sequence[str]) -> Iterator[tuple[MatchKey, CellTime]]:
    engines = side.engines if by_engine else side.engines[:1]
    for cell, timed in side.cells.items():
        if cell.engine not in engines:
            continue
        prompted = replace(cell, prompt_len=cell.depth, context_len=0)
        # If this side has both cells of one depth, the one whose cache was filled directly keeps its own key.
        if by_depth and cell.phase == "decode" and prompted not in side.cells:
            cell = prompted
        if swept:
            length = {NEW_TOKENS: str(timed.new_tokens)} if timed.new_tokens and cell.phase == "decode" else {}
            settings = {**side.settings, **length, **dict(cell.settings)}
            cell = replace(cell, settings=tuple((name, settings.get(name, NOT_RECORDED)) for name in swept))
        yield cell if by_engine else replace(cell, engine=""), timed


def in_order(keys: Sequence[MatchKey]) -> list[MatchKey]:
    """Sort cells as in the rows of a table: by phase, engine, batch size, depth and settings."""
    return sorted(keys, key=lambda key: (PHASES.index(key.phase), key.engine, key.batch_size, key.depth, key.settings))


def read_side(path: Path, gpus: int = 0) -> Side:
    """Read a run folder or another tool's file as one side of a comparison. Raises RunError or RequestError.

    `gpus` is the number of GPUs that shared each step, for a file that does not say; 0 if it is not known.
    """
    side = side_of_file(read_foreign(path)) if path.is_file() else side_of_run(read_run(path))
    named = side.settings.get(GPUS)
    if gpus and named not in (None, str(gpus)):
        raise RequestError(f"{path} says that {named} GPUs shared each step, not {gpus}; leave out --tp.")
    return replace(side, settings={**side.settings, GPUS: str(gpus)}) if gpus else side


def side_of_run(run: Run) -> Side:
    """Convert a run to one side: times are estimated anew from the samples, time breakdowns are those of the run.

    Raises RunError if the samples cannot be read.
    """
    document = run.document
    gathered = read_gathered(run.folder)
    half_widths = {item.key: item.split_half_widths_s for item in document.evidence}
    readings = document.health.readings
    busy = readings.busy_cores_elsewhere.median if readings and readings.busy_cores_elsewhere else 0.0
    swung = swing(gathered.drift_readings, on_gpu=document.device.kind == "cuda")
    timed = [(key, rows) for cell, rows in gathered.repetitions.items() if rows for key in cell.keys]
    samples = {key: phase_samples(key.phase, rows) for key, rows in timed}
    spreads = repetition_spreads(samples, gathered.repetitions, swung)
    rows = {row.key: row for row in run.measured}
    cells = {}
    for key, cell_samples in samples.items():
        if any(cell_samples):
            repetitions, spread, row = gathered.repetitions[key.cell], spreads[key.phase], rows.get(key)
            time_s, busy_cores = estimate(cell_samples, spread), foreign_cores(repetitions)
            terms = {name: getattr(row, name) for name in TERMS} if row else {}
            if row:
                # The breakdown sums to the run's own estimate, which may differ from the one made from its samples now.
                terms["unexplained_s"] += time_s.median_s - row.latency_s
            cells[match_key(key)] = CellTime(
                time=time_s,
                repetitions=len(cell_samples),
                terms=terms if all(map(math.isfinite, terms.values())) else {},
                half_widths_s=half_widths.get(key, {}) if row else {},
                drift=spread.drift,
                repetition_s=sum(repetition.wall_s for repetition in repetitions) / len(repetitions),
                # For repetitions too short to measure it, that of the whole run.
                foreign_cores=busy if busy_cores is None else busy_cores,
            )
    ceilings, dtype = document.ceilings.ceilings, document.model.dtype
    own: dict[Resource, Ceiling] = {"memory": ceilings.memory_ceiling, "compute": ceilings.compute_ceiling(dtype)}
    return Side(
        name=str(run.folder),
        created=document.created,
        tool=ROOFSCOPE,
        settings=_settings(document),
        cells=cells,
        clock_hz=readings.clock_hz.median if readings and readings.clock_hz else None,
        ceilings=own if ceilings.judges else {},
        ceilings_at_unix_s=ceilings.measured_at_unix_s,
        drift_readings=gathered.drift_readings,
        is_cpu=document.device.kind == "cpu",
        command=document.command,
    )


def match_key(key: CellKey) -> MatchKey:
    """Return what a cell of another side must share with this one to be compared with it."""
    return MatchKey(key.phase, key.cell.batch_size, key.cell.prompt_len, key.cell.context_len, key.cell.engine, ())


def _settings(document: RunDocument) -> dict[str, str]:
    """Settings that two runs may differ in, the most important first."""
    model, device, engine = document.model, document.device, document.engine
    return {
        # The name of a folder or a GGUF file identifies no model.
        "model" if model.kind in ("card", "hub") else "model's name": model.id,
        "parameters": str(model.params),
        "architecture": model.architecture,
        "device": device.name,
        **({PROCESSOR: NOT_RECORDED} if device.kind == "cpu" else {}),
        "revision": model.revision or "-",
        "precision": model.precision,
        "compute dtype": model.compute_dtype,
        "double quantisation": "yes" if model.double_quant else "no",
        "weights": model.weights,
        "prompts": f"{document.grid.prompts} ({document.grid.prompts_digest})" if document.grid.prompts else "random",
        "attention": model.attention,
        "engine": ", ".join(engine.names),
        GPUS: str(document.ranks),
        "threads": str(device.threads),
        "offloaded": ", ".join(sorted(model.offloaded_bytes)) or "nothing",
        NEW_TOKENS: str(document.grid.new_tokens),
        **{
            f"{phase}, {name.replace('_', ' ')}": _words(value)
            for phase, path in document.counting.paths.items()
            for name, value in asdict(path).items()
        },
        **dict.fromkeys(ENVIRONMENT, NOT_RECORDED),
        **{name: version for name, version in document.software.items() if name != "system"},
        "system": document.software.get("system", "-"),
        **{name: str(value) for name, value in document.health.settings.items() if name != PROCESSOR or value},
        "roofscope": document.roofscope,
        "last-level cache": scaled(device.last_level_cache_bytes, "B"),
        "instructions": device.compute_capability,
        "memory": scaled(device.memory_bytes, "B"),
        "budget": "whole grid" if engine.budget_s is None else f"{engine.budget_s:g} s",
    }


def _words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {word}" for key, word in value.items()) or "default"
    return "-" if value is None else str(value)


def side_of_file(file: ForeignFile) -> Side:
    """Convert another tool's file to one side; figures without a shape are left out.

    Raises RequestError if two figures have one shape and no setting distinguishes them.
    """
    steps = [figure for figure in file.figures if figure.covers != "generate"]
    steps = [figure for figure in steps if figure.shape.batch_size and figure.shape.depth is not None]
    lengths: dict[MatchKey, set[int | None]] = {}
    for figure in steps:
        lengths.setdefault(_figure_id(figure), set()).add(figure.shape.new_tokens)
    cells: dict[MatchKey, CellTime] = {}
    for figure in steps:
        key, timed = _figure_id(figure), _foreign(figure)
        if len(lengths[key]) > 1:  # several lengths of a decode, as of llama-bench -n 64,128
            key = replace(key, settings=(*key.settings, (NEW_TOKENS, str(figure.shape.new_tokens or NOT_RECORDED))))
        if key in cells:
            times = f"{duration(cells[key].time.median_s)} and {duration(timed.time.median_s)}"
            raise RequestError(
                f"{file.name} holds {key.name} more than once, {times}, and no setting distinguishes them: keep one."
            )
        cells[key] = timed
    shared: dict[str, set[str]] = {
        NEW_TOKENS: {str(new) for figure in steps if (new := figure.shape.new_tokens)},
        "bits per weight": {significant(8 * each) for figure in steps if (each := figure.weight_bytes)},
    }
    settings = {name: next(iter(values)) for name, values in shared.items() if len(values) == 1}
    if file.gpus:
        settings[GPUS] = str(file.gpus)
    # What its figures show comes before what its settings say.
    return Side(file.name, "", file.tool, {**file.settings, **settings}, cells, remarks=file.remarks)


def _figure_id(figure: Figure) -> MatchKey:
    # For a server the requested batch is its concurrency limit, however many sequences ran.
    shape, batch_size = figure.shape, figure.shape.cap or figure.shape.batch_size or 1
    phase: Phase = "prefill" if figure.covers == "prefill" else "decode"
    return MatchKey(phase, batch_size, shape.prompt_len or 0, shape.context_len or 0, "", figure.settings)


def _foreign(figure: Figure) -> CellTime:
    """The time of another tool's figure, per token for a decode; each of its runs counts as a repetition.

    The spread comes only from the repetitions, so Student's t widens the interval of two or three that agree by chance
    (Biometrika 6, 1908, 1-25). A spread without them proves at least two, and two give the widest interval. A figure
    without a spread gets the interval of one repetition with the usual spread. Rounding adds half of the last digit.
    """
    time = figure.time
    middle, repetitions, samples_s = time.value, int(time.repeats == 1), time.values
    low, high = middle * _ONCE.low_s, middle * _ONCE.high_s
    if time.spread:
        spread_s = min(time.spread, _WIDEST * middle)
        samples_s = (middle - spread_s, middle + spread_s)
    if len(samples_s) > 1:
        time_s = estimate([[value] for value in samples_s])
        middle, repetitions = time_s.median_s, len(samples_s)
        half = student_t(repetitions - 1) * stdev(samples_s) / math.sqrt(repetitions)
        low, high = min(time_s.low_s, middle - half), max(time_s.high_s, middle + half)
    low, high = max(low - time.rounding, 0.01 * middle), high + time.rounding
    tokens = figure.tokens_given or 1.0
    time_s = Estimate(middle / tokens, low / tokens, high / tokens, len(samples_s))
    return CellTime(time_s, repetitions, is_foreign=True, new_tokens=figure.shape.new_tokens)


# A standard deviation as large as the mean is no narrower interval.
_WIDEST = 0.99
_ONCE = estimate([[1.0]])
"""The interval of a time that was measured once, as shares of that time."""
