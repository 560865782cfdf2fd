"""`selftest`: known kernels through the same breakdown and verdict as a model."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from profiler import effort
from profiler.checks.known_kernels import KernelBench, KernelCall, KnownKernel, Label, RoofsNow, known_kernels
from profiler.device.clock import no_gc
from profiler.device.machine import Machine
from profiler.errors import RequestError
from profiler.facts.dispatch import Dispatch
from profiler.facts.roofs import Ceilings
from profiler.judge.breakdown import TERM_NAMES, Demand, StepRoofs, TimeBreakdown, break_down
from profiler.judge.regimes import DOMINANCE, Measurement, Verdict, judge_cell
from profiler.stats import Timing, timing_of

LEAST_KERNEL_ROUNDS, MOST_KERNEL_ROUNDS = 6, 15
# Of the rounds, that must give one and the same label: a single one may be hit by whatever else the machine does.
_AGREEING = 0.8
# Quartiles of a roof over the rounds further apart than this are no roof: the thresholds of a verdict bear as much.
_STEADY = 1.5
# Work that is done so much faster than its roof allows says that the roof was missed: products of another shape differ
# by less.
ABOVE_ROOF = 1.25


@dataclass(frozen=True)
class SelftestResult:
    """What a known kernel was called."""

    name: str
    expected: Label
    label: Label
    """What nearly every round and all of them together call it, under roofs that held; else inconclusive."""
    rounds: dict[str, int]
    """How many rounds gave each label."""
    verdict: Verdict
    """Of all rounds together."""
    split: TimeBreakdown
    memory_bytes_per_s: tuple[float, float]
    compute_flops_per_s: tuple[float, float]
    """The lowest and the highest roof that were seen, before it and beside it."""

    @property
    def right(self) -> bool:
        return self.label == self.expected

    @property
    def wrong(self) -> bool:
        """Whether it was called what it is not; `inconclusive` claims nothing."""
        return not self.right and self.label.regime != "inconclusive"


@dataclass(frozen=True)
class _Round:
    """A kernel, its parts and the roofs, timed within the same second."""

    roofs: RoofsNow
    whole: Timing
    hollow: Timing
    bare: Timing
    """The calls of the parts with nothing to do."""
    fetch: Timing
    parts: tuple[Timing, ...]
    conversions: tuple[Timing, ...]


def run_selftest(machine: Machine, ceilings: Ceilings) -> Iterator[SelftestResult]:
    """Time and judge one known kernel after the other.

    Memory and processor of a shared machine change from one minute to the next (42, 78, 92 and 103 GB/s in four runs
    on one virtual machine). So each kernel is timed in rounds, every one with a look at the roofs of its own, and is
    judged round by round, and as a whole under `ceilings`, which were measured before. Where these differ, or the roofs
    move too far meanwhile, it is the machine that is not known, and the answer is inconclusive.
    """
    before = RoofsNow(ceilings.memory_bytes_per_s, ceilings.compute_flops_per_s("float32"))
    with torch.inference_mode(), no_gc(), ExitStack() as stack:
        bench = KernelBench(machine, ceilings, stack)
        for kernel in known_kernels(bench):
            yield _judged(kernel, bench, before)


def _judged(kernel: KnownKernel, bench: KernelBench, before: RoofsNow) -> SelftestResult:
    rounds = _timed(kernel, bench)
    looks = [item.roofs for item in rounds]
    memory, compute = [look.memory_bytes_per_s for look in looks], [look.compute_flops_per_s for look in looks]
    beside = RoofsNow(statistics.median(memory), statistics.median(compute))
    overlaps = bench.machine.info.overlaps_dispatch
    whole_s = [item.whole.median_s for item in rounds]
    interval = statistics.quantiles(whole_s, n=4)[::2]

    def judged(item: _Round, look: RoofsNow, low_s: float, high_s: float) -> tuple[Label, Verdict, TimeBreakdown]:
        measurement = _measurement(kernel, item, look, overlaps, low_s, high_s)
        verdict = judge_cell(measurement)
        return _label(verdict, measurement.split), verdict, measurement.split

    together = _together(rounds)
    label, verdict, parts = judged(together, beside, *interval)
    known_before, _, _ = judged(together, before, *interval)
    each = Counter(judged(item, item.roofs, *2 * (item.whole.median_s,))[0] for item in rounds)
    steady = all(high <= _STEADY * low for low, _, high in map(statistics.quantiles, (memory, compute)))
    agreed = steady and label == known_before and each[label] >= _AGREEING * len(rounds)
    return SelftestResult(
        name=kernel.name,
        expected=kernel.label,
        label=label if agreed else Label("inconclusive"),
        rounds={str(name): count for name, count in each.most_common()},
        verdict=verdict,
        split=parts,
        memory_bytes_per_s=_range([before.memory_bytes_per_s, *memory]),
        compute_flops_per_s=_range([before.compute_flops_per_s, *compute]),
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _timed(kernel: KnownKernel, bench: KernelBench) -> list[_Round]:
    machine = bench.machine
    alone = [_on_device(part.call, machine) for part in kernel.parts]
    converting = [_on_device(part.convert, machine) for part in kernel.parts]
    # A part that was captured is replayed without its calls.
    bare = [None if machine.captures else part.hollow for part in kernel.parts]
    for call in (kernel.call, kernel.hollow, *alone, *converting):
        bench.times(call)
    rounds: list[_Round] = []
    deadline_s = machine.now_s() + effort.STANDARD.selftest_s
    while len(rounds) < LEAST_KERNEL_ROUNDS or (len(rounds) < MOST_KERNEL_ROUNDS and machine.now_s() < deadline_s):
        rounds.append(
            _Round(
                roofs=bench.look(),
                whole=bench.times(kernel.call),
                hollow=bench.times(kernel.hollow),
                bare=Timing(sum(bench.times(call).median_s for call in bare), 0.0),
                fetch=bench.times(kernel.fetch),
                parts=tuple(bench.times(call) for call in alone),
                conversions=tuple(bench.times(call) for call in converting),
            )
        )
    return rounds


def _on_device(call: KernelCall | None, machine: Machine) -> KernelCall | None:
    """A call without its host where the device captures calls, as a cell's kernels are replayed."""
    if call is None or not machine.captures:
        return call
    with machine.on_side_stream():
        call()
    try:
        return machine.capture(call)
    except RequestError:
        return call


def _together(rounds: Sequence[_Round]) -> _Round:
    """The medians of all rounds, with how far they may be off."""

    def over(times: Sequence[Timing]) -> Timing:
        return timing_of([item.median_s for item in times])

    return _Round(
        roofs=rounds[0].roofs,
        whole=over([item.whole for item in rounds]),
        hollow=over([item.hollow for item in rounds]),
        bare=over([item.bare for item in rounds]),
        fetch=over([item.fetch for item in rounds]),
        parts=tuple(over(times) for times in zip(*(item.parts for item in rounds), strict=True)),
        conversions=tuple(over(times) for times in zip(*(item.conversions for item in rounds), strict=True)),
    )


def _measurement(
    kernel: KnownKernel, item: _Round, look: RoofsNow, overlaps: bool, low_s: float, high_s: float
) -> Measurement:
    """A round of a kernel as a cell of a model is judged: its parts are operators, replayed alone."""
    demands = [
        Demand(
            name=kernel.name,
            group="other",
            flops=part.flops,
            weight_bytes=part.nbytes,
            kv_bytes=0.0,
            compute_flops_per_s=look.compute_flops_per_s,
            replayed_s=alone.median_s if part.call else None,
            replayed_half_width_s=alone.half_width_s,
            dequantise_s=conversion.median_s,
            dequantise_half_width_s=conversion.half_width_s,
        )
        for part, alone, conversion in zip(kernel.parts, item.parts, item.conversions, strict=True)
    ]
    dispatch = Dispatch(
        item.hollow.median_s, min(item.bare.median_s, item.hollow.median_s), half_width_s=item.hollow.half_width_s
    )
    roofs = StepRoofs(look.memory_bytes_per_s, dispatch, overlaps, fetch_s=item.fetch.median_s)
    return Measurement(
        split=break_down(item.whole.median_s, demands, 0.0, roofs, item.whole.half_width_s),
        model_flops=sum(part.flops for part in kernel.parts),
        model_bytes=sum(part.nbytes for part in kernel.parts),
        compute_flops_per_s=look.compute_flops_per_s,
        roofs=roofs,
        latency_low_s=low_s,
        latency_high_s=high_s,
    )


def _label(verdict: Verdict, parts: TimeBreakdown) -> Label:
    if parts.attained > ABOVE_ROOF:
        return Label("inconclusive")
    if verdict.regime != "kernel-bound":
        return Label(verdict.regime)
    terms = {"dequantise_s": parts.dequantise_s, "kernel_s": parts.kernel_s}
    cause = max(terms, key=lambda name: terms[name])
    if terms[cause] < DOMINANCE * min(terms.values()):
        return Label("inconclusive")
    return Label(verdict.regime, TERM_NAMES[cause])
