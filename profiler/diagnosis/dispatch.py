"""What the host spends on a step, from the steps of the hollow twin."""

from __future__ import annotations

import math
from collections.abc import Sequence

from profiler.diagnosis.facts import DispatchSamples
from profiler.diagnosis.step_time import Dispatch
from profiler.machine.clock import Timing, timing_of


def dispatch_of(samples: DispatchSamples) -> Dispatch:
    """Dispatch of a step of one engine, phase and batch size."""
    alone = _twin_alone(samples)
    if not samples.among_s:
        # On CUDA a replayed kernel's launch hides behind the one before it, so nothing is paid twice.
        return Dispatch(alone.median_s, 0.0, half_width_s=alone.half_width_s, waits=samples.waits)
    turns = math.gcd(len(samples.among_s), len(samples.linears_s))
    calls_s = max(0.0, _less(samples.with_bare_s, samples.linears_s, turns).median_s)
    besides = _less(samples.among_s, samples.linears_s, turns)
    # 20 ms between two times of a second, one of them seen once, are the machine's word, not the model's.
    among = Timing(besides.median_s + calls_s, besides.half_width_s) if len(samples.linears_s) > 1 else alone
    calls_s += sum(core.total_s for core in samples.cores)
    return cold_dispatch(alone, among, calls_s, sum(call.total_s for call in samples.conversions))


def _less(whole_s: Sequence[float], part_s: Sequence[float], turns: int) -> Timing:
    """What is left of a whole without a part, both measured in every turn: neighbours in time are held together, so
    that a minute in which the machine is slower falls on both.
    """
    left = [
        (timing_of(whole), timing_of(part))
        for whole, part in zip(_by_turn(whole_s, turns), _by_turn(part_s, turns), strict=True)
    ]
    differences = timing_of([whole.median_s - part.median_s for whole, part in left])
    if turns > 1:
        return differences
    [(whole, part)] = left
    return Timing(differences.median_s, math.hypot(whole.half_width_s, part.half_width_s))


def _by_turn(values: Sequence[float], turns: int) -> list[Sequence[float]]:
    size = len(values) // turns
    return [values[start : start + size] for start in range(0, turns * size, size)]


def cold_dispatch(warm: Timing, among: Timing, calls_s: float, converting_s: float = 0.0) -> Dispatch:
    """Dispatch within a real step, from the twin's step alone, its step among the weights, and its bare calls.

    `among` is a difference of two times, and a busy machine can make it anything, less than nothing included; cold
    caches cannot make a step faster than warm ones, so the twin alone is its floor. The calls are a part of the step,
    and those that only convert between formats a part of the calls.
    """
    step_s = max(among.median_s, warm.median_s)
    in_kernels_s = min(calls_s, step_s)
    half_width_s = math.hypot(among.half_width_s, warm.half_width_s)
    return Dispatch(step_s, in_kernels_s, min(converting_s, in_kernels_s), half_width_s)


def _twin_alone(samples: DispatchSamples) -> Timing:
    """The twin's own step. A low quantile: what slows a step down is noise, not more dispatch."""
    ordered = sorted(samples.alone_s)
    low = ordered[0] if samples.phase == "prefill" else ordered[len(ordered) // 4]
    return Timing(low, timing_of(ordered).half_width_s)
