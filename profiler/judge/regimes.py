"""The regime of a cell: its label, its confidence, and the evidence for and against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from profiler.facts.telemetry import POWER_CAP
from profiler.judge.breakdown import StepCeilings, TimeBreakdown
from profiler.judge.demand import TRAFFIC_TOLERANCE, CountedTraffic, total_work

if TYPE_CHECKING:
    from profiler.judge.cell_stages import Timed

Bound = Literal["compute-bound", "memory-bound", "overhead-bound", "slow-kernels", "link-bound"]
"""The label of a cell that has one limit; `LIMITS` has the rule of each."""
Regime = Literal[Bound, "mixed", "inconclusive"]
Vote = Literal[Bound, ""]
Confidence = Literal["high", "medium", "low"]

# Thresholds, each with its reason. They are choices: isolated kernels reach 0.85 to 0.97 of a measured ceiling, whole
# models of good engines 0.70 to 0.80 of the memory ceiling and 0.6 to 0.9 of the compute ceiling, while a launch-bound
# step on an H100 shows 0.27 (gpt-fast README; arXiv 2605.30571).
MEMORY_SHARE = 0.60
"""Share of the device's time explained by bytes at the measured bandwidth, midway between those two clusters."""
COMPUTE_SHARE = 0.50
"""Share of the device's time explained by FLOPs at the measured rate; unfused prefills reach 0.35 to 0.6."""
OVERHEAD_SHARE = 0.50
"""Exposed overhead over step time, from which a step is overhead-bound: as a graph it would be twice as fast.

Overhead that the device hides costs nothing."""
OVERDRAWN = 1.25
"""Exposed overhead over step time, above which the two were measured at different speeds of the machine.

The noise of an overhead model is smaller than that."""
IDLE_SHARE = 0.20
"""Exposed overhead over step time, from which an overlapping device waits for its host.

A faster device then saves nothing, so a label of the device would be wrong. Up to OVERHEAD_SHARE the step is mixed: a
faster host saves at most this share, and then the device is the limit."""
PACED_SHARE = 0.95
"""Overhead over step time, hidden or not, from which a host takes as long as the device that overlaps it.

Neither fewer bytes nor less overhead saves anything then, unless both shrink: the step is mixed."""
OVERHEAD_AGAINST = 0.25
"""Exposed overhead over step time, from which a flat doubling does not indicate memory."""
LINK_SHARE = 0.50
"""Time on the link over step time."""
ENGINE_SHARE = 0.50
"""Engine term over step time, for an engine that loads the model itself: more than the work needs at the ceilings.

Its host and its kernels cannot be separated from outside. So the step is mixed, unless the device's counter shows that
it was idle."""
KERNEL_SHARE = 0.50
"""Share of the device's time that replayed kernels lose beyond their ceilings, including dequantisation."""
KERNEL_SHARE_LOW = 0.40
"""The least such share at the lower end of its interval."""
KERNEL_COVERAGE = 0.70
"""Share of the ceiling time whose operators were replayed, below which no step is called slow-kernels."""
KERNEL_UNEXPLAINED = 0.20
"""The largest unexplained share of a step whose label is slow-kernels."""
RIDGE_BAND = 1.5
"""Intensity over ridge (or ridge over intensity), from which one ceiling is indicated."""
DOMINANCE = 1.25
"""Factor by which one share must exceed another to decide the label."""
KERNEL_LOSS = 0.25
"""Share of the step lost by kernels, including dequantisation, from which they are flagged."""
WASTE = 0.20
"""Share of the step in redundant work, from which it is flagged."""
CEILING_TOLERANCE = 0.02
"""Share by which a step may exceed its ceiling, since ceilings are medians."""
THROTTLED = 0.95
"""Share of the clock of the ceilings' measurement, below which a GPU is throttled."""

ISSUE_AGAINST = 0.5
"""Host issue time over step time, below which the device did not wait for the host."""
GRAPH_SAVES = 0.2
"""Share of a step that a graph replay saves, from which the host is the limit (an H100 at batch 1: 1.26x)."""
GRAPH_PROVES = 0.5
"""Share that a graph replay saves, from which a step is overhead-bound whatever overhead was measured."""

SM_IDLE = 0.5
"""Share of the time with any SM active, below which the device mostly waits for the host."""

_SIDES: dict[str, Vote] = {"memory": "memory-bound", "compute": "compute-bound"}
_HIGH, _MEDIUM = 0.85, 0.65
_REDRAWS = 200


class Flag(StrEnum):
    """Properties of a cell besides its label."""

    KV_BOUND = "kv-bound"
    INEFFICIENT_KERNELS = "inefficient-kernels"
    WASTEFUL_PATH = "wasteful-path"
    CACHE_RESIDENT = "cache-resident"
    OFFLOADED = "offloaded"
    ABOVE_CEILING = "above-ceiling"
    POWER_CAPPED = "power-capped"
    HOST = "host"
    """An overhead-bound step whose overhead a graph replay removes."""
    GRANULARITY = "granularity"
    """An overhead-bound step whose overhead only fusion removes, not a graph replay."""
    THROTTLED = "throttled"
    """The GPU ran at a lower clock than in the measurement of its ceilings."""
    UNSTEADY = "unsteady"
    """The label differs at the lowest or the highest ceilings of the run."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One signal with its value, its threshold, and the label it votes for (empty for none)."""

    signal: str
    value: float
    threshold: str
    vote: Vote
    weight: float


@dataclass(frozen=True)
class Measurement:
    """The input of a verdict."""

    terms: TimeBreakdown
    """At the cell's clock, as `compute_flops_per_s` is."""
    cell: Timed
    compute_flops_per_s: float
    ceilings: StepCeilings
    offloaded: bool = False
    cache_resident: bool = False
    graph_step_s: float | None = None
    """Seconds of the step replayed as a CUDA graph, without the host."""
    sides: Mapping[Any, str] = field(default_factory=dict)
    """By axis, the ceiling that doubling its size indicates: `memory`, `compute`, or another text for neither."""
    traffic: CountedTraffic | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The regime of a cell with its confidence, evidence and flags."""

    regime: Regime
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    flags: tuple[Flag, ...]

    @property
    def conflicts(self) -> tuple[Evidence, ...]:
        """Evidence that votes against the label."""
        return tuple(item for item in self.evidence if item.vote and item.vote != self.regime)


def judge_cell(measurement: Measurement) -> Verdict:
    """The verdict on one cell.

    The label is the resource with the largest share of the step's time. Votes against it, noise, and labels that change
    when times and ceilings are redrawn within their intervals lower the confidence. A noisy cell still has a label if
    it is the same over its whole interval.
    """
    evidence = _evidence(measurement)
    regime = _label_over_interval(measurement)
    flags = _flags(measurement, regime)
    return Verdict(regime, _confidence(measurement, regime, evidence, flags), evidence, flags)


def within_ceiling_range(verdict: Verdict, extremes: Mapping[str, Verdict]) -> Verdict:
    """The verdict on a cell, given the verdicts at the `lowest` and the `highest` ceilings of the same run.

    If the labels differ, the confidence is low and the evidence names the other label. A step above its ceiling is not
    flagged if it is below the highest one.
    """
    highest = extremes.get("highest")
    if Flag.ABOVE_CEILING in verdict.flags and highest is not None and Flag.ABOVE_CEILING not in highest.flags:
        flags = tuple(flag for flag in verdict.flags if flag != Flag.ABOVE_CEILING)
        verdict = replace(verdict, confidence=highest.confidence, flags=flags)
    others = {name: other for name, other in extremes.items() if other.regime != verdict.regime}
    if not others:
        return verdict
    evidence = tuple(
        Evidence(
            f"{verdict.regime} under the ceilings measured first, {other.regime} under the {name}",
            float(len(others)),
            "0 other labels",
            "" if other.regime == "mixed" or other.regime == "inconclusive" else other.regime,
            1.0,
        )
        for name, other in others.items()
    )
    return Verdict(verdict.regime, "low", (*verdict.evidence, *evidence), (*verdict.flags, Flag.UNSTEADY))


class _Shares:
    """Shares of the device's time, but overhead, link and engine of the whole step: numbers, or arrays of redraws."""

    def __init__(self, s: TimeBreakdown) -> None:
        host_s: Any = s.overhead_s + max(0.0, s.generate_s)  # the overhead of `generate` is host time, too
        device_s: Any = np.maximum(s.latency_s - host_s, 1e-12)
        lost_s = s.kernel_s + s.dequantise_s
        self.memory = (s.weights_s + s.kv_s) / device_s
        self.compute = s.compute_s / device_s
        self.kernel = lost_s / device_s
        self.kernel_low = (lost_s - s.half_widths_s.get("kernel_s", 0.0)) / device_s
        self.redundant = (s.redundant_s + s.padding_s) / device_s
        self.overhead = host_s / s.latency_s
        self.link: Any = s.link_s / s.latency_s
        self.engine: Any = s.engine_s / s.latency_s


@dataclass(frozen=True)
class Limit:
    """A share of a step from which a cell has a regime: it decides the label, and gives the evidence."""

    label: Bound
    signal: str
    least: float
    """Threshold of the share."""
    share: Callable[[_Shares], Any]
    terms: tuple[str, ...] = ()
    """The terms of the time breakdown that it consists of; pictures have the colour of the first one."""
    meaning: str = ""
    """In the glossary, after its label and a colon."""
    text: str = ""
    """What the threshold says, if it is not the name of the regime."""
    is_known: Callable[[Measurement, _Shares], bool] = lambda _, shares: bool(shares.overhead < 1)
    """Whether a cell has this signal; unless said otherwise, if its device has time of its own."""
    binds: Callable[[Measurement, _Shares], Any] | None = None
    """Whether it votes; None if it does from the threshold on."""

    def reached(self, shares: _Shares) -> Any:
        """Whether the share is at least the threshold; an array of redraws gives an array."""
        return self.share(shares) >= self.least

    def evidence(self, m: Measurement, shares: _Shares) -> Evidence:
        votes = self.binds(m, shares) if self.binds else self.reached(shares)
        return Evidence(
            self.signal,
            self.share(shares),
            f">= {self.least} {self.text or self.label.removesuffix('-bound')}",
            self.label if votes else "",
            2.0,
        )


_DEVICE_TIME = "share of the device's time that"
LIMITS: dict[Bound, Limit] = {
    each.label: each
    for each in (
        Limit(
            "memory-bound",
            f"{_DEVICE_TIME} bytes at the measured bandwidth need",
            MEMORY_SHARE,
            lambda s: s.memory,
            ("kv_s", "weights_s"),
            "moving bytes explains most of the device's time; fewer bytes help, faster arithmetic does not.",
        ),
        Limit(
            "compute-bound",
            f"{_DEVICE_TIME} FLOPs at the measured rate need",
            COMPUTE_SHARE,
            lambda s: s.compute,
            ("compute_s",),
            "arithmetic explains most of the device's time; a faster dtype helps, fewer bytes do not.",
        ),
        Limit(
            "overhead-bound",
            "overhead that the device does not hide / step",
            OVERHEAD_SHARE,
            lambda s: s.overhead,
            ("overhead_s",),
            "the host's overhead sets the pace; graphs, compiling or larger batches help, a faster device does not.",
            is_known=lambda m, _: m.ceilings.overhead_s is not None,
        ),
        Limit(
            "slow-kernels",
            f"{_DEVICE_TIME} kernels take beyond their ceilings, run one by one",
            KERNEL_SHARE,
            lambda s: s.kernel,
            ("kernel_s", "dequantise_s"),
            "replayed in isolation, the kernels stay far below every ceiling at these shapes; other kernels or formats"
            " help.",
            "kernels",
            lambda m, shares: bool(shares.overhead < 1) and m.terms.replayed_share >= KERNEL_COVERAGE,
            lambda m, shares: _kernels_bind(m.terms, shares),
        ),
        Limit(
            "link-bound",
            "link / step",
            LINK_SHARE,
            lambda s: s.link,
            ("link_s",),
            "weights outside the GPU, or results that GPUs exchange, set the pace; a faster device does not help.",
            is_known=lambda m, _: bool(m.terms.link_s),
        ),
    )
}
_ENGINE = Limit(
    "overhead-bound",
    "what the engine adds / step: its host and its kernels, inseparable from outside",
    ENGINE_SHARE,
    lambda s: s.engine,
    text="more than the work",
    is_known=lambda m, _: bool(m.terms.engine_s),
    binds=lambda m, shares: _engine_idles(m, shares),
)


def _label_over_interval(m: Measurement) -> Regime:
    """The label at the median, unless it is a very noisy step's that its breakdown does not explain."""
    if m.cell.noise.grade != "unusable":
        return _label(m, m.terms)
    ends = _labels_of_ends(m)
    if len(ends) == 1:
        return ends.pop()
    explained = abs(m.terms.unexplained_s) <= KERNEL_UNEXPLAINED * m.terms.latency_s
    return _label(m, m.terms) if explained else "inconclusive"


def _labels_of_ends(m: Measurement) -> set[Regime]:
    return {_label(m, m.terms.at_latency(latency_s)) for latency_s in (m.cell.time.low_s, m.cell.time.high_s)}


def holds_over_interval(m: Measurement, regime: Regime) -> bool:
    """Whether a label is the same at both ends of the step's interval, however wide that is."""
    return regime != "inconclusive" and _labels_of_ends(m) == {regime}


def _label(m: Measurement, s: TimeBreakdown) -> Regime:
    return cast(Regime, _labels(m, s).item())


def _labels(m: Measurement, s: TimeBreakdown) -> NDArray[np.str_]:
    """The label of a measurement with the breakdown `s`, or an array of labels if its terms are arrays of redraws."""
    shares = _Shares(s)
    graph_share = _graph_share(m, s)
    reached = {label: limit.reached(shares) for label, limit in LIMITS.items()}
    overhead = reached["overhead-bound"]
    overdrawn = shares.overhead > OVERDRAWN
    if graph_share is not None:
        proved = graph_share >= GRAPH_PROVES
        overhead, overdrawn = overhead | proved, overdrawn & ~np.asarray(proved)
    # Only a step that follows another one is as slow as its host; a prefill's device works on after it has waited.
    idles = (shares.overhead >= (OVERHEAD_SHARE if m.ceilings.idle_share else IDLE_SHARE)) & m.ceilings.overlaps
    by_memory = shares.memory > shares.compute
    larger, smaller = np.maximum(shares.memory, shares.compute), np.minimum(shares.memory, shares.compute)
    reaches = np.where(by_memory, reached["memory-bound"], reached["compute-bound"])
    needed_s, moved_s = s.weights_s + s.kv_s, s.weights_s + s.kv_s + s.redundant_s
    lost_s = s.kernel_s + s.dequantise_s
    others_s = (s.compute_s, shares.overhead * s.latency_s, s.engine_s, abs(s.unexplained_s))
    leads = np.maximum(needed_s, lost_s) >= DOMINANCE * np.minimum(needed_s, lost_s)
    # Redundant work counts for the bytes, or for the kernels that lose even more than all bytes take.
    most_s = np.where(moved_s >= lost_s, moved_s, lost_s + s.redundant_s)
    leads &= (most_s >= DOMINANCE * reduce(np.maximum, others_s)) & _replays_explain(s)
    leads &= m.ceilings.overlaps & (s.link_s == 0)
    equal = (larger < DOMINANCE * smaller) | (~by_memory & (s.compute_s < DOMINANCE * moved_s))
    equal |= m.ceilings.overlaps & (larger * (1 - shares.overhead) < DOMINANCE * shares.overhead)
    moves = (moved_s / s.latency_s >= MEMORY_SHARE) & (s.compute_s < moved_s)
    every = (shares.memory, shares.compute, shares.kernel, shares.overhead, shares.link, shares.engine)
    parts = np.sort(np.stack(np.broadcast_arrays(*every)), axis=0)[::-1]
    two = (parts[0] + parts[1] >= MEMORY_SHARE) & (parts[1] * DOMINANCE >= MEMORY_SHARE / 2)
    rules: tuple[tuple[Any, Regime], ...] = (
        (reached["link-bound"], "link-bound"),
        (overdrawn, "inconclusive"),
        (overhead, "overhead-bound"),
        (idles | (s.host_pace_s / s.latency_s >= PACED_SHARE), "mixed"),
        (_kernels_bind(s, shares), "slow-kernels"),
        (reaches & equal, "mixed"),
        (reaches & by_memory, "memory-bound"),
        (reaches, "compute-bound"),
        (moves | (leads & (moved_s >= lost_s)), "memory-bound"),
        (leads, "slow-kernels"),
        (_engine_idles(m, shares), "overhead-bound"),
        (_ENGINE.reached(shares), "mixed"),
        (two | _replays_explain(s) | (m.ceilings.overlaps & (shares.overhead >= IDLE_SHARE)), "mixed"),
    )
    return np.select([np.asarray(rule) for rule, _ in rules], [name for _, name in rules], default="inconclusive")


def _engine_idles(m: Measurement, shares: _Shares) -> NDArray[np.bool_]:
    active = m.cell.activity.sm
    return np.asarray(_ENGINE.reached(shares) & (active is not None and active < SM_IDLE))


def _kernels_bind(s: TimeBreakdown, shares: _Shares) -> NDArray[np.bool_]:
    """Whether kernels lose so much of a step that others for the same operators recover half of it or more."""
    others = (shares.memory, shares.compute, shares.overhead, shares.link, shares.redundant)
    bind = LIMITS["slow-kernels"].reached(shares) & (shares.kernel_low >= KERNEL_SHARE_LOW)
    return np.asarray(bind & (shares.kernel >= DOMINANCE * reduce(np.maximum, others)) & _replays_explain(s))


def _replays_explain(s: TimeBreakdown) -> NDArray[np.bool_]:
    explained = np.abs(s.unexplained_s) <= KERNEL_UNEXPLAINED * s.latency_s
    return np.asarray((s.replayed_share >= KERNEL_COVERAGE) & explained)


def _evidence(m: Measurement) -> tuple[Evidence, ...]:
    shares = _Shares(m.terms)
    flops, nbytes = total_work(m.cell.operators)
    over_ridge = flops / nbytes / (m.compute_flops_per_s / m.ceilings.memory_bytes_per_s)
    vote: Vote = "compute-bound" if over_ridge >= RIDGE_BAND else "memory-bound" if over_ridge <= 1 / RIDGE_BAND else ""
    intensity = Evidence(
        "intensity / measured ridge",
        over_ridge,
        f">= {RIDGE_BAND} compute, <= {1 / RIDGE_BAND:.2f} memory",
        vote,
        1.0,
    )
    limits = (limit for limit in (*LIMITS.values(), _ENGINE) if limit.is_known(m, shares))
    return (intensity, *(limit.evidence(m, shares) for limit in limits), *_optional_evidence(m, shares))


def _optional_evidence(m: Measurement, shares: _Shares) -> Iterator[Evidence]:
    device_side: Vote = "memory-bound" if shares.memory >= shares.compute else "compute-bound"
    if m.ceilings.issue_s is not None and m.ceilings.overlaps:
        share = m.ceilings.issue_s / m.terms.latency_s
        # A high share proves nothing: once the launch queue is full, the host waits for the device.
        vote: Vote = device_side if share < ISSUE_AGAINST else ""
        yield Evidence("host issue time / step", share, f"< {ISSUE_AGAINST} not overhead", vote, 1.0)
    if m.ceilings.overlaps and m.ceilings.overhead_s:
        share = m.ceilings.overhead_s / m.terms.latency_s
        yield Evidence("all overhead, hidden or not / step", share, f">= {PACED_SHARE} mixed", "", 0.0)
    if (graph := _graph_share(m, m.terms)) is not None:
        saved = float(graph)
        vote = "overhead-bound" if saved >= GRAPH_SAVES else device_side if saved < GRAPH_SAVES / 4 else ""
        yield Evidence("share of the step that a CUDA graph saves", saved, f">= {GRAPH_SAVES} overhead", vote, 2.0)
    for axis, side in m.sides.items():
        if side in _SIDES:
            what = "batch" if axis == "batch" else "prompt or context"
            # Overhead does not grow with the size either, so a flat time indicates bytes only if overhead is small.
            vote = _SIDES[side] if side == "compute" or shares.overhead < OVERHEAD_AGAINST else ""
            yield Evidence(f"doubling the {what}", float(side == "compute"), "slope nearer to", vote, 1.0)
    active = m.cell.activity
    if active.sm is not None:
        # One warp on one SM counts as active, so only a low share is evidence.
        vote = "overhead-bound" if active.sm < SM_IDLE else ""
        yield Evidence("time with any SM active (NVML)", active.sm, f"< {SM_IDLE} overhead", vote, 1.0)
    if active.memory is not None:
        yield Evidence("time with memory active (NVML)", active.memory, "no share of bandwidth", "", 0.0)
    if m.traffic is not None:
        counters, within = m.traffic.counters, f"{1 - TRAFFIC_TOLERANCE:.2f} to {1 + TRAFFIC_TOLERANCE:.2f} agree"
        yield from (
            Evidence(
                "memory traffic by the GPU's counters / executed bytes",
                m.traffic.bytes_per_s / m.traffic.executed_bytes_per_s,
                within,
                "",
                0.0,
            ),
            Evidence("memory bandwidth in use by the GPU's counters", counters.dram, "share of the datasheet", "", 0.0),
            Evidence("SMs busy by the GPU's counters", counters.sm, "share of all SMs", "", 0.0),
            Evidence("tensor cores busy by the GPU's counters", counters.tensor, "share of the time", "", 0.0),
        )


def _flags(m: Measurement, regime: Regime) -> tuple[Flag, ...]:
    s, overhead_s = m.terms, m.ceilings.overhead_s or 0.0
    replayed = regime == "overhead-bound" and m.graph_step_s is not None and overhead_s > 0
    # A graph removes the host's time if it saves at least half of the overhead.
    saves = s.latency_s - (m.graph_step_s or 0.0) >= overhead_s / 2
    # A step may exceed its ceiling by the intervals of the ceiling and of the time.
    tolerances = (CEILING_TOLERANCE, m.ceilings.memory_half_width, m.ceilings.compute_half_width)
    time_share = m.cell.half_width_s / s.latency_s
    checks = (
        (Flag.KV_BOUND, regime == "memory-bound" and s.kv_s > s.weights_s),
        (Flag.INEFFICIENT_KERNELS, s.kernel_s + s.dequantise_s >= KERNEL_LOSS * s.latency_s),
        (Flag.WASTEFUL_PATH, s.redundant_s >= WASTE * s.latency_s),
        (Flag.CACHE_RESIDENT, m.cache_resident),
        (Flag.OFFLOADED, m.offloaded),
        (Flag.ABOVE_CEILING, s.attained > 1.0 + max(tolerances) + time_share),
        (Flag.POWER_CAPPED, POWER_CAP in m.cell.slowed),
        (Flag.THROTTLED, m.cell.clock_share < THROTTLED),
        (Flag.HOST, replayed and saves),
        (Flag.GRANULARITY, replayed and not saves),
    )
    return tuple(flag for flag, applies in checks if applies)


def _graph_share(m: Measurement, s: TimeBreakdown) -> NDArray[np.float64] | None:
    return None if m.graph_step_s is None else np.asarray(1 - m.graph_step_s / s.latency_s)


def _confidence(m: Measurement, regime: Regime, evidence: Sequence[Evidence], flags: Sequence[Flag]) -> Confidence:
    if regime == "inconclusive" or Flag.ABOVE_CEILING in flags:
        return "low"
    if m.cell.noise.grade == "unusable" and not holds_over_interval(m, regime):
        return "low"
    total = sum(item.weight for item in evidence if item.vote)
    agreeing = sum(item.weight for item in evidence if item.vote == regime)
    agreement = 0.5 if regime == "mixed" else agreeing / total if total else 0.0
    score = min((1 + agreement) / 2, _stability(m, regime))
    # A ceiling scaled to another clock is an estimate, and a driver may report a wrong clock.
    estimated = m.ceilings.overhead_s is None or not m.ceilings.measured or m.cell.clock_share < THROTTLED
    if m.cell.noise.grade != "quiet" or estimated or m.terms.exceeds_step:
        score = min(score, _HIGH - 0.01)
    return "high" if score >= _HIGH else "medium" if score >= _MEDIUM else "low"


def _stability(m: Measurement, regime: Regime) -> float:
    """The share of redraws that give the same label: times within their interval, ceilings within 3 %."""
    s, sigma = m.terms, m.cell.half_width_s / 2
    memory, compute, overhead, latency = np.random.default_rng(0).standard_normal((_REDRAWS, 4)).T
    latency_s = np.maximum(s.latency_s + sigma * latency, 1e-12)
    memory, compute, overhead = 1.0 + 0.03 * memory, 1.0 + 0.03 * compute, 1.0 + 0.03 * overhead
    terms: dict[str, Any] = {
        "weights_s": s.weights_s * memory,
        "kv_s": s.kv_s * memory,
        "compute_s": s.compute_s * compute,
        "redundant_s": s.redundant_s * memory,
        "overhead_s": s.overhead_s * overhead,
    }
    redrawn = replace(s.at_latency(cast(Any, latency_s)), **terms)
    return float(np.mean(_labels(m, redrawn) == regime))
