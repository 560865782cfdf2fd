"""The regime of a cell: a label, how sure it is, and the evidence for and against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import numpy as np

from profiler.diagnosis.step_time import Roofs, Split

Regime = Literal["compute-bound", "memory-bound", "overhead-bound", "mixed", "inconclusive"]
Vote = Literal["compute-bound", "memory-bound", "overhead-bound", ""]
Confidence = Literal["high", "medium", "low"]

# Thresholds, each with its reason. They are choices: isolated kernels reach 0.85 to 0.97 of a measured roof, whole
# models of good engines 0.70 to 0.80 of the memory roof and 0.6 to 0.9 of the compute roof, while a launch-bound
# step on an H100 shows 0.27 (gpt-fast README; arXiv 2605.30571).
MEMORY_SHARE = 0.60
"""Of the device's time, explained by bytes at the measured bandwidth: midway between those two clusters."""
MEMORY_SHARE_AGAINST = 0.35
COMPUTE_SHARE = 0.50
"""Of the device's time, explained by FLOPs at the measured rate: unfused prefills reach 0.35 to 0.6."""
COMPUTE_SHARE_AGAINST = 0.25
OVERHEAD_SHARE_ADDED = 0.50
"""Dispatch over step where the two add up (CPU): half of the step."""
OVERHEAD_SHARE_HIDDEN = 0.80
"""Dispatch over step where it can hide behind the device (CUDA): the host then sets the pace."""
OVERHEAD_AGAINST = 0.25
RIDGE_BAND = 1.5
"""Intensity this far beyond the ridge points to one side; nearer, both roofs matter."""
DOMINANCE = 1.25
"""How much larger one share must be than the other to decide alone."""
KERNEL_LOSS = 0.25
"""Share of the step that the library's kernels lose at these shapes (dequantising too), from which they are named."""
WASTE = 0.20
"""Share of the step in avoidable work, from which the path is named."""

ISSUE_AGAINST = 0.5
"""Share of a step until the host had submitted it, below which the host was not what the device waited for."""
GRAPH_SAVES = 0.2
"""Share of a step that a graph replay saves, from which the host set the pace (an H100 at batch 1: 1.26x)."""

SM_IDLE = 0.5
"""Share of the time with any SM active, below which the device waits for the host most of the time."""

_SIDES: dict[str, Vote] = {"memory": "memory-bound", "compute": "compute-bound"}
_HIGH, _MEDIUM = 0.85, 0.65
_REDRAWS = 200


class Flag(StrEnum):
    """What a label alone does not say of a cell."""

    KV_BOUND = "kv-bound"
    INEFFICIENT_KERNELS = "inefficient-kernels"
    WASTEFUL_PATH = "wasteful-path"
    CACHE_RESIDENT = "cache-resident"
    OFFLOADED = "offloaded"
    ABOVE_ROOF = "above-roof"
    POWER_CAPPED = "power-capped"
    HOST = "host"
    """Of an overhead-bound step where a graph was replayed: a graph removes it."""
    GRANULARITY = "granularity"
    """Of such a step: only fusing does."""


@dataclass(frozen=True)
class Evidence:
    """One signal: its figure, the threshold it was held against, and which way it points (or nowhere)."""

    signal: str
    value: float
    threshold: str
    vote: Vote
    weight: float


@dataclass(frozen=True)
class Measurement:
    """All that a verdict is drawn from."""

    split: Split
    model_flops: float
    model_bytes: float
    compute_flops_per_s: float
    roofs: Roofs
    latency_low_s: float
    latency_high_s: float
    noise: str = "quiet"
    offloaded: bool = False
    cache_resident: bool = False
    issue_s: float | None = None
    """Seconds until the host had submitted a step, where it runs ahead of the device."""
    graph_step_s: float | None = None
    """The same step replayed as a CUDA graph: what is left of it without the host."""
    batch_side: str = ""
    """What doubling the batch speaks for: `memory`, `compute`, or nothing clear."""
    depth_side: str = ""
    """What doubling the prompt (prefill) or the context (decode) speaks for."""
    sm_active: float | None = None
    memory_active: float | None = None
    """NVML's shares of the time in which any SM, or the memory, was active at all."""
    power_capped: bool = False


@dataclass(frozen=True)
class Verdict:
    """What bounds a cell."""

    regime: Regime
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    flags: tuple[Flag, ...]

    @property
    def conflicts(self) -> tuple[Evidence, ...]:
        """Evidence that points elsewhere than the label."""
        return tuple(item for item in self.evidence if item.vote and item.vote != self.regime)


def judge(measurement: Measurement) -> Verdict:
    """The regime of one cell.

    The label follows the largest share of the step's time; the confidence falls with votes against it, with the
    width of the interval (the rule is run again on redrawn times and roofs), and with noise.
    """
    evidence = _evidence(measurement)
    regime = _label(measurement)
    flags = _flags(measurement, regime)
    return Verdict(regime, _confidence(measurement, regime, evidence), evidence, flags)


def _shares(m: Measurement) -> tuple[float, float, float]:
    """(memory, compute, overhead) shares: bytes and FLOPs of the device's own time, dispatch of the whole step."""
    s = m.split
    device_time = s.latency_s if m.roofs.overlaps else max(s.latency_s - (m.roofs.dispatch_s or 0.0), 1e-12)
    memory = (s.weights_s + s.kv_s) / device_time
    compute = s.compute_s / device_time
    overhead = (m.roofs.dispatch_s or 0.0) / s.latency_s
    return memory, compute, overhead


def _label(m: Measurement) -> Regime:
    if m.offloaded or m.noise == "unusable":
        return "inconclusive"
    memory, compute, overhead = _shares(m)
    if overhead >= (OVERHEAD_SHARE_HIDDEN if m.roofs.overlaps else OVERHEAD_SHARE_ADDED):
        return "overhead-bound"
    larger, smaller = max(memory, compute), min(memory, compute)
    reaches = memory >= MEMORY_SHARE if memory > compute else compute >= COMPUTE_SHARE
    if reaches:
        if larger < DOMINANCE * smaller:
            return "mixed"
        return "memory-bound" if memory > compute else "compute-bound"
    s = m.split
    moved = (s.weights_s + s.kv_s + s.avoidable_s) / s.latency_s
    if moved >= MEMORY_SHARE and s.compute_s < s.weights_s + s.kv_s + s.avoidable_s:
        return "memory-bound"
    parts = sorted((memory, compute, overhead), reverse=True)
    if parts[0] + parts[1] >= MEMORY_SHARE and parts[1] * DOMINANCE >= MEMORY_SHARE / 2:
        return "mixed"
    return "inconclusive"


def _evidence(m: Measurement) -> tuple[Evidence, ...]:
    memory, compute, overhead = _shares(m)
    ridge = m.compute_flops_per_s / m.roofs.memory_bytes_per_s
    intensity = m.model_flops / m.model_bytes
    hidden = OVERHEAD_SHARE_HIDDEN if m.roofs.overlaps else OVERHEAD_SHARE_ADDED
    items = [
        Evidence(
            "intensity / measured ridge",
            intensity / ridge,
            f">= {RIDGE_BAND} compute, <= {1 / RIDGE_BAND:.2f} memory",
            "compute-bound"
            if intensity >= RIDGE_BAND * ridge
            else "memory-bound"
            if intensity <= ridge / RIDGE_BAND
            else "",
            1.0,
        ),
        Evidence(
            "share of the device's time that bytes at the measured bandwidth need",
            memory,
            f">= {MEMORY_SHARE} memory",
            "memory-bound" if memory >= MEMORY_SHARE else "",
            2.0,
        ),
        Evidence(
            "share of the device's time that FLOPs at the measured rate need",
            compute,
            f">= {COMPUTE_SHARE} compute",
            "compute-bound" if compute >= COMPUTE_SHARE else "",
            2.0,
        ),
    ]
    if m.roofs.dispatch_s is not None:
        items.append(
            Evidence(
                "dispatch (hollow twin) / step",
                overhead,
                f">= {hidden} overhead",
                "overhead-bound" if overhead >= hidden else "",
                2.0,
            )
        )
    return (*items, *_optional_evidence(m, memory, compute, overhead))


def _optional_evidence(m: Measurement, memory: float, compute: float, overhead: float) -> list[Evidence]:
    """Signals that only some runs have; a missing one changes nothing."""
    device_side: Vote = "memory-bound" if memory >= compute else "compute-bound"
    items = []
    if m.issue_s is not None and m.roofs.overlaps:
        share = m.issue_s / m.split.latency_s
        # A high share proves nothing: once the launch queue is full, the host waits for the device.
        vote: Vote = device_side if share < ISSUE_AGAINST else ""
        items.append(Evidence("host issue time / step", share, f"< {ISSUE_AGAINST} not overhead", vote, 1.0))
    if m.graph_step_s is not None:
        saved = 1 - m.graph_step_s / m.split.latency_s
        vote = "overhead-bound" if saved >= GRAPH_SAVES else device_side if saved < GRAPH_SAVES / 4 else ""
        items.append(
            Evidence("share of the step that a CUDA graph saves", saved, f">= {GRAPH_SAVES} overhead", vote, 2.0)
        )
    for what, side in (("batch", m.batch_side), ("prompt or context", m.depth_side)):
        if side in _SIDES:
            # A flat time speaks for bytes only where dispatch, which is as flat, is small.
            vote = _SIDES[side] if side == "compute" or overhead < OVERHEAD_AGAINST else ""
            items.append(Evidence(f"doubling the {what}", float(side == "compute"), "slope nearer to", vote, 1.0))
    if m.sm_active is not None:
        # One warp on one SM counts as active, so that a high share proves nothing; a low one is an idle device.
        vote = "overhead-bound" if m.sm_active < SM_IDLE else ""
        items.append(Evidence("time with any SM active (NVML)", m.sm_active, f"< {SM_IDLE} overhead", vote, 1.0))
    if m.memory_active is not None:
        items.append(Evidence("time with memory active (NVML)", m.memory_active, "no share of bandwidth", "", 0.0))
    return items


def _flags(m: Measurement, regime: Regime) -> tuple[Flag, ...]:
    s = m.split
    checks = (
        (Flag.KV_BOUND, regime == "memory-bound" and s.kv_s > s.weights_s),
        (Flag.INEFFICIENT_KERNELS, s.kernel_s + s.dequantise_s >= KERNEL_LOSS * s.latency_s),
        (Flag.WASTEFUL_PATH, s.avoidable_s >= WASTE * s.latency_s),
        (Flag.CACHE_RESIDENT, m.cache_resident),
        (Flag.OFFLOADED, m.offloaded),
        (Flag.ABOVE_ROOF, s.attained > 1.0),
        (Flag.POWER_CAPPED, m.power_capped),
        (Flag.HOST, regime == "overhead-bound" and _graph_saves(m) is True),
        (Flag.GRANULARITY, regime == "overhead-bound" and _graph_saves(m) is False),
    )
    return tuple(name for name, holds in checks if holds)


def _graph_saves(m: Measurement) -> bool | None:
    """Whether a graph removes at least half of the dispatch; None where none was replayed."""
    if m.graph_step_s is None or not m.roofs.dispatch_s:
        return None
    return m.split.latency_s - m.graph_step_s >= m.roofs.dispatch_s / 2


def _confidence(m: Measurement, regime: Regime, evidence: Sequence[Evidence]) -> Confidence:
    if regime == "inconclusive":
        return "low"
    voting = [item for item in evidence if item.vote]
    total = sum(item.weight for item in voting)
    if regime == "mixed":
        agreement = 0.5
    else:
        agreement = sum(item.weight for item in voting if item.vote == regime) / total if total else 0.0
    score = min((1 + agreement) / 2, _stability(m, regime))
    if m.noise != "quiet" or m.roofs.dispatch_s is None:
        score = min(score, _HIGH - 0.01)
    return "high" if score >= _HIGH else "medium" if score >= _MEDIUM else "low"


def _stability(m: Measurement, regime: Regime) -> float:
    """Share of redraws, within the interval of the time and 3 % of each roof, that give the same label."""
    rng = np.random.default_rng(0)
    sigma = max(m.latency_high_s - m.latency_low_s, 0.0) / 4
    same = 0
    for _ in range(_REDRAWS):
        s = m.split
        latency_s = max(rng.normal(s.latency_s, sigma), 1e-12)
        memory, compute, dispatch = rng.normal(1.0, 0.03, size=3)
        redrawn = replace(
            s,
            latency_s=latency_s,
            weights_s=s.weights_s * memory,
            kv_s=s.kv_s * memory,
            avoidable_s=s.avoidable_s * memory,
            compute_s=s.compute_s * compute,
        )
        host = m.roofs.dispatch
        roofs = m.roofs if host is None else replace(m.roofs, dispatch=replace(host, step_s=host.step_s * dispatch))
        same += _label(replace(m, split=redrawn, roofs=roofs)) == regime
    return same / _REDRAWS
