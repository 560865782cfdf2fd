"""Measurements outside the sweep: replays, hooks, traces, trials, quality, drafts, packed linears."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from profiler.facts.change_ids import ChangeId, change_recorded_as
from profiler.facts.fact import Fact, MergedFacts
from profiler.facts.telemetry import Reading
from profiler.grid.cells import Cell, CellKey
from profiler.stats import NOTHING, Timing, timing_of


@dataclass(frozen=True)
class Replay:
    """Seconds of one instance of an operator in isolation, at one cell's shape."""

    operator: str
    seconds: tuple[float, ...]
    conversion_seconds: tuple[float, ...] = ()
    """Seconds of its kernels that only convert between formats; empty without any."""
    without_faults: bool = False
    """Whether the time of its page faults is subtracted (CPU); the step itself counts those of a step."""

    @property
    def whole(self) -> Timing:
        return timing_of(self.seconds)

    @property
    def conversion(self) -> Timing:
        return timing_of(self.conversion_seconds) if self.conversion_seconds else NOTHING


@dataclass(frozen=True)
class HookedStep(Fact, kind="hooks", into="hooked"):
    """Seconds of steps by group of modules, cut at the entry and exit of every known module."""

    key: CellKey
    groups: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All calls of one kernel in a step."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Activity(Fact, kind="activity", into="activity"):
    """Kernels of one step on CUDA; on a CPU its operators, each of which is a call of the host."""

    key: CellKey
    kernels: int
    busy_s: float
    """Seconds in which at least one of them ran."""
    gaps: int
    """Pauses of more than a microsecond between them."""
    gap_s: float
    longest_s: float
    """The longest single kernel."""
    median_s: float | None = None
    """The median of single kernels; None in a run that did not record it."""
    longest: tuple[KernelTime, ...] = ()
    """The kernels with the most time, the longest first; empty in a run that did not record them."""

    @property
    def busy_share(self) -> float:
        """Share of the time from the first to the last kernel in which one ran."""
        span_s = self.busy_s + self.gap_s
        return self.busy_s / span_s if span_s else 0.0


@dataclass(frozen=True, slots=True)
class CellPeak:
    cell: Cell
    peak_bytes: int


@dataclass(frozen=True)
class PredictedPeaks(Fact, kind="predicted_peaks"):
    peaks: tuple[CellPeak, ...]

    def merge_into(self, merged: MergedFacts) -> None:
        merged.predicted_peak_bytes.update({item.cell: item.peak_bytes for item in self.peaks})


@dataclass(frozen=True)
class Replays(Fact, kind="replay"):
    """Replays of operators at one shape, which these cells share."""

    keys: tuple[CellKey, ...]
    operators: tuple[Replay, ...]

    def merge_into(self, merged: MergedFacts) -> None:
        for key in self.keys:
            replays = merged.replays.setdefault(key, {})
            for item in self.operators:  # the faster of two measurements was disturbed less
                earlier = replays.get(item.operator)
                if earlier is None or item.whole.median_s <= earlier.whole.median_s:
                    replays[item.operator] = item


@dataclass(frozen=True)
class Readings(Fact, kind="readings"):
    """Telemetry readings since the last such record."""

    readings: tuple[Reading, ...]

    def merge_into(self, merged: MergedFacts) -> None:
        merged.readings.extend(self.readings)


@dataclass(frozen=True)
class StepSamples:
    """Seconds of steps of a short model, each cut at the entry and the exit of its repeating layers."""

    layers_s: tuple[float, ...]
    """Seconds within these layers."""
    beside_s: tuple[float, ...]
    """Seconds of the same steps before and after them: embedding, layers of another kind, head."""


@dataclass(frozen=True)
class Trial(Fact, kind="trial"):
    """Steps of a model, whole or with fewer layers, unchanged and with a change, measured alternately."""

    key: CellKey
    form: str
    """The change, as a sentence names it."""
    layers: int
    """Repeating layers of the model that was stepped."""
    of_layers: int
    """Repeating layers of the whole model."""
    before: StepSamples
    after: StepSamples
    line: str = ""
    """The line that was executed for it; empty in runs before 0.5.0, and for what transformers has no line for."""
    change: ChangeId | None = None
    value: str = ""
    """Which of this kind of change it is, such as the name of a format."""
    once_s: float = 0.0
    """Seconds by which its first call took longer than a later one, and loading a format longer than without it."""
    tokens: int = 0
    """Greedy tokens of a sequence in one call; 0 if the weights of both sides differ at random."""
    same_tokens: int = 0
    """The first of them that are the same with and without the change, in all sequences."""

    @property
    def what(self) -> tuple[ChangeId, str] | None:
        """The change and its value; None for one that runs no longer try."""
        return (self.change, self.value) if self.change else change_recorded_as(self.form)

    def merge_into(self, merged: MergedFacts) -> None:
        merged.trials.setdefault(self.key, []).append(self)


@dataclass(frozen=True)
class NotTried(Fact, kind="not_tried"):
    """A change for whose trial the run had too little time."""

    form: str
    line: str
    change: ChangeId
    needs_s: float
    """Expected seconds of its trial."""


@dataclass(frozen=True)
class GenerateSteps(Fact, kind="generate", into="generate_steps"):
    """Decode steps in `generate` and in roofscope's loop, measured alternately: seconds of each part per step."""

    cell: Cell
    transformers: str
    """Its version; the parts are functions of transformers."""
    parts_s: Mapping[str, tuple[float, ...]]
    own_s: Mapping[str, tuple[float, ...]]
    streamed_s: tuple[float, ...]
    """Seconds of the last part of a step with a streamer for every token."""
    reads_a_token: float
    """Number of values per step that the host reads from the device."""


@dataclass(frozen=True)
class ExpertsTouched(Fact, kind="experts_touched"):
    """The distinct experts that real prompts use in one step: means over layers and steps."""

    key: CellKey
    touched: float
    expected: float
    """The number that the counts use, if every expert is chosen equally often."""
    experts: int
    """All routed experts of a layer."""


@dataclass(frozen=True)
class Quality(Fact, kind="quality"):
    """Comparison of the next-token distributions of two models over the same text."""

    mean_kl_nats: float
    """Mean over positions of KL(unquantised || quantised), in nats; 0 if they are equal."""
    top1_agreement: float
    """Share of positions where both models rank the same token first."""
    tokens: int


@dataclass(frozen=True)
class DraftFloor:
    """The least seconds of decode steps at one batch with and without drafts, by the run's ceilings."""

    batch: int
    drafted: int
    """Drafts per step and sequence, about as many as were measured."""
    one_token_s: float
    """A step of one token."""
    verifying_s: float
    """A step that verifies the drafts."""
    drafting_s: float
    """The steps of the draft model that make them; 0 without one."""


@dataclass(frozen=True)
class Drafting(Fact, kind="drafting"):
    """Greedy answers of one sequence with and without drafts (transformers' assisted generation), in turn."""

    draft: str
    """`ngram`, or the name of a draft model."""
    prompt_len: int
    """Tokens of the built-in text that is continued."""
    new_tokens: int
    """Tokens of the answer; fewer than requested if the model ended it."""
    same_tokens: int
    """The first tokens in which both answers agree; rounding may decide between two nearly equal tokens."""
    drafted: tuple[int, ...]
    """Drafts in each step of one answer; the first step also reads the prompt."""
    accepted: tuple[int, ...]
    """Those of them that the model would have chosen too."""
    assisted_s: tuple[float, ...]
    """Seconds of all steps but the first, by round."""
    drafting_s: tuple[float, ...]
    """Seconds of these in which drafts were made."""
    plain_s: tuple[float, ...]
    """The same steps without drafts, one token each."""
    floors: tuple[DraftFloor, ...]
    """At the batch sizes of the run."""

    @property
    def steps(self) -> int:
        """Steps with drafts after the first."""
        return len(self.accepted) - 1

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a step after the first: the accepted drafts and one more."""
        return 1 + sum(self.accepted[1:]) / self.steps if self.steps else math.nan

    @property
    def speedups(self) -> tuple[float, ...]:
        """Tokens per second with drafts over those without, by round."""
        if self.new_tokens < 2:
            return ()
        # The answers may end at different tokens: rounding decides between nearly equal ones.
        share = (sum(self.accepted[1:]) + self.steps) / (self.new_tokens - 1)
        return tuple(share * plain_s / own_s for plain_s, own_s in zip(self.plain_s, self.assisted_s, strict=True))

    @property
    def pays(self) -> bool | None:
        """Whether drafts are faster; None if the rounds disagree."""
        faster = {speedup > 1 for speedup in self.speedups}
        return faster.pop() if len(faster) == 1 else None


@dataclass(frozen=True)
class LinearsTime:
    """All linears of a decode step in one format, by themselves."""

    format: str
    rows: int
    time: Timing
    kernel: str
    """The operator that takes the longest in a call of the largest packed linear."""
    graph: bool
    """Whether they were replayed as CUDA graphs, without the host; a CPU has none."""

    def is_faster_than(self, other: LinearsTime) -> bool:
        """Whether the interval ends before the other one begins."""
        return self.time.median_s + self.time.half_width_s < other.time.median_s - other.time.half_width_s


@dataclass(frozen=True)
class FormatLinears(Fact, kind="format_linears"):
    """The linears of a decode step in every format that runs here, by number of rows, the run's own format first."""

    times: tuple[LinearsTime, ...]


BETWEEN_MODULES = "between modules"
"""The group of time outside all known modules: residual additions, rotary embeddings, the cache, Python."""


@dataclass(frozen=True)
class ForecastTime(Fact, kind="forecast", into="forecasts"):
    """The forecast time of a cell that the run did not reach, from its measured cells."""

    key: CellKey
    latency_s: float
    low_s: float
    high_s: float
    """Nine in ten such forecasts lie between `low_s` and `high_s`."""
