"""`selftest`: judge kernels with a known label by the same time breakdown and rules as a model."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from profiler.facts.telemetry import Contention
from profiler.judge.breakdown import TERM_NAMES, Demand, StepRoofs, TimeBreakdown, break_down
from profiler.judge.regimes import DOMINANCE, Evidence, Measurement, Verdict, judge_cell
from profiler.report.blocks import Lines, Section, text_table
from profiler.stats import Timing, timing_of
from profiler.units import duration, percent, scaled

LEAST_KERNEL_ROUNDS, MOST_KERNEL_ROUNDS = 6, 15
# Share of rounds that must give the same label; other work on the machine may disturb a single round.
_AGREEING = 0.8
# Largest ratio of a roof's upper to its lower quartile over the rounds; the thresholds of a verdict tolerate as much.
_STEADY = 1.5
# A kernel that exceeds its roof by this factor shows that the roof is wrong; products of other shapes differ by less.
ABOVE_ROOF = 1.25


@dataclass(frozen=True)
class SelftestRow:
    """One known kernel and its label; `roofscope selftest --format json` is a list of these."""

    name: str
    expected: str
    expected_cause: str
    regime: str
    cause: str
    confidence: str
    right: bool
    wrong: bool
    """Whether the label is false; `inconclusive` is not."""
    rounds: Mapping[str, int]
    """How many rounds gave each label."""
    latency_s: float
    split: TimeBreakdown
    """The kernel's time breakdown."""
    memory_bytes_per_s: tuple[float, float]
    compute_flops_per_s: tuple[float, float]
    """The lowest and the highest roof that were measured before and during its rounds."""
    signals: Sequence[Evidence]

    @property
    def label(self) -> str:
        return str(Label(self.regime, self.cause))

    @property
    def expected_label(self) -> str:
        return str(Label(self.expected, self.expected_cause))


@dataclass(frozen=True)
class _Round:
    """The roofs, and the seconds of the calls of `_calls`, measured within the same second."""

    roofs: RoofsNow
    seconds: Sequence[float]


def run_selftest(machine: Machine, ceilings: Ceilings) -> Iterator[SelftestRow]:
    """Time and judge the known kernels, one after the other.

    The roofs of a shared machine change from minute to minute (memory: 42, 78, 92 and 103 GB/s in four runs on one
    virtual machine). So each kernel is timed in rounds, and each round measures the roofs again. The kernel is judged
    in every round, and over all rounds under `ceilings`, which were measured before. If these labels differ, or the
    roofs change too much, the result is inconclusive.
    """
    before = RoofsNow(ceilings.memory_bytes_per_s, ceilings.compute_flops_per_s("float32"))
    with torch.inference_mode(), no_gc(), ExitStack() as stack:
        bench = KernelBench(machine, ceilings, stack)
        for kernel in known_kernels(bench):
            yield _selftest(kernel, bench, before)


def _selftest(kernel: KnownKernel, bench: KernelBench, before: RoofsNow) -> SelftestRow:
    rounds = _time_rounds(kernel, bench)
    memory = [item.roofs.memory_bytes_per_s for item in rounds]
    compute = [item.roofs.compute_flops_per_s for item in rounds]
    during = RoofsNow(statistics.median(memory), statistics.median(compute))
    overlaps = bench.machine.info.overlaps_dispatch

    def judge(times: Sequence[Timing], roofs: RoofsNow, ends_s: Sequence[float]) -> tuple[Label, Measurement, Verdict]:
        measurement = _measurement(kernel, times, roofs, overlaps, *ends_s)
        verdict = judge_cell(measurement)
        return _label(verdict, measurement.split), measurement, verdict

    over_rounds = [timing_of(seconds) for seconds in zip(*(item.seconds for item in rounds), strict=True)]
    quartiles_s = statistics.quantiles([item.seconds[0] for item in rounds], n=4)[::2]
    label, measurement, verdict = judge(over_rounds, during, quartiles_s)
    label_before, _, _ = judge(over_rounds, before, quartiles_s)
    counts = Counter(
        judge([Timing(seconds, 0.0) for seconds in item.seconds], item.roofs, 2 * [item.seconds[0]])[0]
        for item in rounds
    )
    steady = all(high <= _STEADY * low for low, _, high in map(statistics.quantiles, (memory, compute)))
    if not (steady and label == label_before and counts[label] >= _AGREEING * len(rounds)):
        label = Label("inconclusive")
    return SelftestRow(
        name=kernel.name,
        expected=kernel.label.regime,
        expected_cause=kernel.label.cause,
        regime=label.regime,
        cause=label.cause,
        confidence=verdict.confidence,
        right=label == kernel.label,
        wrong=label not in (kernel.label, Label("inconclusive")),
        rounds={str(name): count for name, count in counts.most_common()},
        latency_s=measurement.split.latency_s,
        split=measurement.split,
        memory_bytes_per_s=_range([before.memory_bytes_per_s, *memory]),
        compute_flops_per_s=_range([before.compute_flops_per_s, *compute]),
        signals=verdict.evidence,
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _calls(kernel: KnownKernel, machine: Machine) -> list[KernelCall | None]:
    """The kernel, its dispatch and its transfer; then the call of each part, its own dispatch, and its conversion."""
    calls = [kernel.call, kernel.hollow, kernel.fetch]
    for part in kernel.parts:
        # A captured part is replayed without dispatch.
        hollow = None if machine.captures else part.hollow
        calls += [_captured(part.call, machine), hollow, _captured(part.convert, machine)]
    return calls


def _time_rounds(kernel: KnownKernel, bench: KernelBench) -> list[_Round]:
    machine, calls = bench.machine, _calls(kernel, bench.machine)
    bench.times_s(calls)
    rounds: list[_Round] = []
    deadline_s = machine.now_s() + effort.STANDARD.selftest_s
    while len(rounds) < LEAST_KERNEL_ROUNDS or (len(rounds) < MOST_KERNEL_ROUNDS and machine.now_s() < deadline_s):
        rounds.append(_Round(bench.look(), bench.times_s(calls)))
    return rounds


def _captured(call: KernelCall | None, machine: Machine) -> KernelCall | None:
    """Return the call as a CUDA graph, like the replayed kernels of a cell, or the call itself if it has none."""
    if call is None or not machine.captures:
        return call
    with machine.on_side_stream():
        call()
    try:
        return machine.capture(call)
    except RequestError:
        return call


def _measurement(
    kernel: KnownKernel, times: Sequence[Timing], roofs: RoofsNow, overlaps: bool, low_s: float, high_s: float
) -> Measurement:
    """Return the times of `_calls` as the measurement of a cell; the kernel's parts are its replayed operators."""
    whole, hollow, fetch = times[:3]
    demands = [
        Demand(
            name=kernel.name,
            group="other",
            flops=part.flops,
            weight_bytes=part.nbytes,
            kv_bytes=0.0,
            compute_flops_per_s=roofs.compute_flops_per_s,
            replayed_s=replayed.median_s if part.call else None,
            replayed_half_width_s=replayed.half_width_s,
            dequantise_s=conversion.median_s,
            dequantise_half_width_s=conversion.half_width_s,
        )
        for part, replayed, conversion in zip(kernel.parts, times[3::3], times[5::3], strict=True)
    ]
    bare_s = sum(bare.median_s for bare in times[4::3])
    dispatch = Dispatch(hollow.median_s, min(bare_s, hollow.median_s), half_width_s=hollow.half_width_s)
    step_roofs = StepRoofs(roofs.memory_bytes_per_s, dispatch, overlaps, fetch_s=fetch.median_s)
    return Measurement(
        split=break_down(whole.median_s, demands, 0.0, step_roofs, whole.half_width_s),
        model_flops=sum(part.flops for part in kernel.parts),
        model_bytes=sum(part.nbytes for part in kernel.parts),
        compute_flops_per_s=roofs.compute_flops_per_s,
        roofs=step_roofs,
        latency_low_s=low_s,
        latency_high_s=high_s,
    )


def _label(verdict: Verdict, breakdown: TimeBreakdown) -> Label:
    if breakdown.attained > ABOVE_ROOF:
        return Label("inconclusive")
    if verdict.regime != "kernel-bound":
        return Label(verdict.regime)
    terms = {"dequantise_s": breakdown.dequantise_s, "kernel_s": breakdown.kernel_s}
    cause = max(terms, key=lambda name: terms[name])
    if terms[cause] < DOMINANCE * min(terms.values()):
        return Label("inconclusive")
    return Label(verdict.regime, TERM_NAMES[cause])


def selftest_section(results: Sequence[SelftestRow]) -> Section:
    """A row per known kernel (expected label, result, largest parts of its time), and why some have no label."""
    reasons = [
        f"inconclusive: {item.name}: the rounds gave"
        f" {', '.join(f'{label} ({count})' for label, count in item.rounds.items())}; during them memory reached"
        f" {_from_to(item.memory_bytes_per_s, 'B/s')} and matmuls {_from_to(item.compute_flops_per_s, 'FLOP/s')}"
        for item in results
        if not item.right and not item.wrong
    ]
    headings = ("known kernel", "expected", "result", "confidence", "rounds", "time", "where it goes")
    caption = "rounds: how many gave the expected label, each under the roofs that it measured"
    rows = [
        [
            item.name,
            item.expected_label,
            "right" if item.right else f"{item.label}  WRONG" if item.wrong else "inconclusive",
            item.confidence if item.right else "",
            f"{item.rounds.get(item.expected_label, 0)} of {sum(item.rounds.values())}",
            duration(item.latency_s),
            _largest_terms(item.split),
        ]
        for item in results
    ]
    table = text_table(headings, rows, texts=headings[:4], wrapped=headings[-1:], caption=caption)
    return Section("", [table, Lines(reasons)])


def contention_line(contention: Contention, results: Sequence[SelftestRow]) -> str:
    """Return the warning that other processes kept cores busy, so that kernels could not be judged."""
    unknown = sum(not item.right and not item.wrong for item in results)
    return (
        f"The machine is busy: {contention.who} kept {contention.busy_cores} busy, and {unknown} of {len(results)}"
        " known kernels are inconclusive. Stop that work and run selftest again."
    )


_SHOWN_TERMS = 2
_SHOWN_SHARE = 0.05


def _largest_terms(parts: TimeBreakdown) -> str:
    shares = {name: getattr(parts, term) / parts.latency_s for term, name in TERM_NAMES.items()}
    largest = sorted(shares.items(), key=lambda item: -item[1])[:_SHOWN_TERMS]
    return ", ".join(f"{name} {percent(share)}" for name, share in largest if share >= _SHOWN_SHARE)


def _from_to(values: tuple[float, float], unit: str) -> str:
    return " to ".join(scaled(value, unit) for value in values)
