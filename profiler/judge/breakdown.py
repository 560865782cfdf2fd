"""The time breakdown of a step: terms that add up to its time, from the ceilings of its operators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic

import numpy as np

from profiler.counting.floor import A, floor_s, larger, where
from profiler.facts.operators import COPIES, Cause
from profiler.facts.overhead import Overhead

LAST = "lm_head"
"""The group of a step's last operator."""


@dataclass(frozen=True)
class Demand(Generic[A]):
    """The work of one operator, summed over its `count` instances: in one step, or in [n] steps."""

    name: str
    group: str
    flops: A
    weight_bytes: A
    """Weights, embedding rows and logits."""
    kv_bytes: A
    compute_flops_per_s: float
    """The compute ceiling of the operator's dtype."""
    replayed_s: A | None = None
    """Measured time of its kernels in isolation at this shape; None if they were not replayed."""
    replayed_half_width_s: float = 0.0
    dequantise_s: A = 0.0  # type: ignore[assignment]
    """The part of `replayed_s` that only converts between formats; it is timed separately."""
    dequantise_half_width_s: float = 0.0

    def ceiling_s(self, memory_bytes_per_s: A) -> A:
        """Seconds at the operator's ceiling: the longer of its arithmetic and its traffic."""
        return floor_s(self.flops, self.weight_bytes + self.kv_bytes, self.compute_flops_per_s, memory_bytes_per_s)

    def alone_s(self, memory_bytes_per_s: A) -> A:
        """Seconds of its kernels in isolation: as replayed, else at their ceiling."""
        return self.ceiling_s(memory_bytes_per_s) if self.replayed_s is None else self.replayed_s

    def compute_bound(self, memory_bytes_per_s: A) -> Any:
        """Whether its arithmetic takes at least as long as its traffic: bool, or bool[n]."""
        return self.flops / self.compute_flops_per_s >= (self.weight_bytes + self.kv_bytes) / memory_bytes_per_s


@dataclass(frozen=True)
class StepCeilings:
    """The measured ceilings of a step."""

    memory_bytes_per_s: float
    overhead: Overhead | None
    """None if it was not measured."""
    overlaps: bool
    """Whether the host runs ahead of the device (CUDA), so overhead hides under device time."""
    fetch_s: float = 0.0
    """Seconds per step in which offloaded weights and the results of ranks cross their links."""
    issue_s: float | None = None
    """Seconds in which the host issued this step, measured in the same loop; None if it may have waited for the
    device."""
    idle_share: float = 0.0
    """See the function `idle_share`; 0 in a decode, where the step before keeps the device busy at the start."""
    idle_most: float = 0.0
    """See the function `idle_most`: the largest share of overhead for which the device may idle."""
    memory_half_width: float = 0.0
    compute_half_width: float = 0.0
    """Half widths of the two ceilings' intervals, as shares of the ceilings."""
    measured: bool = True
    """Whether both were measured beyond all caches. A datasheet's peak, or a cache, is faster than the memory."""

    @property
    def overhead_s(self) -> float | None:
        """Seconds to launch the whole step."""
        return self.overhead.step_s if self.overhead else None


def is_layer(group: str, operator: str) -> bool:
    """Whether there is one such operator per layer of the model, besides the rotary embedding of attention."""
    return group in ("attention", "state") and not operator.endswith(".rotary")


def idle_share(layers: int) -> float:
    """Lower bound on exposed overhead in a prefill on an overlapping device, as a share of all overhead.

    Nothing was issued before, so the device idles while the host prepares masks, positions and the first matmuls.
    That is about the work of one layer.
    """
    return 1 / (layers + 1)


def idle_most(layers: int, waits: bool) -> float:
    """Upper bound on exposed overhead on an overlapping device, as a share of all overhead.

    It is 1 if the host waits for the device within the step: LLM.int8() asks for outliers in each linear, and a new
    static cache copies numbers to the GPU. Otherwise it is twice `idle_share`: the host is ahead once a matmul takes
    longer than its preparation, which happens within one more layer. It is 0 in a decode (no `layers`) without waits.
    """
    return 1.0 if waits else 2 * idle_share(layers) if layers else 0.0


@dataclass(frozen=True, slots=True)
class StepTerms(Generic[A]):
    """The terms of one step in seconds, or of [n] steps, without the unexplained rest."""

    weights_s: A
    kv_s: A
    compute_s: A
    dequantise_s: A
    """Converting between formats: dense copies of packed weights, quantised inputs, scaled matmuls."""
    kernel_s: A
    redundant_s: A
    padding_s: A
    """Positions of a padded batch that hold no token of any prompt."""
    link_s: A
    """Transfer of offloaded weights to the device, and of results between ranks."""
    overhead_s: A
    """Time that the host adds: all overhead on a CPU, the part that the device does not hide on CUDA."""

    @property
    def device_s(self) -> A:
        """Sum over operators of max(F/P, B/W): the time that the work needs at the ceilings."""
        return self.weights_s + self.kv_s + self.compute_s

    @property
    def busy_s(self) -> A:
        """All terms but overhead. A layer waits for its offloaded weights, so the link's time is included."""
        return self.device_s + self.dequantise_s + self.kernel_s + self.redundant_s + self.padding_s + self.link_s

    @property
    def total_s(self) -> A:
        return self.busy_s + self.overhead_s


@dataclass(frozen=True, slots=True)
class HostTime(Generic[A]):
    """Seconds that the host spends on one step, or on each of [n] steps; see `Overhead`."""

    step_s: A
    in_kernels_s: A
    in_conversions_s: A


def step_terms(
    demands: Sequence[Demand[A]],
    memory_bytes_per_s: A,
    host: HostTime[A],
    *,
    redundant_s: A,
    padding_s: A,
    link_s: A,
    overlaps: bool,
    idle_share: A,
) -> StepTerms[A]:
    """Break steps down into operators' ceilings, losses of kernels, redundant work and overhead.

    weights + KV + compute are the operators' ceilings. `kernel` is the time of replayed kernels beyond their ceilings
    and their dequantisation. Overhead adds to the step without overlap (CPU). With overlap (CUDA), only the part that
    exceeds the device's time does, and at least `idle_share` of it. In a prefill, the last operator starts only after
    the host has issued all others.
    """
    weights_s = kv_s = compute_s = kernel_s = dequantise_s = last_s = 0.0 * host.step_s
    for demand in demands:
        by_compute, ceiling_s = demand.compute_bound(memory_bytes_per_s), demand.ceiling_s(memory_bytes_per_s)
        by_memory = np.logical_not(by_compute)
        compute_s = compute_s + where(by_compute, demand.flops / demand.compute_flops_per_s)
        weights_s = weights_s + where(by_memory, demand.weight_bytes / memory_bytes_per_s)
        kv_s = kv_s + where(by_memory, demand.kv_bytes / memory_bytes_per_s)
        if demand.replayed_s is not None:
            dequantise_s = dequantise_s + demand.dequantise_s
            kernel_s = kernel_s + (demand.replayed_s - ceiling_s - demand.dequantise_s)
        if demand.group == LAST:
            last_s = last_s + demand.alone_s(memory_bytes_per_s)
    if any(demand.replayed_s is not None for demand in demands):
        # Replays include the host's calls, which are part of the step's overhead too. Calls and conversions are
        # measured separately, so the calls of a short conversion may seem longer than the conversion.
        calls_s = -larger(-host.in_conversions_s, -dequantise_s)
        dequantise_s = dequantise_s - calls_s
        kernel_s = kernel_s - (host.in_kernels_s - calls_s)
    terms = StepTerms(
        weights_s, kv_s, compute_s, dequantise_s, kernel_s, redundant_s, padding_s, link_s, overhead_s=host.step_s
    )
    if not overlaps:
        return terms
    waits_s = host.step_s + where(idle_share > 0, last_s)
    return replace(terms, overhead_s=larger(larger(0.0, idle_share * host.step_s), waits_s - terms.busy_s))


def redundant_by_cause_s(work: Any, flops_per_s: float, bytes_per_s: A, copy_share: float) -> dict[Cause, A]:
    """Seconds of an operator's redundant work by cause; `work` is its `OperatorWork`, or its column of [n] steps.

    Data passes between kernels at `bytes_per_s`. A cache is copied at `copy_share` of that.
    """
    flops, nbytes = work.redundant_flops, {Cause.OPERANDS: work.activation_bytes, **work.redundant_bytes}
    return {
        cause: floor_s(
            flops.get(cause, 0.0),
            nbytes.get(cause, 0.0),
            flops_per_s,
            copy_share * bytes_per_s if cause in COPIES else bytes_per_s,
        )
        for cause in {**nbytes, **flops}
    }


@dataclass(frozen=True)
class Term:
    """A term of the time breakdown: the words and colours of sentences, tables, pages and pictures."""

    name: str
    """In tables and legends."""
    clause: str
    """Before its time in a sentence: subject and verb."""
    color: str
    """In pictures, as `#rrggbb`: the colour-blind safe colours of Okabe and Ito, then of Paul Tol."""
    hatch: str
    """In pictures, since colour is never the only distinction."""
    page_color: str
    """Its colour on a page, by the name of a variable in style.css, which has a light and a dark one."""
    screen_color: str
    """On a terminal."""
    meaning: str
    """In the glossary, after its name and a colon."""

    @property
    def short(self) -> str:
        """Its name where a line is short, which the glossary explains."""
        return self.name.removesuffix(" below the ceiling")


WHY_TOO_FAST = "a ceiling is too low or a count too high"
"""Why a step takes less than its bytes and FLOPs at the ceilings, so that a negative part is left unexplained."""

TERMS = {
    "weights_s": Term(
        "weights", "weights need", "#0072B2", "", "blue", "blue",
        "the time to read the weights at the measured ceilings; a term of the time breakdown.",
    ),
    "kv_s": Term(
        "KV cache", "the KV cache needs", "#56B4E9", "//", "sky", "cyan",
        "keys and values of all earlier tokens, read whole at every decode step.",
    ),
    "compute_s": Term(
        "arithmetic", "arithmetic needs", "#E69F00", "", "amber", "yellow",
        "the time of operators that the compute ceiling limits; a term of the time breakdown.",
    ),
    "dequantise_s": Term(
        "dequantisation", "dequantising takes", "#009E73", "oo", "green", "green",
        "converting formats in a matmul (dense copies of packed weights, scaling of int32 results), timed separately.",
    ),
    "kernel_s": Term(
        "kernels below the ceiling", "kernels lose", "#D55E00", "\\\\", "vermilion", "red",
        "the time of the library's kernels above their own ceilings at these shapes, measured by replaying each.",
    ),
    "redundant_s": Term(
        "redundant work", "redundant work takes", "#F0E442", "", "yellow", "bright_yellow",
        "the library's work beyond the algorithm's minimum: copies, conversions, newly allocated memory.",
    ),
    "padding_s": Term(
        "padding", "padding takes", "#AA4499", "++", "plum", "bright_red",
        "positions without a token in a batch of unequal prompts: computed in a prefill, read again by every step.",
    ),
    "link_s": Term(
        "link", "the link takes", "#000000", "--", "ink", "default",
        "the connection between the device and the host, the disk or another GPU.",
    ),
    "overhead_s": Term(
        "overhead", "overhead takes", "#CC79A7", "..", "pink", "magenta",
        "the CPU's time (Python, transformers, torch) to start a step's operators; measured on the overhead model.",
    ),
    "generate_s": Term(
        "overhead of generate", "generate adds", "#882255", "oo", "wine", "bright_magenta",
        "the time by which a step of transformers' own generate exceeds one of the profiler's loop, measured in turns.",
    ),
    "engine_s": Term(
        "engine", "the engine takes", "#44AA99", "//", "teal", "bright_cyan",
        "time added by an engine that owns its model (vLLM): scheduler, sampler, launches, losses of hidden kernels.",
    ),
    "unexplained_s": Term(
        "unexplained", "unexplained is", "#999999", "xx", "grey", "bright_black",
        f"the measured time less all terms of the breakdown; negative if {WHY_TOO_FAST}.",
    ),
}  # fmt: skip
"""The terms that add up to a measured step, by their columns of cells.csv."""
TERM_NAMES = {column: term.name for column, term in TERMS.items()}


ADDS_UP = 0.2
"""The largest unexplained or negative share of a step with which its breakdown is still usable."""
EXCEEDS = 0.10
"""Share of a step by which its parts, each measured by itself, may exceed it; kernels of one stream cannot overlap."""


@dataclass(frozen=True, slots=True)
class TimeBreakdown(StepTerms[float]):
    """A measured step in seconds; the terms add up to the measured time."""

    latency_s: float
    unexplained_s: float
    floor_s: float
    """Lower bound of this step on this device, from its ceilings and its overhead."""
    generate_s: float = 0.0
    """Overhead of transformers' `generate` over a step of the profiler's loop; 0 if it was not called."""
    engine_s: float = 0.0
    """Time beyond the ceilings in an engine that loads the model itself; 0 for other engines."""
    replayed_share: float = 0.0
    """Share of `device_s` whose operators were replayed; the losses of other kernels are unknown."""
    host_pace_s: float = 0.0
    """Least seconds of a step by its host, if a device overlaps it: all overhead, and a prefill's last operator."""
    half_widths_s: Mapping[str, float] = field(default_factory=dict)
    """Half width of the interval (about 95 %) of each of TERMS, from the spread of its measurements."""

    @property
    def attained(self) -> float:
        """Attained share of the roofline: the time that the work needs at the ceilings over the measured time."""
        return (self.device_s + self.link_s) / self.latency_s

    @property
    def adds_up(self) -> bool:
        """Whether it is usable: little of the step is unexplained, and no term is far below zero."""
        allowed_s = ADDS_UP * self.latency_s
        return self.unexplained_s <= allowed_s and min(getattr(self, term) for term in TERMS) >= -allowed_s

    @property
    def exceeds_step(self) -> bool:
        """Whether the parts of the step, each measured by itself, take clearly longer than the whole step."""
        return -self.unexplained_s > EXCEEDS * self.latency_s

    def at_latency(self, latency_s: float) -> TimeBreakdown:
        """The breakdown if the step had taken `latency_s`: the engine's term or the rest takes the difference."""
        residual = "engine_s" if self.engine_s else "unexplained_s"
        return replace(self, latency_s=latency_s, **{residual: getattr(self, residual) + latency_s - self.latency_s})

    def with_generate(self, added_s: float, half_width_s: float) -> TimeBreakdown:
        """The breakdown with the overhead of `generate` subtracted from the unexplained rest."""
        rest_off_s = math.hypot(self.half_widths_s.get("unexplained_s", 0.0), half_width_s)
        off_s = {**self.half_widths_s, "generate_s": half_width_s, "unexplained_s": rest_off_s}
        return replace(self, generate_s=added_s, unexplained_s=self.unexplained_s - added_s, half_widths_s=off_s)

    def with_trace(self, traced_busy_s: float) -> TimeBreakdown:
        """The breakdown of a step without a replay of small kernels: what its trace saw work longer is theirs."""
        more_s = min(max(0.0, self.unexplained_s), max(0.0, traced_busy_s - self.busy_s))
        return replace(self, kernel_s=self.kernel_s + more_s, unexplained_s=self.unexplained_s - more_s)

    def with_engine(self) -> TimeBreakdown:
        """The breakdown for an engine that loads the model itself: its scheduler, sampler and kernels take the rest."""
        return replace(
            self,
            engine_s=max(0.0, self.unexplained_s),
            unexplained_s=min(0.0, self.unexplained_s),
            half_widths_s={**self.half_widths_s, "engine_s": self.half_widths_s.get("unexplained_s", 0.0)},
        )


def break_down(
    latency_s: float,
    demands: Sequence[Demand[float]],
    redundant_s: float,
    ceilings: StepCeilings,
    latency_half_width_s: float = 0.0,
    padding_s: float = 0.0,
) -> TimeBreakdown:
    """Break a measured step down into terms that add up to it.

    `redundant_s` is work outside of replayed calls that the algorithm does not need. `padding_s` is work on positions
    without a token, which no other term includes.
    """
    overhead = ceilings.overhead or Overhead(0.0, 0.0)
    host_s = overhead.step_s
    terms = step_terms(
        demands,
        ceilings.memory_bytes_per_s,
        HostTime(host_s, overhead.in_kernels_s, overhead.in_conversions_s),
        redundant_s=redundant_s,
        padding_s=padding_s,
        link_s=ceilings.fetch_s,
        overlaps=ceilings.overlaps,
        idle_share=ceilings.idle_share,
    )
    if ceilings.overlaps:
        terms = replace(terms, overhead_s=_idle_s(latency_s, terms, host_s, ceilings))
    seconds = {item.name: getattr(terms, item.name) for item in fields(terms)}
    seconds["unexplained_s"] = latency_s - terms.busy_s - terms.overhead_s
    replayed_s = sum(
        demand.ceiling_s(ceilings.memory_bytes_per_s) for demand in demands if demand.replayed_s is not None
    )
    required_s = terms.device_s + ceilings.fetch_s
    # The overhead model of a recorded graph has kernels in its overhead; its issue shows that its host is done at once.
    pace_s = min(host_s, host_s if ceilings.issue_s is None else ceilings.issue_s)
    if ceilings.idle_share:
        pace_s += sum(demand.alone_s(ceilings.memory_bytes_per_s) for demand in demands if demand.group == LAST)
    return TimeBreakdown(
        latency_s=latency_s,
        **seconds,
        floor_s=max(required_s, host_s) if ceilings.overlaps else required_s + host_s,
        host_pace_s=pace_s if ceilings.overlaps else 0.0,
        replayed_share=replayed_s / terms.device_s if terms.device_s else 0.0,
        half_widths_s=_half_widths(seconds, demands, ceilings, latency_half_width_s),
    )


def _idle_s(latency_s: float, terms: StepTerms[float], host_s: float, ceilings: StepCeilings) -> float:
    """Seconds of overhead for which an overlapping device idled in a step.

    If the step took longer than its parts, that is up to `StepCeilings.idle_most` of its overhead, or all of it if it
    takes longer than the parts, and not more than the rest. Where the host sets the pace, the device idled while the
    host issued this very step, which may have been slower than the overhead model's.
    """
    left_s = max(0.0, latency_s - terms.busy_s)
    most = max(ceilings.idle_most, host_s > terms.busy_s) if ceilings.idle_most else 0.0
    idle_s = max(terms.overhead_s, min(most * host_s, left_s))
    if ceilings.issue_s is not None and host_s > terms.busy_s:
        idle_s = max(idle_s, min(ceilings.issue_s, latency_s) - terms.busy_s)
    return min(idle_s, left_s) if ceilings.idle_most else idle_s


def _half_widths(
    terms: Mapping[str, float], demands: Sequence[Demand[float]], ceilings: StepCeilings, latency_half_width_s: float
) -> dict[str, float]:
    """Half width of each term in seconds: independent errors add in quadrature, errors of one ceiling add linearly.

    The time of a replayed operator is measured, so an error of its ceiling only moves time between its terms. The
    residual has the errors of the replays, of operators known by their ceiling only, of overhead and of the step.
    """
    memory, compute = ceilings.memory_half_width, ceilings.compute_half_width
    replays = [demand for demand in demands if demand.replayed_s is not None]
    replay_s = math.hypot(*(demand.replayed_half_width_s for demand in replays))
    dequantise_s = math.hypot(*(demand.dequantise_half_width_s for demand in replays))
    ceiling_s = sum(_ceiling_half_width_s(demand, ceilings) for demand in replays)
    unreplayed_s = sum(_ceiling_half_width_s(demand, ceilings) for demand in demands if demand.replayed_s is None)
    overhead_s = ceilings.overhead.half_width_s if ceilings.overhead and terms["overhead_s"] else 0.0
    redundant_s = memory * terms["redundant_s"]
    return {
        **dict.fromkeys(TERMS, 0.0),
        "weights_s": memory * terms["weights_s"],
        "kv_s": memory * terms["kv_s"],
        "compute_s": compute * terms["compute_s"],
        "dequantise_s": dequantise_s,
        "kernel_s": math.hypot(replay_s, ceiling_s, dequantise_s),
        "redundant_s": redundant_s,
        "overhead_s": overhead_s,
        "unexplained_s": math.hypot(latency_half_width_s, replay_s, unreplayed_s + redundant_s, overhead_s),
    }


def _ceiling_half_width_s(demand: Demand[float], ceilings: StepCeilings) -> float:
    by_compute = demand.compute_bound(ceilings.memory_bytes_per_s)
    share = ceilings.compute_half_width if by_compute else ceilings.memory_half_width
    return share * demand.ceiling_s(ceilings.memory_bytes_per_s)
