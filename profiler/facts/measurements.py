"""What passes other than the sweep measure: replays, hooks, traces, trials, cold starts, quality."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler.facts.fact import Fact
from profiler.facts.telemetry import Reading
from profiler.grid.cells import Cell, CellKey, Phase
from profiler.stats import NOTHING, Timing, timing_of

if TYPE_CHECKING:
    from profiler.facts.merged import MergedFacts


@dataclass(frozen=True)
class Replay:
    """Seconds that one instance of an operator took alone, at one cell's shape."""

    operator: str
    seconds: tuple[float, ...]
    conversion_seconds: tuple[float, ...] = ()
    """Of its kernels that only convert between formats, where it has some."""
    without_faults: bool = False
    """Whether the time of its own page faults is taken off (CPU): those of a step are counted in the step."""

    @property
    def whole(self) -> Timing:
        return timing_of(self.seconds)

    @property
    def conversion(self) -> Timing:
        return timing_of(self.conversion_seconds) if self.conversion_seconds else NOTHING


@dataclass(frozen=True)
class Hooked(Fact, kind="hooks"):
    """A step cut at the entry and exit of every known module: seconds by group, step by step."""

    key: CellKey
    groups: Mapping[str, tuple[float, ...]]

    def merge_into(self, merged: MergedFacts) -> None:
        merged.hooked[self.key] = self


@dataclass(frozen=True)
class Activity(Fact, kind="activity"):
    """What ran during one step: kernels on CUDA, operators on a CPU (where each is a call of the host)."""

    key: CellKey
    kernels: int
    busy_s: float
    """Time in which at least one of them ran."""
    gaps: int
    """Pauses of more than a microsecond between them."""
    gap_s: float
    longest_s: float
    """The longest single kernel."""

    @property
    def busy_share(self) -> float:
        """Share of the span from the first to the last kernel in which one ran."""
        span_s = self.busy_s + self.gap_s
        return self.busy_s / span_s if span_s else 0.0


@dataclass(frozen=True, slots=True)
class CellPeak:
    """The peak memory that was predicted for a cell."""

    cell: Cell
    peak_bytes: int


@dataclass(frozen=True)
class PredictedPeaks(Fact, kind="predicted_peaks"):
    """What every cell of the grid was predicted to need."""

    peaks: tuple[CellPeak, ...]

    def merge_into(self, merged: MergedFacts) -> None:
        merged.predicted_peak_bytes.update({item.cell: item.peak_bytes for item in self.peaks})


@dataclass(frozen=True)
class Replays(Fact, kind="replay"):
    """Operators that were run alone, at the shape that these cells share."""

    keys: tuple[CellKey, ...]
    operators: tuple[Replay, ...]

    def merge_into(self, merged: MergedFacts) -> None:
        for key in self.keys:
            known = merged.replays.setdefault(key, {})
            known.update({item.operator: _faster(item, known.get(item.operator)) for item in self.operators})


@dataclass(frozen=True)
class Readings(Fact, kind="readings"):
    """What the device reported since the last such record."""

    readings: tuple[Reading, ...]

    def merge_into(self, merged: MergedFacts) -> None:
        merged.readings.extend(self.readings)


@dataclass(frozen=True)
class Stepped:
    """Steps of a short model, each cut at the entry and the exit of its repeating layers."""

    layers_s: tuple[float, ...]
    """Seconds within those layers."""
    beside_s: tuple[float, ...]
    """Seconds of the same steps before and behind them: embedding, layers of another kind, head."""


COMPILED = "torch.compile"
"""The name of the trial whose steps are compiled, on a static cache."""
UNQUANTISED = "unquantised "
"""What the name of a trial begins with that leaves the run's quantisation out."""
PADDING_MASK = "a padding mask"
"""What the name of a trial begins with whose batch has a shorter sequence: a cost to know, no change to advise."""


@dataclass(frozen=True)
class Trial(Fact, kind="trial"):
    """A step tried in another form: the same architecture with fewer layers, as it is and in that form, in turn."""

    key: CellKey
    form: str
    layers: int
    """Repeating layers of the short model."""
    of_layers: int
    """Repeating layers of the whole one."""
    before: Stepped
    after: Stepped

    def merge_into(self, merged: MergedFacts) -> None:
        merged.trials.setdefault(self.key, []).append(self)


@dataclass(frozen=True)
class GenerateSteps(Fact, kind="generate"):
    """Decode steps within `generate` and within our own loop, in turn: seconds in each part, step by step."""

    cell: Cell
    transformers: str
    """Its version: the parts are its own functions."""
    parts_s: Mapping[str, tuple[float, ...]]
    own_s: Mapping[str, tuple[float, ...]]
    streamed_s: tuple[float, ...]
    """The part that ends a step, with a streamer that takes every token."""
    reads_a_token: float
    """Values that the host reads from the device in a step."""

    def merge_into(self, merged: MergedFacts) -> None:
        merged.generate_steps[self.cell] = self


@dataclass(frozen=True)
class QueueTrial(Fact, kind="queue"):
    """The prompts of a queue prefilled as they come and batched in another way, in turn: seconds of all of them."""

    cell: Cell
    way: str
    as_they_come_s: tuple[float, ...]
    this_way_s: tuple[float, ...]

    def merge_into(self, merged: MergedFacts) -> None:
        merged.queue_trials.setdefault(self.cell, {})[self.way] = self


@dataclass(frozen=True)
class FirstCalls:
    """The first requests of a process to one engine."""

    preparation_s: float
    """Compiling, capturing."""
    first_s: float
    """Until all tokens of the first request were on the host."""
    second_s: float
    """Seconds of the first request, repeated."""

    @property
    def once_s(self) -> float:
        """What is paid once."""
        return self.preparation_s + self.first_s - self.second_s


@dataclass(frozen=True)
class FreshStart(Fact, kind="fresh_start"):
    """A process that was started for one model, until it had answered."""

    link: str
    """Where its weights came from: disk, page cache, cached (a hub's folder), drawn (random)."""
    launch_s: float
    """The interpreter's start and all imports."""
    load_s: float
    load_bytes: int
    engines: Mapping[str, FirstCalls]


@dataclass(frozen=True)
class AfterIdle(Fact, kind="after_silence"):
    """The first decode steps after some seconds without work, time and again."""

    cell: Cell
    silence_s: float
    steps_s: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Quality(Fact, kind="quality"):
    """The next-token distributions of two models over the same text, held against each other."""

    mean_kl_nats: float
    """Mean over positions of KL(unquantised || quantised), in nats; 0 where they are the same."""
    top1_agreement: float
    """Share of positions where both put the same token first."""
    tokens: int


@dataclass(frozen=True)
class RankSteps(Fact, kind="ranks"):
    """What each rank's own share of a cell takes, by rank, while nothing is exchanged and all work at once."""

    cell: Cell
    prefill_s: tuple[float, ...]
    """Empty where the cell has no prefill."""
    decode_s: tuple[float, ...]
    prefill_last_s: float = 0.0
    decode_last_s: float = 0.0
    """Seconds if every exchange waits for the last rank; 0 in older runs."""

    def merge_into(self, merged: MergedFacts) -> None:
        merged.rank_steps[self.cell] = self

    def seconds(self, phase: Phase) -> tuple[float, ...]:
        return self.prefill_s if phase == "prefill" else self.decode_s

    def last_s(self, phase: Phase) -> float:
        """Seconds of the shares, waiting for the last at every exchange; of the slowest rank where that is unknown."""
        found = self.prefill_last_s if phase == "prefill" else self.decode_last_s
        return found or max(self.seconds(phase))


BETWEEN_MODULES = "between modules"
"""Time in no module that the count knows: residual additions, rotary embeddings, the cache's bookkeeping, Python."""


def _faster(replay: Replay, earlier: Replay | None) -> Replay:
    """Of two measurements the one that was held up less."""
    return replay if earlier is None or replay.whole.median_s <= earlier.whole.median_s else earlier
