"""The result of one cell: its row of cells.csv, its evidence, and its levers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, TypedDict

from profiler.facts.measurements import Stepped, Trial
from profiler.facts.operators import Cause, OperatorWork
from profiler.facts.visits import Status
from profiler.grid.cells import CellKey, Phase
from profiler.judge.breakdown import TimeBreakdown
from profiler.judge.regimes import Confidence, Evidence, Flag, Regime, Verdict
from profiler.stats import CLAIM_VISITS, Noise, Undisturbed, undisturbed
from profiler.units import duration

_UNKNOWN = math.nan


@dataclass(frozen=True, slots=True)
class CellResult:
    """One row of cells.csv: a field a column. NaN, None or an empty text where a cell has no such figure."""

    phase: Phase
    """`prefill` or `decode`."""
    batch_size: int
    """Sequences at once."""
    prompt_len: int
    """Prompt tokens of a sequence; 0 where the cache was filled directly."""
    context_len: int
    """Cached tokens at the step: 0 in a prefill, those of the loop's middle step in a decode."""
    new_tokens: int
    """Tokens decoded after the prompt."""
    status: Status
    """`ok`, `oom`, `skipped`, `failed`, or `forecast`: not reached within the budget, and forecast from the others."""
    latency_s: float = _UNKNOWN
    """Median time of the whole prompt, or of one decode step."""
    latency_low_s: float = _UNKNOWN
    """Lower end of its 95 % interval; of a forecast, nine in ten lie within it."""
    latency_high_s: float = _UNKNOWN
    """Upper end of its 95 % interval."""
    samples: int | None = None
    """Prefills or decode steps that were timed."""
    tokens_per_s: float = _UNKNOWN
    """Tokens of all sequences over the time."""
    tokens_per_s_per_seq: float = _UNKNOWN
    """Tokens of one sequence over the time."""
    model_flops: int = 0
    """FLOPs that the algorithm needs."""
    model_bytes: int = 0
    """Bytes that the algorithm needs to move."""
    executed_flops: int = 0
    """FLOPs of the library's path."""
    executed_bytes: int = 0
    """Bytes that the library's path moves."""
    intensity: float = _UNKNOWN
    """Model FLOPs per model byte."""
    flops_per_s: float = _UNKNOWN
    """Model FLOPs over time."""
    bytes_per_s: float = _UNKNOWN
    """Model bytes over time."""
    mfu: float = _UNKNOWN
    """Model FLOPs over time, as a share of the datasheet's dense peak."""
    mbu: float = _UNKNOWN
    """Model bytes over time, as a share of the datasheet's bandwidth."""
    attained: float = _UNKNOWN
    """Share of the measured roofline."""
    floor_s: float = _UNKNOWN
    """The least time of this step here: the operators' roofs and dispatch."""
    weights_s: float = _UNKNOWN
    """Of the split: reading the weights at the memory roof."""
    kv_s: float = _UNKNOWN
    """Of the split: reading and writing the KV cache at the memory roof."""
    compute_s: float = _UNKNOWN
    """Of the split: arithmetic at the compute roof."""
    kernel_s: float = _UNKNOWN
    """Of the split: what the library's kernels lose below their roofs at these shapes."""
    avoidable_s: float = _UNKNOWN
    """Of the split: traffic and work that the algorithm does not need, outside of what was replayed."""
    dispatch_s: float = _UNKNOWN
    """Of the split: what the host adds, where the device does not hide it."""
    unexplained_s: float = _UNKNOWN
    """Of the split: what is left; negative where the other terms are too large."""
    regime: Regime | None = None
    """What bounds the cell."""
    confidence: Confidence | None = None
    """How sure that is."""
    peak_memory_bytes: int | None = None
    """Most memory that was in use."""
    noise: Noise | None = None
    """How quiet the measurement was."""
    engine: str = "eager"
    """How the model was stepped."""
    ttft_s: float = _UNKNOWN
    """Time to first token (prefill)."""
    first_step_s: float = _UNKNOWN
    """The decode step that pays for the first growth of a cache."""
    p90_s: float = _UNKNOWN
    """Nine in ten samples took no longer."""
    p99_s: float = _UNKNOWN
    """99 in 100 samples took no longer."""
    issue_s: float = _UNKNOWN
    """Seconds until the host had submitted a decode step."""
    joules_per_token: float = _UNKNOWN
    """Energy of the device over the tokens of all sequences."""
    device_memory_bytes: float = _UNKNOWN
    """Memory of the device in use after the visits, by all its users (CUDA)."""
    stopped: str | None = None
    """What ended the sampling: `interval` or `budget`."""
    dequantise_s: float = _UNKNOWN
    """Of the split: converting between formats."""
    link_s: float = _UNKNOWN
    """Of the split: what weights that wait on the host or the disk take to cross."""
    generate_s: float = _UNKNOWN
    """Of the split: what transformers' `generate` adds to the same step of our own loop."""
    engine_s: float = _UNKNOWN
    """Of the split: what an engine that owns its model adds to what the work demands."""
    padding_s: float = _UNKNOWN
    """Of the split: positions of a padded batch that hold no token of any prompt."""
    padding: float = _UNKNOWN
    """Share of a padded batch's positions that hold no token."""
    mask_s: float = _UNKNOWN
    """What the mask of a padded batch adds: against the same shape without one, visited in turn."""
    waiting_s: float = _UNKNOWN
    """Of a decode step, what goes to sequences that have ended and wait for the last one of their batch."""
    visits: int | None = None
    """How often it was visited: the interval of a single visit is within that visit."""

    @property
    def filled(self) -> Literal["by a prompt", "directly"]:
        """How the cache came to hold its tokens."""
        return "by a prompt" if self.prompt_len else "directly"

    @property
    def key(self) -> CellKey:
        """Which phase of which cell this is."""
        return CellKey.at(self.phase, self.batch_size, self.prompt_len, self.context_len, self.new_tokens, self.engine)


CELL_COLUMNS = tuple(item.name for item in fields(CellResult))
"""The columns of cells.csv, in their order."""


def counted_row(key: CellKey, operators: Sequence[OperatorWork], status: Status) -> CellResult:
    """The row of a cell before it has a time: its work alone."""
    flops = sum(item.flops for item in operators)
    nbytes = sum(item.model_bytes for item in operators)
    return CellResult(
        phase=key.phase,
        batch_size=key.cell.batch_size,
        prompt_len=key.cell.prompt_len,
        context_len=key.context_len,
        new_tokens=key.cell.new_tokens,
        status=status,
        engine=key.cell.engine,
        model_flops=int(flops),
        model_bytes=round(nbytes),
        executed_flops=int(sum(item.executed_flops for item in operators)),
        executed_bytes=round(sum(item.executed_bytes for item in operators)),
        intensity=flops / nbytes if nbytes else _UNKNOWN,
    )


@dataclass(frozen=True, slots=True)
class Keyed:
    """The columns that tell one record from another."""

    phase: Phase
    batch_size: int
    prompt_len: int
    context_len: int
    new_tokens: int
    engine: str

    @property
    def key(self) -> CellKey:
        """Which phase of which cell this is about."""
        return CellKey.at(self.phase, self.batch_size, self.prompt_len, self.context_len, self.new_tokens, self.engine)


class KeyColumns(TypedDict):
    """The columns of `Keyed` by name."""

    phase: Phase
    batch_size: int
    prompt_len: int
    context_len: int
    new_tokens: int
    engine: str


def columns_of(key: CellKey) -> KeyColumns:
    """The columns of `Keyed` for a key."""
    cell = key.cell
    return {
        "phase": key.phase,
        "batch_size": cell.batch_size,
        "prompt_len": cell.prompt_len,
        "context_len": key.context_len,
        "new_tokens": cell.new_tokens,
        "engine": cell.engine,
    }


@dataclass(frozen=True)
class EngineDifference(Keyed):
    """What an engine saves against the run's first one in a cell, with its 95 % interval."""

    against: str
    saves_s: float
    low_s: float
    high_s: float
    terms: Mapping[str, float] = field(default_factory=dict)
    """What each term of the split gains in seconds from the run's first engine to this one; empty where one of their
    splits does not add up."""
    causes: Mapping[str, float] = field(default_factory=dict)
    """What each cause of avoidable work gains in seconds."""
    how: str = ""
    """How an engine that owns its model issues a step."""
    visits: int = 2
    """Visits of the one that has fewer: a single one does not tell what visits of the same cell differ by."""

    @property
    def is_claim(self) -> bool:
        """Whether the engines were visited in turn and the whole interval lies on one side."""
        return self.visits >= CLAIM_VISITS and self.low_s * self.high_s > 0


Basis = Literal["tried", "measured", "computed"]


@dataclass(frozen=True, slots=True)
class Lever:
    """A change and what it saves on one cell."""

    change: str
    saves_s: float
    """Negative where it costs."""
    because: str
    basis: Basis = "computed"
    """Tried on this device at this very shape, measured in this run, or computed from the cell's own split."""
    half_width_s: float = 0.0
    """How far `saves_s` may be off."""
    at_most: bool = False
    """Whether `saves_s` is an upper bound; other computed levers are estimates."""

    @property
    def amount(self) -> str:
        """The time saved in words: a bound is "at most", an estimate "about", a measurement neither."""
        kind = "at most " if self.at_most else "about " if self.basis == "computed" else ""
        return kind + duration(self.saves_s)

    @property
    def is_claim(self) -> bool:
        """Whether its sign is beyond doubt."""
        return abs(self.saves_s) > self.half_width_s


@dataclass(frozen=True, slots=True)
class CellEvidence(Keyed):
    """What a verdict stands on, and what would change the cell."""

    regime: Regime
    confidence: Confidence
    flags: tuple[Flag, ...]
    signals: tuple[Evidence, ...]
    conflicts: tuple[str, ...]
    """Signals that point elsewhere than the label."""
    split_half_widths_s: Mapping[str, float]
    """How far each term of the split may be off."""
    noise_reasons: tuple[str, ...]
    predicted_peak_memory_bytes: int
    levers: tuple[Lever, ...] = ()
    at_least_s_on: Mapping[str, float | None] = field(default_factory=dict)
    """The floor on other cards, by their datasheets; None on a card that cannot hold the cell."""
    unexplained_in_s: Mapping[str, float] = field(default_factory=dict)
    """Which groups of operators carry what the split does not explain, the largest first; empty where none was
    looked for."""


@dataclass(frozen=True, slots=True)
class JudgedCell:
    """A cell that was measured and judged, as advice looks at it."""

    key: CellKey
    tokens_per_s: float
    flops_per_s: float
    bytes_per_s: float
    roof_bytes_per_s: float
    """The memory roof under which it was judged: a cache's, where one holds what it reads."""
    roof_flops_per_s: float
    """The compute roof, by the dtypes that its products run in."""
    split: TimeBreakdown
    verdict: Verdict
    operators: Sequence[OperatorWork] = ()
    memory_bytes: float = 0.0
    """Predicted peak memory: what another card must have."""
    avoidable_s: Mapping[Cause, float] = field(default_factory=dict)
    """Seconds of the avoidable work by cause: traffic at the measured bandwidth, and page faults."""
    tried: tuple[TrialResult, ...] = ()
    """Changes that were tried at this shape."""
    ways: tuple[Lever, ...] = ()
    """Other ways to batch the same prompts, where they are of unequal lengths."""
    lost_s: Mapping[str, float] = field(default_factory=dict)
    """What the kernels of each operator that was run alone take beyond its roof and its conversions."""
    host_pace_s: float = 0.0
    """The host's dispatch where it runs ahead of the device, which no change of the device's work goes below."""
    graph_step_s: float | None = None
    """Seconds of the step replayed as a CUDA graph, where one was recorded."""
    clock_share: float = 1.0
    """The card's clock over that of its compute roof."""
    knee: float | None = None
    """The batch at which, by the counts, FLOPs overtake bytes; None where none does or one batch alone was run."""


@dataclass(frozen=True)
class TrialResult:
    """A step in another form, by a trial."""

    form: str
    ratio: float
    """Its time over the time as it is, both of a whole model."""
    half_width: float
    """How far the ratio may be off."""
    layers: int
    """Layers that were stepped."""
    of_layers: int
    before_s: float = 0.0
    """Seconds of a step as it is, by the trial; 0 where they are not known."""

    def half_width_at(self, latency_s: float) -> float:
        """How far the ratio may be off for a step that was measured as `latency_s`: the few layers may stand for it
        no better than their own step as it is does."""
        return math.hypot(self.half_width, self.before_s / latency_s - 1 if self.before_s else 0.0)


def trial_results(trials: Sequence[Trial]) -> Iterator[TrialResult]:
    """Every form that was tried at a step's shape."""
    for trial in trials:
        before, after = (whole_step(each, trial.of_layers / trial.layers) for each in (trial.before, trial.after))
        ratio = after.quartile_s / before.quartile_s
        off = math.hypot(after.half_width_s / after.quartile_s, before.half_width_s / before.quartile_s)
        yield TrialResult(trial.form, ratio, ratio * off, trial.layers, trial.of_layers, before.quartile_s)


def whole_step(stepped: Stepped, times: float) -> Undisturbed:
    """Seconds of a step of the whole model, which has `times` as many repeating layers: layers of a kind cost alike."""
    steps = zip(stepped.layers_s, stepped.beside_s, strict=True)
    return undisturbed([beside_s + times * layers_s for layers_s, beside_s in steps])
