"""Sample a roof: warm up, group calls that the clock can resolve, record the device's clock."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from profiler.device.clock import time_calls
from profiler.device.machine import Machine
from profiler.device.telemetry import Watch
from profiler.errors import RequestError, describe_error, first_line, tolerate_errors
from profiler.facts.roofs import Roof

STAGE_BUDGET_S = 1.5
# Drawing random numbers takes far longer than copying them, and what is read is as random in the second copy.
_TILE_BYTES = 16 << 20
_LEAST_SAMPLES = 5
MOST_SAMPLES = 100
_STEADY_RATIO = 1.05
_LEAST_SAMPLE_S = 1e-3
CLOCK_LOOKS_S = 0.05
# Short calls go on for so long: twenty looks at the clock, which a card under load has lowered by then.
_LOADED_S = 1.0
# A host that needs more than this share of a call's time to submit it may be what the clock sees.
_AHEAD_SHARE = 0.5
# A graph has as many calls as the host submits in this time, and no more than so many: its own launch is a hundredth.
_RECORDED_S = 2e-3
_MOST_RECORDED = 500


@contextlib.contextmanager
def attempt(name: str, machine: Machine, missing: dict[str, str]) -> Iterator[None]:
    """One roof by itself: if it fails, `missing` gets its name and the reason, and the device its memory back.

    Raises DeviceError where the device is lost.
    """
    with tolerate_errors(lambda error: missing.update({name: describe_error(error)})):
        yield
        return
    machine.recover(f"measuring {name}")


def clocked(probe: Callable[[], Roof], machine: Machine) -> Roof:
    """A probe's roof with the median of the clocks that the device reported while it ran and right after."""
    with Watch(machine.source, interval_s=CLOCK_LOOKS_S) as watch:
        roof = probe()
    watch.look(machine.unix_s())
    clocks = [reading.clock_hz for reading in watch.readings if reading.clock_hz is not None]
    return replace(roof, clock_hz=statistics.median(clocks) if clocks else None)


def sample(call: Callable[[], object], machine: Machine, budget_s: float) -> list[float]:
    """Seconds a call: warmed up until three calls in a row agree, then sampled until `budget_s` is spent.

    Short calls are timed in groups, so that neither the clock's resolution nor a synchronisation after each matters: a
    hundred groups fill the time, or a second of it. The device is under load all the while, and its clock settles.
    Raises RuntimeError for a clock that gives no time.
    """
    deadline = machine.now_s() + budget_s
    recent = time_calls(call, machine.clock, 3)
    while max(recent) > _STEADY_RATIO * min(recent) and machine.now_s() < deadline - budget_s / 2:
        recent = [*recent[1:], *time_calls(call, machine.clock, 1)]
    if not min(recent) > 0:  # NaN as well
        raise RuntimeError(f"the clock gave a call of {min(recent):g} s")
    group_s = max(_LEAST_SAMPLE_S, min(deadline - machine.now_s(), _LOADED_S) / MOST_SAMPLES)
    group = max(1, int(group_s / min(recent)))
    samples: list[float] = []
    while len(samples) < _LEAST_SAMPLES or machine.now_s() < deadline:
        samples.append(round(sum(time_calls(call, machine.clock, group)) / group, 12))
        if len(samples) >= MOST_SAMPLES or (len(samples) >= 2 and machine.now_s() > deadline + budget_s):
            break
    return samples


def sample_on_device(call: Callable[[], object], machine: Machine, budget_s: float) -> list[float]:
    """Seconds that a call takes its device, as `sample` gives them; a call so short that the host may not keep ahead
    of it is recorded, many times in one graph.

    Raises RequestError where such a call cannot be recorded: its launches would be timed.
    """
    if not machine.captures:
        return sample(call, machine, budget_s)
    submit_s = _submit_s(call, machine)
    if submit_s <= _AHEAD_SHARE * statistics.fmean(time_calls(call, machine.clock, _LEAST_SAMPLES)):
        return sample(call, machine, budget_s)
    calls = min(_MOST_RECORDED, max(1, int(_RECORDED_S / submit_s)))
    return [seconds / calls for seconds in sample(record(call, machine, calls), machine, budget_s)]


def record(call: Callable[[], object], machine: Machine, times: int = 1) -> Callable[[], object]:
    """So many of a call as one launch. Raises RequestError where that cannot be."""

    def work() -> None:
        for _ in range(times):
            call()

    with machine.on_side_stream():
        call()
    try:
        return machine.capture(work)
    except RequestError as error:
        raise RequestError(f"its launches would be timed, since {first_line(error)}.") from error


def _submit_s(call: Callable[[], object], machine: Machine) -> float:
    """Seconds that the host needs to submit a call; the fastest of a few."""
    call()
    machine.clock.synchronize()
    moments_s = [machine.now_s()]
    for _ in range(_LEAST_SAMPLES):
        call()
        moments_s.append(machine.now_s())
    machine.clock.synchronize()
    return min(after - before for before, after in pairwise(moments_s))


def random_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """So many bytes of random float32 (whole elements): a tile of them, again and again. Shape [elements]."""
    elements = nbytes // 4
    tile = torch.rand(min(elements, _TILE_BYTES // 4), device=device)
    data = torch.empty(elements, device=device)
    for part in data.split(tile.numel()):
        part.copy_(tile[: part.numel()])
    return data


def roof_of(work: float, seconds: Sequence[float], method: str) -> Roof:
    """The roof that so much work a call has, by the seconds of its calls."""
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return Roof(
        per_s=work / statistics.median(seconds),
        low_per_s=work / quartiles[2],
        high_per_s=work / quartiles[0],
        samples=len(seconds),
        method=method,
        seconds=tuple(seconds),
    )
