"""The result of one cell: its row of cells.csv, its evidence and its changes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Literal

from profiler.facts.change_ids import ChangeId
from profiler.facts.measurements import KernelTime, StepSamples, Trial
from profiler.facts.operators import Cause, OperatorWork
from profiler.facts.repetitions import Repetition, Status, median_issue_s, phase_samples
from profiler.facts.run_facts import Facts
from profiler.grid.cells import CellKey, Phase
from profiler.judge.breakdown import TimeBreakdown
from profiler.judge.difference import Difference, difference, is_claim
from profiler.judge.regimes import Confidence, Evidence, Flag, Regime, Verdict
from profiler.stats import Estimate, Noise, percentile, undisturbed
from profiler.units import duration

_UNKNOWN = math.nan
_ENERGY_TICK_S = 0.1
"""The longest update interval of NVML's energy counter (20 to 100 ms were seen on data-centre GPUs)."""
_ENERGY_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class CellResult:
    """One row of cells.csv, with one field per column. A missing value is NaN, None or an empty text."""

    phase: Phase
    """`prefill` or `decode`."""
    batch_size: int
    """Sequences per batch."""
    prompt_len: int
    """Prompt tokens per sequence, without a cached prefix; 0 if the cache was filled directly."""
    context_len: int
    """Cached tokens at the step: in a prefill those of a prefix, in a decode those at the middle step of the loop."""
    new_tokens: int
    """Tokens decoded after the prompt."""
    status: Status
    """`ok`, `oom`, `skipped`, `failed`; in runs recorded before 0.5.0 also `forecast`, from the measured cells."""
    latency_s: float = _UNKNOWN
    """Median time of the whole prompt, or of one decode step."""
    latency_low_s: float = _UNKNOWN
    """Lower end of the 95 % interval of `latency_s`, or of the 90 % interval of a forecast."""
    latency_high_s: float = _UNKNOWN
    """Upper end of the same interval."""
    samples: int | None = None
    """Number of timed prefills or decode steps."""
    tokens_per_s: float = _UNKNOWN
    """Tokens of all sequences over the time."""
    tokens_per_s_per_seq: float = _UNKNOWN
    """Tokens of one sequence over the time."""
    model_flops: int = 0
    """FLOPs that the algorithm needs."""
    model_bytes: int = 0
    """Bytes that the algorithm needs to move."""
    executed_flops: int = 0
    """FLOPs that the library's code executes."""
    executed_bytes: int = 0
    """Bytes that the library's code moves."""
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
    """Attained share of the measured roofline."""
    floor_s: float = _UNKNOWN
    """Lower bound of the step on this device, from the operators' ceilings and overhead."""
    weights_s: float = _UNKNOWN
    """Term: reading the weights at the memory ceiling."""
    kv_s: float = _UNKNOWN
    """Term: reading and writing the KV cache at the memory ceiling."""
    compute_s: float = _UNKNOWN
    """Term: arithmetic at the compute ceiling."""
    kernel_s: float = _UNKNOWN
    """Term: time of the library's kernels beyond their ceilings at these shapes."""
    redundant_s: float = _UNKNOWN
    """Term: traffic and arithmetic that the algorithm does not need, outside of replayed kernels."""
    overhead_s: float = _UNKNOWN
    """Term: the host's overhead, as far as the device does not hide it."""
    unexplained_s: float = _UNKNOWN
    """Term: the rest of the measured time; negative if the other terms are too large."""
    regime: Regime | None = None
    """The limit of the cell."""
    confidence: Confidence | None = None
    """Confidence in the regime."""
    peak_memory_bytes: int | None = None
    """Peak memory in use."""
    noise: Noise | None = None
    """Noise of the measurement."""
    engine: str = "eager"
    """The engine that ran the model."""
    ttft_s: float = _UNKNOWN
    """Time to first token (prefill), the median."""
    first_step_s: float = _UNKNOWN
    """Time of the first decode step, in which a cache first grows; with vLLM the mean of a loop."""
    p90_s: float = _UNKNOWN
    """90th percentile of the samples; missing with fewer than 10. Of decode, that of the time per output token."""
    p99_s: float = _UNKNOWN
    """99th percentile of the samples; missing with fewer than 100."""
    issue_s: float = _UNKNOWN
    """Seconds until the host has submitted a decode step."""
    joules_per_token: float = _UNKNOWN
    """Energy of the device per token, over all sequences."""
    device_memory_bytes: float = _UNKNOWN
    """Device memory in use after the repetitions, by all processes (CUDA)."""
    stopped: str | None = None
    """Reason for the end of sampling: `interval` or `budget`."""
    dequantise_s: float = _UNKNOWN
    """Term: converting between formats."""
    link_s: float = _UNKNOWN
    """Term: transfer of weights from the host or the disk."""
    generate_s: float = _UNKNOWN
    """Term: overhead of transformers' `generate` over a step of the profiler's loop."""
    engine_s: float = _UNKNOWN
    """Term: time beyond the ceilings in an engine that loads the model itself."""
    padding_s: float = _UNKNOWN
    """Term: positions of a padded batch that hold no token of any prompt."""
    padding: float = _UNKNOWN
    """Share of a padded batch's positions that hold no token."""
    mask_s: float = _UNKNOWN
    """Time that the mask of a padded batch adds, compared with the same shape without a mask, timed in turn."""
    waiting_s: float = _UNKNOWN
    """Part of a decode step spent on ended sequences that wait for the last one of their batch."""
    repetitions: int | None = None
    """Number of repetitions. The interval of a single repetition covers only the variation within it."""
    ttft_p90_s: float = _UNKNOWN
    """90th percentile of the time to first token (prefill); missing with fewer than 10 samples."""
    ttft_p99_s: float = _UNKNOWN
    """99th percentile of the time to first token (prefill); missing with fewer than 100 samples."""
    ttft_p95_s: float = _UNKNOWN
    """95th percentile of the time to first token (prefill); missing with fewer than 20 samples."""
    ttft_samples: int | None = None
    """Samples of the time to first token (prefill)."""

    @property
    def filled(self) -> Literal["by a prompt", "directly"]:
        """How the cache was filled."""
        return "by a prompt" if self.prompt_len else "directly"

    @property
    def key(self) -> CellKey:
        """The cell and its phase."""
        return CellKey.at(self.phase, self.batch_size, self.prompt_len, self.context_len, self.new_tokens, self.engine)

    @property
    def time(self) -> Estimate:
        """The median time with its interval."""
        return Estimate(self.latency_s, self.latency_low_s, self.latency_high_s, self.samples or 0)


def difference_of(before: CellResult, after: CellResult) -> Difference:
    """The difference of a cell's times in two runs."""
    repetitions = [row.repetitions for row in (before, after) if row.repetitions is not None]
    return difference(before.time, after.time, min(repetitions) if len(repetitions) == 2 else None)


CELL_COLUMNS = tuple(item.name for item in fields(CellResult))
"""The columns of cells.csv, in their order."""


def counted_row(key: CellKey, operators: Sequence[OperatorWork], status: Status) -> CellResult:
    """The row of a cell without a time: only its counted work."""
    flops = sum(item.flops for item in operators)
    nbytes = sum(item.model_bytes for item in operators)
    return CellResult(
        **columns_of(key),
        status=status,
        model_flops=int(flops),
        model_bytes=round(nbytes),
        executed_flops=int(sum(item.executed_flops for item in operators)),
        executed_bytes=round(sum(item.executed_bytes for item in operators)),
        intensity=flops / nbytes if nbytes else _UNKNOWN,
    )


def timed_row(facts: Facts, key: CellKey, time_s: Estimate | None) -> CellResult:
    """The row of a cell's work and its measured or forecast time, without a time breakdown."""
    if time_s is not None:
        row = _with_time(facts, key, "ok", time_s.median_s, time_s.low_s, time_s.high_s)
        return replace(
            row, samples=time_s.samples, repetitions=len(phase_samples(key.phase, facts.repetitions[key.cell]))
        )
    gap, forecast = facts.gaps.get(key.cell), facts.forecasts.get(key)
    if gap is None and forecast is not None:
        return _with_time(facts, key, "forecast", forecast.latency_s, forecast.low_s, forecast.high_s)
    return counted_row(key, facts.operators[key], gap.status if gap else "skipped")


def _with_time(facts: Facts, key: CellKey, status: Status, latency_s: float, low_s: float, high_s: float) -> CellResult:
    tokens = facts.grid.useful_tokens(key)
    return replace(
        counted_row(key, facts.operators[key], status),
        latency_s=latency_s,
        latency_low_s=low_s,
        latency_high_s=high_s,
        tokens_per_s=tokens / latency_s,
        tokens_per_s_per_seq=tokens / key.cell.batch_size / latency_s,
    )


def with_repetitions(row: CellResult, key: CellKey, repetitions: Sequence[Repetition]) -> CellResult:
    """The row with percentiles, memory and energy of its repetitions; NaN if not measured or of the other phase."""
    samples = list(chain.from_iterable(phase_samples(key.phase, repetitions)))
    peaks = [repetition.peak_memory_bytes for repetition in repetitions if repetition.peak_memory_bytes is not None]
    row = replace(
        row,
        p90_s=percentile(samples, 90),
        p99_s=percentile(samples, 99),
        peak_memory_bytes=max(peaks) if peaks else None,
        device_memory_bytes=or_nan(_median([repetition.device_memory_bytes for repetition in repetitions])),
    )
    if key.phase == "prefill":
        first_s = [ttft_s for repetition in repetitions for ttft_s in repetition.ttfts_s]
        return replace(
            row,
            ttft_s=or_nan(_median(first_s)),
            ttft_p90_s=percentile(first_s, 90),
            ttft_p95_s=percentile(first_s, 95),
            ttft_p99_s=percentile(first_s, 99),
            ttft_samples=len(first_s),
        )
    return replace(
        row,
        first_step_s=or_nan(_median([repetition.decode_s[0] for repetition in repetitions])),
        issue_s=or_nan(median_issue_s(repetitions)),
        joules_per_token=or_nan(joules_a_token(repetitions)),
    )


def joules_a_token(repetitions: Sequence[Repetition]) -> float | None:
    """Joules per generated token over all repetitions; None if the energy counter is too coarse for their length.

    A repetition that had little time generated fewer tokens than its cell has.

    A GPU updates its counter a few times per second. So a repetition may be charged no tick, or one too many: the sum
    over n repetitions is off by about sqrt(n) / 2 ticks.
    """
    metered = [(repetition, repetition.energy_j) for repetition in repetitions if repetition.energy_j is not None]
    seconds = sum(repetition.wall_s for repetition, _ in metered)
    if not metered or math.sqrt(len(metered)) / 2 * _ENERGY_TICK_S > _ENERGY_TOLERANCE * seconds:
        return None
    generated = sum(repetition.cell.batch_size * (1 + len(repetition.decode_s)) for repetition, _ in metered)
    return sum(joules for _, joules in metered) / generated


def or_nan(value: float | None) -> float:
    """The value, or NaN for None, as columns of cells.csv have it."""
    return math.nan if value is None else value


def _median(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


@dataclass(frozen=True, slots=True)
class KeyedRecord:
    """The columns that identify a record."""

    phase: Phase
    """`prefill` or `decode`."""
    batch_size: int
    """Sequences per batch."""
    prompt_len: int
    """Prompt tokens per sequence, without a cached prefix; 0 if the cache was filled directly."""
    context_len: int
    """Cached tokens at the step; in a prefill, those of a prefix."""
    new_tokens: int
    """Tokens decoded after the prompt."""
    engine: str
    """The engine that ran the model."""

    @property
    def key(self) -> CellKey:
        """The cell and its phase."""
        return CellKey.at(self.phase, self.batch_size, self.prompt_len, self.context_len, self.new_tokens, self.engine)


def columns_of(key: CellKey) -> dict[str, Any]:
    """The columns of `KeyedRecord` for a key, by name."""
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
class EngineDifference(KeyedRecord):
    """The saving of an engine in a cell, compared with the run's first engine, with its 95 % interval."""

    against: str
    saves_s: float
    low_s: float
    high_s: float
    terms: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each term in this engine minus those in the first; empty if one of the breakdowns does not add up."""
    causes: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each cause of redundant work in this engine minus those in the first."""
    repetitions: int = 2
    """Repetitions of the engine with fewer. A single repetition does not show how much repetitions of one cell
    differ."""

    @property
    def is_claim(self) -> bool:
        """Whether both engines have enough repetitions and the whole interval is on one side of 0."""
        return is_claim(self.low_s, self.high_s, self.repetitions)


Basis = Literal["tried", "measured", "computed"]


@dataclass(frozen=True, slots=True)
class ChangeEffect:
    """A change, and the time that it saves on one cell."""

    change: str
    """The change in words."""
    saves_s: float
    """Seconds per step that it saves; negative if it costs time."""
    because: str
    """The reason, with its figures."""
    basis: Basis = "computed"
    """Tried on this device at this shape, measured in this run, or computed from the cell's time breakdown."""
    half_width_s: float = 0.0
    """Half width of the interval of `saves_s`."""
    at_most: bool = False
    """Whether `saves_s` is an upper bound; other computed changes are estimates."""
    at_least_s: float | None = None
    """Lower end of a computed saving, of which `saves_s` is the upper end; None if there is only one figure."""
    how: str = ""
    """The line with which a user makes this change; of a tried change the one that was executed."""
    id: ChangeId | None = None
    """The change; None for an engine that has no such name, or in an older run."""
    value: str = ""
    """Which of this kind of change it is."""
    preparing_s: float = 0.0
    """Expected seconds that a change costs once, such as for compiling."""

    @property
    def amount(self) -> str:
        """The time saved in words: a bound is "at most", an estimate "about", a measurement neither."""
        if self.at_least_s is not None and duration(self.at_least_s) != duration(self.saves_s):
            return f"between {duration(self.at_least_s)} and {duration(self.saves_s)}"
        kind = "at most " if self.at_most else "about " if self.basis == "computed" else ""
        return kind + duration(self.saves_s)

    @property
    def middle_s(self) -> float:
        """The middle of what it may save: a bound starts at 0, a range at its lower end."""
        least_s = 0.0 if self.at_most else self.saves_s if self.at_least_s is None else self.at_least_s
        return (least_s + self.saves_s) / 2

    @property
    def is_claim(self) -> bool:
        """Whether the sign of the saving is certain."""
        return abs(self.saves_s) > self.half_width_s and (self.at_least_s is None or self.at_least_s > 0)

    def limited_to(self, most_s: float) -> ChangeEffect:
        """The change where no change saves more than `most_s` seconds."""
        least_s = None if self.at_least_s is None else min(self.at_least_s, most_s)
        return replace(self, saves_s=min(self.saves_s, most_s), at_least_s=least_s)


@dataclass(frozen=True, slots=True)
class CellEvidence(KeyedRecord):
    """The evidence of a verdict, and the changes of its cell."""

    regime: Regime
    """The limit of the cell."""
    confidence: Confidence
    """Confidence in the regime."""
    flags: tuple[Flag, ...]
    """Properties of the cell besides its regime, such as `kv-bound`."""
    signals: tuple[Evidence, ...]
    """What votes for or against each regime."""
    conflicts: tuple[str, ...]
    """Signals that vote against the label."""
    split_half_widths_s: Mapping[str, float]
    """Half width of the interval of each term of the time breakdown."""
    noise_reasons: tuple[str, ...]
    """Why the measurement is noisy; empty if it is not."""
    predicted_peak_memory_bytes: int
    """Peak memory by the memory model."""
    changes: tuple[ChangeEffect, ...] = ()
    """Changes that would save time, the largest saving first."""
    first_use_s: float | None = None
    """Seconds of a decode step at a KV length that is new to the process; None if it takes no longer."""
    unexplained_in_s: Mapping[str, float] = field(default_factory=dict)
    """Unexplained seconds by group of operators, the largest first; empty if they were not measured by group."""


@dataclass(frozen=True, slots=True)
class JudgedCell:
    """A measured and judged cell, from which changes and the answer are derived."""

    key: CellKey
    tokens_per_s: float
    flops_per_s: float
    bytes_per_s: float
    ceiling_bytes_per_s: float
    """The memory ceiling with which it was judged; that of a cache if the working set fits one."""
    ceiling_flops_per_s: float
    """The compute ceiling, from the dtypes of its matmuls."""
    split: TimeBreakdown
    verdict: Verdict
    operators: Sequence[OperatorWork] = ()
    memory_bytes: float = 0.0
    """Predicted peak memory, which another GPU must have."""
    redundant_s: Mapping[Cause, float] = field(default_factory=dict)
    """Seconds of redundant work by cause: traffic at the measured bandwidth, and page faults."""
    tried: tuple[TrialResult, ...] = ()
    """Changes that were tried at this shape."""
    engines: tuple[EngineDifference, ...] = ()
    """Other engines that were measured on this cell, compared with its own."""
    lost_s: Mapping[str, float] = field(default_factory=dict)
    """By replayed operator: seconds of its kernels beyond its ceiling and its conversions."""
    small_kernels_s: float | None = None
    """Seconds that all kernels besides matmuls, attention and experts lose; None if they were not replayed."""
    traced_small_s: float = 0.0
    """At most the seconds of these kernels in the trace of a prefill; 0 without one."""
    host_pace_s: float = 0.0
    """Overhead of a host that runs ahead of the device: a lower bound of the step, whatever the device's work."""
    host_least_s: float = 0.0
    """The fastest step of the overhead model on such a host."""
    longest: tuple[KernelTime, ...] = ()
    """The kernels with the most time in a traced step, the longest first; empty if it was not traced."""
    waits: bool = False
    """Whether the host waits for the device within the step, which no CUDA graph can record."""
    graph_step_s: float | None = None
    """Seconds of the step replayed as a CUDA graph; None if none was recorded."""
    clock_share: float = 1.0
    """The GPU's clock over that of its compute ceiling."""
    first_use_s: float | None = None
    """Seconds of a decode step at a KV length that is new to the process; None if it takes no longer."""
    undisturbed_s: float | None = None
    """Lower quartile of the fastest repetition: what a quiet host would take."""
    spread: float = 0.0
    """Half width of the interval of its time, as a share of it: by how much repetitions a minute apart differ."""
    usable: bool = True
    """Whether its time is known well enough for a headline."""
    changes: tuple[ChangeEffect, ...] = ()
    """Changes that would save time, the largest saving first; empty until all cells of the run are judged."""


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial: the time of a step with a change."""

    form: str
    """The change, as a sentence names it."""
    ratio: float
    """Time with the change over the time of the model as loaded, both of the whole model."""
    half_width: float
    """Half width of the ratio's interval: the wider half."""
    layers: int
    """Number of layers in the trial."""
    of_layers: int
    before_s: float = 0.0
    """Seconds of a step of the model as loaded, by the trial; 0 if unknown."""
    what: tuple[ChangeId, str] | None = None
    """The change, and which of its kind; None for one that runs no longer try."""
    line: str = ""
    """The line that was executed; empty if none was."""
    once_s: float = 0.0
    """Seconds that the change costs once."""
    tokens: int = 0
    """Tokens that were compared; 0 if the weights of both sides differ at random."""
    same_tokens: int = 0
    """The first of them that are the same with and without the change."""

    @property
    def change(self) -> ChangeId | None:
        return self.what[0] if self.what else None

    @property
    def is_claim(self) -> bool:
        """Whether the trial itself, whose sides took turns, is certain that the change is faster or slower."""
        saved = 1 - self.ratio
        return is_claim(saved - self.half_width, saved + self.half_width, None)

    @property
    def is_whole(self) -> bool:
        """Whether the whole model was stepped, so that the time of its step is known and not extrapolated."""
        return self.layers == self.of_layers and self.before_s > 0

    def steps_s(self, latency_s: float) -> tuple[float, float]:
        """Seconds of a step without and with the change: the trial's own, or shares of the measured `latency_s`.

        A trial calls `generate`, whose step takes longer than the run's own.
        """
        before_s = self.before_s if self.is_whole else latency_s
        return before_s, self.ratio * before_s

    def half_width_at(self, latency_s: float) -> float:
        """Half width of the ratio for a step measured as `latency_s`.

        It includes the difference between that time and the trial's, since a few layers may not represent the model.
        """
        if self.is_whole or not self.before_s:
            return self.half_width
        return math.hypot(self.half_width, self.before_s / latency_s - 1)


def trial_results(trials: Sequence[Trial]) -> Iterator[TrialResult]:
    """The results of a step's trials, of each line the one with the most layers."""
    by_layers = sorted(trials, key=lambda trial: trial.layers)
    for trial in {(trial.form, trial.line): trial for trial in by_layers}.values():
        before, after = (whole_step(each, trial.of_layers / trial.layers) for each in (trial.before, trial.after))
        found = difference(before, after, None)
        half_width = max(found.high - found.change, found.change - found.low)
        yield TrialResult(
            trial.form, 1 + found.change, half_width, trial.layers, trial.of_layers, before.median_s,
            trial.what, trial.line, trial.once_s, trial.tokens, trial.same_tokens,
        )  # fmt: skip


def whole_step(stepped: StepSamples, times: float) -> Estimate:
    """Undisturbed seconds of a step of the whole model: `times` as many repeating layers, of equal cost each."""
    steps = zip(stepped.layers_s, stepped.beside_s, strict=True)
    found = undisturbed([beside_s + times * layers_s for layers_s, beside_s in steps])
    factor = math.exp(found.half_width_s / found.quartile_s)  # a time is positive
    return Estimate(found.quartile_s, found.quartile_s / factor, found.quartile_s * factor, len(stepped.layers_s))
