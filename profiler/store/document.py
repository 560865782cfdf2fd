"""run.json: the facts that are not samples, and what was judged from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pydantic import TypeAdapter

from profiler.data.links import Link
from profiler.facts.measurements import Activity, AfterIdle, FreshStart, Quality
from profiler.facts.roofs import Ceilings, CurvePoint, HostPace, Roof, WeightReadRoof
from profiler.facts.run_facts import DeviceFacts, ModelFacts
from profiler.facts.scheduler import OwnedModel
from profiler.facts.step import ExecutionPath
from profiler.facts.telemetry import TelemetrySummary
from profiler.grid.cells import Grid, Phase
from profiler.grid.ragged import Ragged
from profiler.judge.cells import CellEvidence, EngineDifference, Keyed, columns_of
from profiler.judge.engine_differences import GenerateOverhead
from profiler.judge.module_times import GroupTime
from profiler.judge.padding import RaggedStep
from profiler.judge.scaling import DoublingTest
from profiler.judge.stragglers import RankStep


@dataclass(frozen=True)
class GridRecord:
    """What was asked for."""

    prompt_lens: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    context_lens: tuple[int, ...]
    new_tokens: int
    ragged: Ragged | None = None
    """The unequal prompts, in the order in which they come; `prompt_lens` are the longest of each batch then."""


@dataclass(frozen=True)
class CeilingsRecord:
    """The roofs of a run in figures; their samples are in samples.jsonl."""

    compute: Mapping[str, Roof]
    memory: Mapping[str, Roof]
    stream_bytes: int
    beyond_cache: bool
    memory_bytes_per_s: float | None
    """The memory roof; null where none is known."""
    dispatch_s: Mapping[str, Mapping[Phase, Mapping[int, float]]] = field(default_factory=dict)
    """Seconds to dispatch a step, by engine, phase and batch size."""
    curve: tuple[CurvePoint, ...] = ()
    launch: Mapping[str, float] = field(default_factory=dict)
    page_fault_s: float = 0.0
    links: Mapping[str, Roof] = field(default_factory=dict)
    collective: Link | None = None
    host: HostPace | None = None
    measured_s: float = 0.0
    measured_at_unix_s: float = 0.0
    weights: WeightReadRoof | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    """What could not be measured, by name, each with the reason."""

    def compute_roof(self, dtype: str) -> Roof | None:
        """The roof of a dtype, or the highest that was measured; None without any."""
        return self.compute.get(dtype) or max(self.compute.values(), key=lambda roof: roof.per_s, default=None)

    @property
    def ceilings(self) -> Ceilings:
        """The roofs as values to judge with."""
        return Ceilings(**{item.name: getattr(self, item.name) for item in fields(Ceilings)})


@dataclass(frozen=True)
class EngineRecord:
    """How the model was stepped."""

    names: tuple[str, ...]
    budget_s: float
    instrument_s_per_step: float | None = None
    """What one mark of the clock costs."""
    replay_as_graph: tuple[str, ...] = ()
    """Engines whose decode step is one launch of recorded work."""
    generate: tuple[str, ...] = ()
    """Engines that are transformers' own `generate`."""
    owned: Mapping[str, OwnedModel] = field(default_factory=dict)
    """Of the engines that own their model."""
    graph_breaks: Mapping[str, int] = field(default_factory=dict)
    graph_skips: Mapping[str, int] = field(default_factory=dict)
    """Compiled pieces that ran without the CUDA graph asked for."""
    preparation_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each engine spent on compiling or capturing, over all its shapes."""
    differences: tuple[EngineDifference, ...] = ()


@dataclass(frozen=True)
class CountingRecord:
    """What was counted, and how the model is executed here."""

    coverage: float
    """Share of the parameters that the operators account for."""
    unknown: tuple[str, ...] = ()
    paths: Mapping[str, ExecutionPath] = field(default_factory=dict)
    """By `engine phase`."""


@dataclass(frozen=True)
class HealthRecord:
    """What the device reported, and what it is set to."""

    readings: TelemetrySummary | None = None
    not_seen: tuple[str, ...] = ()
    idle_power_w: float | None = None
    settings: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Missing:
    """A part of a run that failed, while the run went on."""

    what: str
    """The part: `dispatch`, `the replays`."""
    why: str
    """The first line of the error."""
    effect: str
    """What that means for the figures."""

    @property
    def sentence(self) -> str:
        return f"{self.what} failed ({self.why}): {self.effect}."


@dataclass(frozen=True)
class ActivityRecord(Keyed):
    """What ran during one traced step."""

    kernels: int
    busy_s: float
    gaps: int
    gap_s: float
    longest_s: float
    busy_share: float

    @classmethod
    def of(cls, activity: Activity) -> ActivityRecord:
        return cls(
            **columns_of(activity.key),
            kernels=activity.kernels,
            busy_s=activity.busy_s,
            gaps=activity.gaps,
            gap_s=activity.gap_s,
            longest_s=activity.longest_s,
            busy_share=activity.busy_share,
        )


@dataclass(frozen=True)
class RunDocument:
    """run.json: the facts that are not samples, and below them what was judged."""

    schema_version: int
    roofscope: str
    created: str
    command: str
    model: ModelFacts
    device: DeviceFacts
    software: Mapping[str, str]
    ceilings: CeilingsRecord
    grid: GridRecord
    engine: EngineRecord
    counting: CountingRecord
    ranks: int = 1
    """Processes that share the model, one a card; all figures of operators and memory are one rank's."""
    rank_steps: tuple[RankStep, ...] = ()
    """What the ranks' own shares take, and what that and the link predict."""
    looked_inside: bool = False
    """Whether it was asked where inside a step the time goes; hooks set to explain a residual do not tell."""
    stage_s: Mapping[str, float] = field(default_factory=dict)
    """Where the run's wall time went, by stage."""
    set_up_warnings: tuple[str, ...] = ()
    """What was to be warned of before the first figure."""
    missing_facts: tuple[str, ...] = ()
    """What an older version did not keep, so that it cannot be judged again."""
    missing: tuple[Missing, ...] = ()
    """Parts of the run that failed; its step times do not need them."""
    finished: bool = False
    ended_by: str = ""
    """What ended it early, where that was neither a user nor a kill."""
    health: HealthRecord = HealthRecord()
    evidence: tuple[CellEvidence, ...] = ()
    scaling: tuple[DoublingTest, ...] = ()
    breakdown: tuple[GroupTime, ...] = ()
    activity: tuple[ActivityRecord, ...] = ()
    quality: Quality | None = None
    generate: tuple[GenerateOverhead, ...] = ()
    ragged: tuple[RaggedStep, ...] = ()
    fresh_starts: tuple[FreshStart, ...] = ()
    after_silence: tuple[AfterIdle, ...] = ()
    answer: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def asked(self) -> Grid:
        """The grid of the run."""
        grid = self.grid
        return Grid(
            grid.prompt_lens, grid.batch_sizes, grid.new_tokens, grid.context_lens, self.engine.names, grid.ragged
        )


_ADAPTER = TypeAdapter(RunDocument)
_EVIDENCE = TypeAdapter(CellEvidence)
_NO_SAMPLES = {"__all__": {"seconds"}}
_LEFT_OUT: Any = {
    "ceilings": {
        **dict.fromkeys(("compute", "memory", "links"), _NO_SAMPLES),
        "weights": {"roof": {"seconds"}},
        "host": {"seconds"},
    }
}


def document_json(document: RunDocument) -> bytes:
    """The text of run.json, in UTF-8."""
    return b"".join(document_parts(document))


def document_parts(document: RunDocument) -> Iterator[bytes]:
    """The text of run.json part by part: a large run has tens of megabytes of evidence."""
    rest = _ADAPTER.dump_json(replace(document, evidence=()), indent=2, exclude=_LEFT_OUT) + b"\n"
    if not document.evidence:
        yield rest
        return
    # No text of JSON holds a line end, so that only a key of the document itself stands behind one and two blanks.
    before, key, after = rest.partition(b'\n  "evidence": [')
    yield before + key
    for number, item in enumerate(document.evidence):
        text = _EVIDENCE.dump_json(item, indent=2).replace(b"\n", b"\n    ")
        yield (b",\n    " if number else b"\n    ") + text
    yield b"\n  " + after


def document_of(content: Mapping[str, Any]) -> RunDocument:
    """The document of a parsed run.json of this version. Raises pydantic's ValidationError."""
    return _ADAPTER.validate_python(content)
