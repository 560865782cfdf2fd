"""The time breakdown: terms that add up to a step, by the sum of its operators' own roofs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic

import numpy as np

from profiler.counting.floor import A, floor_s, larger, where
from profiler.facts.dispatch import Dispatch

LAYERED = ("attention", "state")
"""Groups of operators of which each layer has one."""
LAST = "lm_head"
"""The group of a step's last operator."""


@dataclass(frozen=True)
class Demand(Generic[A]):
    """What one operator needs of the device, all its `count` instances together: in one step, or in [n] steps."""

    name: str
    group: str
    flops: A
    weight_bytes: A
    """Weights, embedding rows and logits."""
    kv_bytes: A
    compute_flops_per_s: float
    """The compute roof of the dtype that it runs in."""
    replayed_s: A | None = None
    """Time of its kernels by themselves at this very shape, where it is known."""
    replayed_half_width_s: float = 0.0
    dequantise_s: A = 0.0  # type: ignore[assignment]
    """The part of `replayed_s` that its kernels only convert between formats, timed on its own."""
    dequantise_half_width_s: float = 0.0

    def roof_s(self, memory_bytes_per_s: A) -> A:
        """The operator's own roof: the longer of its arithmetic and its traffic."""
        nbytes = self.weight_bytes + self.kv_bytes
        return floor_s(self.flops, nbytes, self.compute_flops_per_s, memory_bytes_per_s)

    def alone_s(self, memory_bytes_per_s: A) -> A:
        """Its kernels by themselves: as they were measured, else at their roof."""
        return self.roof_s(memory_bytes_per_s) if self.replayed_s is None else self.replayed_s

    def compute_bound(self, memory_bytes_per_s: A) -> Any:
        """Whether its arithmetic takes as long as its traffic, or longer; one answer per step."""
        return self.flops / self.compute_flops_per_s >= (self.weight_bytes + self.kv_bytes) / memory_bytes_per_s


@dataclass(frozen=True)
class StepRoofs:
    """The measured roofs that a step stands under."""

    memory_bytes_per_s: float
    dispatch: Dispatch | None
    """None where it was not measured."""
    overlaps: bool
    """Whether the host runs ahead of the device (CUDA), so that dispatch hides behind device time."""
    fetch_s: float = 0.0
    """Seconds that offloaded weights need to cross their links in a step, and what ranks exchange."""
    idle_share: float = 0.0
    """See `idle_share`; nothing where steps follow each other, whose device is never without work at a step's start."""
    idle_most: float = 0.0
    """Share of its dispatch for which the device may idle where the step's own time says so; see `idle_most`."""
    copy_share: float = 1.0
    """Share of the memory roof that a copy reaches."""
    memory_half_width: float = 0.0
    compute_half_width: float = 0.0
    """How far the two roofs may be off, as shares of them."""
    measured: bool = True
    """Whether both were measured; a datasheet's peak is higher than what a device reaches."""

    @property
    def dispatch_s(self) -> float | None:
        """Seconds to dispatch the whole step."""
        return self.dispatch.step_s if self.dispatch else None


def idle_share(layers: int) -> float:
    """Share of a prefill's dispatch during which a device that overlaps has nothing to do yet: nothing was issued ahead
    of it, and the host prepares masks, positions and the first products, about as much work as a layer's."""
    return 1 / (layers + 1)


def idle_most(layers: int, waits: bool) -> float:
    """Share of a step's dispatch during which a device that overlaps may have nothing to do, if all that it does was
    timed and the step took that much longer: all of it where the host waits for the device on the way (LLM.int8() asks
    for outliers in each linear, a static cache that is made anew copies numbers to the card), else twice `idle_share`:
    no host is ahead before its first products that take longer than they are prepared, which lie within a layer more.
    Nothing where steps follow each other (no `layers`) and no host waits."""
    return 1.0 if waits else 2 * idle_share(layers) if layers else 0.0


@dataclass(frozen=True, slots=True)
class StepTerms(Generic[A]):
    """The terms of one step in seconds, or of [n] steps; what none of them explains is not among them."""

    weights_s: A
    kv_s: A
    compute_s: A
    dequantise_s: A
    kernel_s: A
    avoidable_s: A
    padding_s: A
    link_s: A
    dispatch_s: A

    @property
    def device_s(self) -> A:
        """Sum over operators of max(F/P, B/W): what the work itself demands of the device."""
        return self.weights_s + self.kv_s + self.compute_s

    @property
    def busy_s(self) -> A:
        """All but dispatch. Offloaded weights are fetched before each layer can run, so that the link's time adds."""
        own_s = self.device_s + self.dequantise_s + self.kernel_s
        return own_s + self.avoidable_s + self.padding_s + self.link_s

    @property
    def total_s(self) -> A:
        return self.busy_s + self.dispatch_s


@dataclass(frozen=True, slots=True)
class HostTime(Generic[A]):
    """What the host spends on one step, or on each of [n] steps: see `Dispatch`."""

    step_s: A
    in_kernels_s: A
    in_conversions_s: A


def step_terms(
    demands: Sequence[Demand[A]],
    memory_bytes_per_s: A,
    host: HostTime[A],
    *,
    avoidable_s: A,
    padding_s: A,
    link_s: A,
    overlaps: bool,
    idle_share: A,
) -> StepTerms[A]:
    """Break steps down: what each operator demands, what its kernels lose, what is avoidable, and what the host adds.

    weights + KV + compute are the operators' own roofs. `kernel` is what their kernels took beyond them, and beyond
    dequantising, when run by themselves. Dispatch adds where nothing overlaps (CPU). Where the host runs ahead (CUDA)
    only what does not hide behind the device adds: at least `idle_share` of it, as of a prefill, whose last operator
    runs when the host has issued all others.
    """
    weights_s = kv_s = compute_s = kernel_s = dequantise_s = last_s = 0.0 * host.step_s
    replayed = False
    for demand in demands:
        by_compute, roof_s = demand.compute_bound(memory_bytes_per_s), demand.roof_s(memory_bytes_per_s)
        by_memory = np.logical_not(by_compute)
        compute_s = compute_s + where(by_compute, demand.flops / demand.compute_flops_per_s)
        weights_s = weights_s + where(by_memory, demand.weight_bytes / memory_bytes_per_s)
        kv_s = kv_s + where(by_memory, demand.kv_bytes / memory_bytes_per_s)
        if demand.replayed_s is not None:
            replayed = True
            dequantise_s = dequantise_s + demand.dequantise_s
            kernel_s = kernel_s + (demand.replayed_s - roof_s - demand.dequantise_s)
        if demand.group == LAST:
            last_s = last_s + demand.alone_s(memory_bytes_per_s)
    if replayed:
        # A replayed kernel was called from the host as well; that call is part of the step's dispatch. Where a
        # conversion is hardly more than its calls, the two, measured apart, may differ by more than there is.
        converting_s = -larger(-host.in_conversions_s, -dequantise_s)
        dequantise_s = dequantise_s - converting_s
        kernel_s = kernel_s - (host.in_kernels_s - converting_s)
    terms = StepTerms(
        weights_s, kv_s, compute_s, dequantise_s, kernel_s, avoidable_s, padding_s, link_s, dispatch_s=host.step_s
    )
    if not overlaps:
        return terms
    waits_s = host.step_s + where(idle_share > 0, last_s)
    exposed_s = larger(larger(0.0, idle_share * host.step_s), waits_s - terms.busy_s)
    return replace(terms, dispatch_s=exposed_s)


TERM_NAMES = {
    "weights_s": "weights",
    "kv_s": "KV cache",
    "compute_s": "arithmetic",
    "dequantise_s": "dequantisation",
    "kernel_s": "kernels below the roof",
    "avoidable_s": "avoidable work",
    "padding_s": "padding",
    "link_s": "link",
    "dispatch_s": "dispatch",
    "generate_s": "generate tax",
    "engine_s": "engine",
    "unexplained_s": "unexplained",
}
TERMS = tuple(TERM_NAMES)
"""The terms that add up to a measured step."""


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """A measured step in seconds; the terms add up to the measured time."""

    latency_s: float
    weights_s: float
    kv_s: float
    compute_s: float
    dequantise_s: float
    """Converting between formats: dense copies of packed weights, quantised inputs, scaled products."""
    kernel_s: float
    avoidable_s: float
    dispatch_s: float
    """What the host adds: all of its dispatch on a CPU; what does not hide behind the device on CUDA."""
    unexplained_s: float
    device_s: float
    """Sum over operators of max(F/P, B/W): what the work itself demands."""
    floor_s: float
    """The least time of this step here: the device's and the dispatch roof combined."""
    padding_s: float = 0.0
    """Positions of a padded batch that hold no token of any prompt."""
    generate_s: float = 0.0
    """What transformers' `generate` adds to the same step of our own loop; nothing where it was not called."""
    engine_s: float = 0.0
    """All that an engine which owns its model adds to what the work demands; nothing for the others."""
    link_s: float = 0.0
    """Weights that wait elsewhere crossing to the device, and results that ranks exchange."""
    replayed_share: float = 0.0
    """Share of `device_s` whose operators were run alone: of the rest, losses of kernels are not known."""
    half_widths_s: Mapping[str, float] = field(default_factory=dict)
    """How far each of TERMS may be off, from the spread of what it was measured with (about 95 %)."""

    @property
    def attained(self) -> float:
        """Share of the roofline that was attained: what the work demands over what was measured."""
        return (self.device_s + self.link_s) / self.latency_s

    @property
    def busy_s(self) -> float:
        """What the device and its link are known to take."""
        return self.device_s + self.link_s + self.dequantise_s + self.kernel_s + self.avoidable_s + self.padding_s


ADDS_UP = 0.2
"""Share of a step up to which a split may leave it unexplained, or a term lie below nothing, and still tell of it."""


def adds_up(parts: TimeBreakdown) -> bool:
    """Whether the terms tell where the time goes: what nothing explains is small, and no term is far below nothing."""
    allowed_s = ADDS_UP * parts.latency_s
    return parts.unexplained_s <= allowed_s and min(getattr(parts, term) for term in TERMS) >= -allowed_s


def at_latency(parts: TimeBreakdown, latency_s: float) -> TimeBreakdown:
    """The breakdown if the step had taken `latency_s`: known terms stay, the residual takes the difference.

    The residual is the engine's where an engine takes all that is not known, else what is unexplained.
    """
    residual = "engine_s" if parts.engine_s else "unexplained_s"
    moved = {"latency_s": latency_s, residual: getattr(parts, residual) + latency_s - parts.latency_s}
    return replace(parts, **moved)


def with_generate(parts: TimeBreakdown, tax_s: float, half_width_s: float) -> TimeBreakdown:
    """The breakdown with the overhead of `generate` taken from what is unexplained."""
    off_s = {**parts.half_widths_s, "generate_s": half_width_s}
    off_s["unexplained_s"] = math.hypot(parts.half_widths_s.get("unexplained_s", 0.0), half_width_s)
    return replace(parts, generate_s=tax_s, unexplained_s=parts.unexplained_s - tax_s, half_widths_s=off_s)


def with_engine(parts: TimeBreakdown) -> TimeBreakdown:
    """The breakdown for an engine that owns its model: what is unexplained becomes the engine's.

    That is its scheduler, its sampler, its launches, and what its kernels lose. A step above its roof has no such rest.
    """
    off_s = parts.half_widths_s.get("unexplained_s", 0.0)
    return replace(
        parts,
        engine_s=max(0.0, parts.unexplained_s),
        unexplained_s=min(0.0, parts.unexplained_s),
        half_widths_s={**parts.half_widths_s, "engine_s": off_s},
    )


def break_down(
    latency_s: float,
    demands: Sequence[Demand[float]],
    avoidable_s: float,
    roofs: StepRoofs,
    latency_half_width_s: float = 0.0,
    padding_s: float = 0.0,
) -> TimeBreakdown:
    """Break a measured step down into terms that add up to it.

    measured = weights + KV + compute + dequantisation + kernel + avoidable + padding + link + dispatch + unexplained.
    `avoidable_s` is work outside of the replayed calls that the algorithm does not need, `padding_s` what positions
    take that no prompt fills, which is in none of the others. Where the step itself took longer than its parts, a
    device that overlaps may have idled for `Roofs.idle_most` of its dispatch.
    """
    dispatch = roofs.dispatch or Dispatch(0.0, 0.0)
    host_s = dispatch.step_s
    terms = step_terms(
        demands,
        roofs.memory_bytes_per_s,
        HostTime(host_s, dispatch.in_kernels_s, dispatch.in_conversions_s),
        avoidable_s=avoidable_s,
        padding_s=padding_s,
        link_s=roofs.fetch_s,
        overlaps=roofs.overlaps,
        idle_share=roofs.idle_share,
    )
    if roofs.overlaps:
        idle_s = min(roofs.idle_most * host_s, latency_s - terms.busy_s)
        terms = replace(terms, dispatch_s=max(terms.dispatch_s, idle_s))
    seconds = {item.name: getattr(terms, item.name) for item in fields(terms)}
    seconds["unexplained_s"] = latency_s - terms.busy_s - terms.dispatch_s
    replayed_s = sum(demand.roof_s(roofs.memory_bytes_per_s) for demand in demands if demand.replayed_s is not None)
    required_s = terms.device_s + roofs.fetch_s
    return TimeBreakdown(
        latency_s=latency_s,
        **seconds,
        device_s=terms.device_s,
        floor_s=max(required_s, host_s) if roofs.overlaps else required_s + host_s,
        replayed_share=replayed_s / terms.device_s if terms.device_s else 0.0,
        half_widths_s=_half_widths(seconds, demands, roofs, latency_half_width_s),
    )


def _half_widths(
    terms: Mapping[str, float], demands: Sequence[Demand[float]], roofs: StepRoofs, latency_half_width_s: float
) -> dict[str, float]:
    """How far each term may be off: independent errors add in quadrature, those of one roof add up.

    What was replayed is known from its own time, so that an error of its roof only moves time between its terms; the
    residual inherits the errors of the replays, of what stands at a roof alone, of dispatch and of the step itself.
    """
    memory, compute = roofs.memory_half_width, roofs.compute_half_width
    replays = [demand for demand in demands if demand.replayed_s is not None]
    replay_s = math.hypot(*(demand.replayed_half_width_s for demand in replays))
    dequantise_s = math.hypot(*(demand.dequantise_half_width_s for demand in replays))
    roof_s = sum(_roof_half_width_s(demand, roofs) for demand in replays)
    unseen_s = sum(_roof_half_width_s(demand, roofs) for demand in demands if demand.replayed_s is None)
    dispatch_s = roofs.dispatch.half_width_s if roofs.dispatch and terms["dispatch_s"] else 0.0
    avoidable_s = memory * terms["avoidable_s"]
    return {
        "weights_s": memory * terms["weights_s"],
        "kv_s": memory * terms["kv_s"],
        "compute_s": compute * terms["compute_s"],
        "dequantise_s": dequantise_s,
        "kernel_s": math.hypot(replay_s, roof_s, dequantise_s),
        "avoidable_s": avoidable_s,
        "padding_s": 0.0,
        "link_s": 0.0,
        "dispatch_s": dispatch_s,
        "generate_s": 0.0,
        "engine_s": 0.0,
        "unexplained_s": math.hypot(latency_half_width_s, replay_s, unseen_s + avoidable_s, dispatch_s),
    }


def _roof_half_width_s(demand: Demand[float], roofs: StepRoofs) -> float:
    share = roofs.compute_half_width if demand.compute_bound(roofs.memory_bytes_per_s) else roofs.memory_half_width
    return share * demand.roof_s(roofs.memory_bytes_per_s)
