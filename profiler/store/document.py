"""run.json: a run's facts other than samples, and the verdicts derived from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from profiler.facts.ceilings import Ceilings, MeasuredCeilings
from profiler.facts.measurements import Drafting, FormatLinears, KernelTime, Quality
from profiler.facts.run_facts import DeviceFacts, ModelFacts, OwnedModel
from profiler.facts.step import ExecutionPath
from profiler.facts.telemetry import TelemetrySummary
from profiler.fallbacks import Fallback
from profiler.grid.cells import Cell, KeyedRecord, Phase
from profiler.grid.ragged import Ragged
from profiler.json_document import view
from profiler.judge.advice import Advice
from profiler.judge.cell_stages import RaggedStep
from profiler.judge.cells import CellEvidence
from profiler.judge.engine_differences import GenerateOverhead
from profiler.judge.module_times import GroupTime
from profiler.judge.savings import ChangeEffect, EngineDifference
from profiler.judge.scaling import DoublingTest
from profiler.units import each_text, visible

SCHEMA_VERSION = 7
OLDEST_SCHEMA = 6
"""The oldest version that is still read; its keys that left are ignored."""
_NAMES_NOW = {
    "above-roof": "above-ceiling",
    "avoidable_bytes": "redundant_bytes",
    "avoidable_bytes_by_cause": "redundant_bytes_by_cause",
    "avoidable_flops_by_cause": "redundant_flops_by_cause",
    "avoidable_s": "redundant_s",
    "dispatch_s": "overhead_s",
    "int32 matmuls": "int32 results",
    "int32 products": "int32 results",
    "kernel-bound": "slow-kernels",
    "levers": "changes",
    "roof": "ceiling",
    "roof_s": "ceiling_s",
    "visits": "repetitions",
}
"""Keys and values of run.json, samples.jsonl and operators.csv, and columns of the CSV files, before 0.5.0."""


def name_now(name: str) -> str:
    return _NAMES_NOW.get(name, name)


def content_now(content: Any) -> Any:
    """Return parsed JSON with the names of today, and with texts that are safe to show."""
    return each_text(content, lambda text: name_now(visible(text)))


@dataclass(frozen=True)
class LargerGrid:
    """The next larger default grid, for which there was too little time or memory."""

    prompt_lens: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    budget_s: float | None
    """The budget that is expected to measure it; null if it does not fit into memory."""


@dataclass(frozen=True)
class GridRecord:
    """The grid that the user requested."""

    prompt_lens: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    context_lens: tuple[int, ...]
    new_tokens: int
    ragged: Ragged | None = None
    """Unequal prompt lengths, in queue order; `prompt_lens` then lists the longest of each batch."""
    prompts: str | None = None
    """The file of real prompts, without its folder; null if tokens were random. Its text is not stored."""
    prompts_digest: str | None = None
    """A short hash of their tokens."""
    prefix: int = 0
    """The first tokens of every prompt, which were cached before it: only in runs of older versions."""
    unreached: tuple[Cell, ...] = ()
    """Cells of a default grid that the budget did not reach; they have no row."""
    larger: LargerGrid | None = None
    """Null if the grid was named, or is the largest default grid."""


@dataclass(frozen=True)
class CeilingsRecord(MeasuredCeilings):
    """The measured ceilings of a run, without their samples, which are in samples.jsonl."""

    memory_bytes_per_s: float | None = field(kw_only=True)
    """The memory ceiling; null if unknown."""
    overhead_s: Mapping[str, Mapping[Phase, Mapping[int, float]]] = field(default_factory=dict)
    """Seconds to launch a step, by engine, phase and batch size."""
    full_clock: Mapping[str, float] = field(default_factory=dict)
    """FLOP/s by dtype of a GPU before it reached its power limit, where they are clearly above the ceiling."""

    @property
    def ceilings(self) -> Ceilings:
        """The ceilings without the record's extra fields, as the judgement takes them."""
        return view(Ceilings, self)


@dataclass(frozen=True)
class EngineRecord:
    """The engines that stepped the model, and how."""

    names: tuple[str, ...]
    budget_s: float | None
    """Seconds from the start of the run to its answer, without loading; null where a whole grid was measured."""
    instrument_s_per_step: float | None = None
    """Seconds that reading the clock adds to a step."""
    replay_as_graph: tuple[str, ...] = ()
    """Engines that replay a decode step as one recorded graph."""
    generate: tuple[str, ...] = ()
    """Engines that call transformers' `generate`."""
    owned: Mapping[str, OwnedModel] = field(default_factory=dict)
    """The engines that load the model themselves, by name."""
    graph_breaks: Mapping[str, int] = field(default_factory=dict)
    graph_skips: Mapping[str, int] = field(default_factory=dict)
    """Compiled regions that ran without the requested CUDA graph, by engine."""
    preparation_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each engine spent compiling or capturing, summed over all shapes."""
    differences: tuple[EngineDifference, ...] = ()


@dataclass(frozen=True)
class CountingRecord:
    """How complete the operator count is, and how each engine executes the model."""

    coverage: float
    """Share of the parameters that the counted operators cover."""
    unknown: tuple[str, ...] = ()
    paths: Mapping[str, ExecutionPath] = field(default_factory=dict)
    """By `engine phase`."""


@dataclass(frozen=True)
class HealthRecord:
    """The device's telemetry and its settings."""

    readings: TelemetrySummary | None = None
    not_seen: tuple[str, ...] = ()
    idle_power_w: float | None = None
    settings: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Missing:
    """A part of a run that failed, or was cut by the budget, without ending the run."""

    what: str
    """The name of the part, such as `overhead` or `the replays`."""
    why: str
    """The first line of the error."""
    effect: str
    """What its absence means for the figures."""
    cut: bool = False
    """Whether the budget ended it, not an error."""

    @property
    def sentence(self) -> str:
        return f"{self.what} {'was cut' if self.cut else 'failed'} ({self.why}): {self.effect}."


@dataclass(frozen=True)
class ActivityRecord(KeyedRecord):
    """GPU activity during one traced step."""

    kernels: int
    busy_s: float
    gaps: int
    gap_s: float
    longest_s: float
    busy_share: float
    median_s: float | None = None
    longest: tuple[KernelTime, ...] = ()


@dataclass(frozen=True)
class ExpertsRecord(KeyedRecord):
    """The distinct experts that real prompts use in one step: means over layers and steps."""

    touched: float
    expected: float
    """The number that the counts use, if every expert is chosen equally often."""
    experts: int
    """All routed experts of a layer."""


@dataclass(frozen=True)
class RunDocument:
    """The content of run.json: facts other than samples, then verdicts."""

    schema_version: int
    """The version of this document; a newer one has a larger number."""
    roofscope: str
    """The version of roofscope that wrote the run."""
    created: str
    """When the run started, in UTC, as ISO 8601."""
    command: str
    """The command line of the run."""
    model: ModelFacts
    """The model as it was loaded: parameters, dtype, format, placement."""
    device: DeviceFacts
    """The device, with its datasheet if it has one."""
    software: Mapping[str, str]
    """Versions of Python, torch, transformers and others, and variables of the environment, by name."""
    ceilings: CeilingsRecord
    """The measured ceilings."""
    grid: GridRecord
    """The requested lengths and batch sizes."""
    engine: EngineRecord
    """The engines, and how they differ."""
    counting: CountingRecord
    """How complete the count of operators is, and how each engine executes the model."""
    ranks: int = 1
    """Processes that share the model, one per GPU; operators and memory are those of one rank."""
    looked_inside: bool = False
    """Whether the user requested times by module; hooks that only explain a residual do not count."""
    stage_s: Mapping[str, float] = field(default_factory=dict)
    """Wall time of the run, by stage."""
    set_up_warnings: tuple[str, ...] = ()
    """Warnings that were known before the first measurement."""
    missing: tuple[Missing, ...] = ()
    """Parts of the run that failed or were cut; the step times do not depend on them."""
    fallbacks: tuple[Fallback, ...] = ()
    """Slower code that ran because a library lacks a package or a kernel, as the library warned."""
    finished: bool = False
    """Whether the run ended by itself."""
    ended_by: str = ""
    """The reason for an early end, other than the user or a kill."""
    health: HealthRecord = HealthRecord()
    """Telemetry of the device, and its settings."""
    evidence: tuple[CellEvidence, ...] = ()
    """The verdict of each cell, with its signals and changes."""
    scaling: tuple[DoublingTest, ...] = ()
    """How the time grows with each doubling of batch, prompt or context."""
    breakdown: tuple[GroupTime, ...] = ()
    """Times by group of modules, where they were measured."""
    activity: tuple[ActivityRecord, ...] = ()
    """GPU activity during traced steps."""
    quality: Quality | None = None
    """How much the answers of a quantised model differ; null unless it was requested."""
    drafting: Drafting | None = None
    """Answers with and without drafts (speculative decoding); null unless it was requested."""
    format_linears: FormatLinears | None = None
    """All linears of a decode step in each format, without the host; null if they were not timed."""
    generate: tuple[GenerateOverhead, ...] = ()
    """The overhead of transformers' `generate`, by cell."""
    ragged: tuple[RaggedStep, ...] = ()
    """Padding and waiting of unequal prompts, by cell."""
    experts_touched: tuple[ExpertsRecord, ...] = ()
    """Distinct experts that real prompts use, by cell."""
    answer: tuple[str, ...] = ()
    """The sentences of the answer."""
    advised: tuple[Advice, ...] = ()
    """The changes that the answer advises: lines that were executed, and what they did."""
    not_tried: tuple[ChangeEffect, ...] = ()
    """The changes that the answer names without having tried them, with their computed savings."""
    warnings: tuple[str, ...] = ()
    """What may be wrong with the figures, in sentences."""
    remarks: tuple[str, ...] = ()
    """Those of the warnings that change no conclusion, since the verdicts already take them into account."""

    @property
    def failed(self) -> tuple[Missing, ...]:
        """Parts that an error ended, not the budget."""
        return tuple(part for part in self.missing if not part.cut)


RUN_DOCUMENT = TypeAdapter(RunDocument)
_LEFT_OUT: Any = {
    "ceilings": {
        **{name: {"__all__": {"seconds"}} for name in ("compute", "memory", "links")},
        "weights": {"ceiling": {"seconds"}},
        "host": {"seconds"},
    }
}


def document_json(document: RunDocument) -> bytes:
    return RUN_DOCUMENT.dump_json(document, indent=2, exclude=_LEFT_OUT) + b"\n"
