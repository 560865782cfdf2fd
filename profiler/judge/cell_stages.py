"""A cell in four stages, each with the one before: its key, its time, the terms of that time, and its limit.

The third stage is `Measurement` (profiler/judge/regimes.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from profiler.facts.measurements import KernelTime
from profiler.facts.operators import COLLECTIVE, Cause, OperatorWork
from profiler.facts.repetitions import Repetition, Status, first_use_s
from profiler.facts.telemetry import ActiveShares
from profiler.grid.cells import CellKey, KeyedRecord
from profiler.judge.breakdown import StepCeilings, TimeBreakdown
from profiler.judge.demand import total_work
from profiler.judge.regimes import Measurement, Verdict
from profiler.judge.savings import ChangeEffect, EngineDifference, TrialResult
from profiler.stats import Estimate, NoiseReport, undisturbed

NO_TIME = Estimate(math.nan, math.nan, math.nan, 0)
"""That of a cell without one."""
_UNSEEN, _QUIET = ActiveShares(None, None), NoiseReport("quiet", ())


@dataclass(frozen=True)
class Timed:
    """A cell with its counted work and its time."""

    key: CellKey
    operators: Sequence[OperatorWork]
    status: Status
    """`ok` if it was measured."""
    tokens: float = 0.0
    """Tokens of its step, without padding and without sequences that have ended."""
    time: Estimate = NO_TIME
    """Measured, or in older runs forecast."""
    steady: Estimate = NO_TIME
    """Measured, without the term of the machine's drift, which changes cells alike that are timed in turn."""
    repetitions: Sequence[Repetition] = ()
    samples: Sequence[tuple[float, ...]] = ()
    """Seconds of its phase, by repetition."""
    activity: ActiveShares = _UNSEEN
    """Shares of the time of its repetitions in which the device was active, and its clock."""
    slowed: tuple[str, ...] = ()
    """Why the device lowered its clock."""
    clock_share: float = 1.0
    """The GPU's clock over that of its compute ceiling."""
    noise: NoiseReport = _QUIET

    @property
    def latency_s(self) -> float:
        """The median time; NaN without one."""
        return self.time.median_s

    @property
    def half_width_s(self) -> float:
        return (self.time.high_s - self.time.low_s) / 2

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.latency_s

    @property
    def flops_per_s(self) -> float:
        """Model FLOPs over time: redundant work does not raise it."""
        return total_work(self.operators)[0] / self.latency_s

    @property
    def bytes_per_s(self) -> float:
        return total_work(self.operators)[1] / self.latency_s

    @property
    def is_on_ranks(self) -> bool:
        """Whether ranks share its step, and exchange results over a link."""
        return any(item.group == COLLECTIVE for item in self.operators)

    @property
    def first_use_s(self) -> float | None:
        """Seconds of a decode step at a KV length that is new to the process; None if it takes no longer."""
        return first_use_s(self.repetitions) if self.key.phase == "decode" else None

    @property
    def undisturbed_s(self) -> float:
        """Lower quartile of the fastest repetition: what a quiet host would take; 0 without repetitions."""
        return min((undisturbed(samples).quartile_s for samples in self.samples if samples), default=0.0)


@dataclass(frozen=True)
class RaggedStep(KeyedRecord):
    """The costs of unequal prompt lengths in a step."""

    prompt_lens: tuple[int, ...]
    padding: float
    """Share of the batch's positions that hold no token."""
    padding_s: float
    useful_flops: float
    executed_flops: float
    waiting: float = 0.0
    """Share of all decode steps of all sequences in which the sequence has already ended."""
    waiting_s: float = 0.0
    mask_s: float | None = None
    """Time that the mask adds to the same shape without a mask; None if that was not measured."""
    mask_low_s: float | None = None
    mask_high_s: float | None = None
    repetitions: int = 0
    """Repetitions with a mask or without one, whichever is fewer."""


@dataclass(frozen=True)
class Judged:
    """A measured cell: where its time goes, its limit, and what may change its time."""

    measurement: Measurement
    """The input of its verdict: its time, its terms, its ceilings and further signals."""
    verdict: Verdict
    ceiling_flops_per_s: float
    """The compute ceiling, from the dtypes of its matmuls."""
    redundant_s: Mapping[Cause, float] = field(default_factory=dict)
    """Seconds of redundant work by cause: traffic at the measured bandwidth, and page faults."""
    lost_s: Mapping[str, float] = field(default_factory=dict)
    """By replayed operator: seconds of its kernels beyond its ceiling and its conversions."""
    small_kernels_s: float | None = None
    """Seconds that all kernels besides matmuls, attention and experts lose; None if they were not replayed."""
    traced_small_s: float = 0.0
    """At most the seconds of these kernels in the trace of a prefill; 0 without one."""
    longest: tuple[KernelTime, ...] = ()
    """The kernels with the most time in a traced step, the longest first; empty if it was not traced."""
    ragged: RaggedStep | None = None
    """The costs of unequal prompts; None if they are equal."""
    tried: tuple[TrialResult, ...] = ()
    engines: tuple[EngineDifference, ...] = ()
    """Other engines that were measured on this cell, compared with its own."""
    changes: tuple[ChangeEffect, ...] = ()
    """Changes that would save time, the largest saving first; empty until all cells of the run are judged."""

    @property
    def timed(self) -> Timed:
        return self.measurement.cell

    @property
    def key(self) -> CellKey:
        return self.timed.key

    @property
    def terms(self) -> TimeBreakdown:
        return self.measurement.terms

    @property
    def ceilings(self) -> StepCeilings:
        """The ceilings with which it was judged; those of a cache if the working set fits one."""
        return self.measurement.ceilings

    @property
    def host_pace_s(self) -> float:
        """Overhead of a host that runs ahead of the device: a lower bound of the step, whatever the device's work."""
        return (self.ceilings.overhead_s or 0.0) if self.ceilings.overlaps else 0.0
