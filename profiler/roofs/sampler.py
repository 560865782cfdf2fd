"""Sample a ceiling: warm up, group calls so that the clock can resolve them, and record the device's clock rate."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from profiler.device.clock import time_calls, waited_s
from profiler.device.machine import Machine
from profiler.device.telemetry import Watch
from profiler.errors import RequestError, describe_error, first_line, tolerate_errors
from profiler.facts.ceilings import Ceiling
from profiler.stats import timing_of

# Drawing random numbers takes far longer than copying them, and a repeated tile reads like random data.
_TILE_BYTES = 16 << 20
_LEAST_SAMPLES = 5
MOST_SAMPLES = 100
# A call is sampled this long even if it repeats exactly: a GPU reports its clock four times meanwhile.
LEAST_S = 0.2
_STEADY_RATIO = 1.05
_LEAST_SAMPLE_S = 1e-3
CLOCK_READINGS_S = 0.05
# Short calls are sampled this long: twenty readings of the clock, which a GPU under load has lowered by then.
_LOADED_S = 1.0
# If the host needs more than this share of a call's time to submit it, the host may be what is timed.
_AHEAD_SHARE = 0.5
# A graph has as many calls as the host submits in this time, up to the limit; its own launch is then a hundredth.
_RECORDED_S = 2e-3
_MOST_RECORDED = 500


@contextlib.contextmanager
def attempt(name: str, machine: Machine, missing: dict[str, str]) -> Iterator[None]:
    """Context manager for one ceiling: a failure goes to `missing`, and its memory is freed. Raises DeviceError."""
    with tolerate_errors(lambda error: missing.update({name: describe_error(error)})):
        yield
        return
    machine.recover(f"measuring {name}")


def clocked(probe: Callable[[], Ceiling], machine: Machine) -> Ceiling:
    """Return the probe's ceiling with a GPU's median clock rate; a CPU that slows down has lower ceilings, too."""
    if not machine.is_cuda:
        return probe()
    with Watch(machine.source, interval_s=CLOCK_READINGS_S) as watch:
        ceiling = probe()
    watch.look(machine.unix_s())
    clocks = [reading.clock_hz for reading in watch.readings if reading.clock_hz is not None]
    return replace(ceiling, clock_hz=statistics.median(clocks) if clocks else None)


def sample(call: Callable[[], object], machine: Machine, budget_s: float, *, least_s: float = LEAST_S) -> list[float]:
    """Return the seconds per call, sampled until their median is known or `budget_s` is spent.

    It warms up until three calls agree. Short calls are timed in groups, for the clock's resolution; a hundred groups
    fill the time, or a second of it, and the device is under load for `least_s`, so that its clock settles. Another
    sample would end within twice the time, or there is none. Raises RuntimeError if the clock gives no time.
    """
    start_s = machine.now_s()
    deadline_s, recent = start_s + budget_s, list[float]()
    while len(recent) < 3 or max(recent) > _STEADY_RATIO * min(recent):
        recent = [*recent[-2:], *time_calls(call, machine.clock, 1)]
        if machine.now_s() >= start_s + budget_s / 4:
            break
    if not min(recent) > 0:  # NaN as well
        raise RuntimeError(f"the clock gave a call of {min(recent):g} s")
    group_s = max(_LEAST_SAMPLE_S, min(deadline_s - machine.now_s(), _LOADED_S) / MOST_SAMPLES)
    group = max(1, int(group_s / min(recent)))
    samples: list[float] = []
    while (now_s := machine.now_s()) < deadline_s or len(samples) < _LEAST_SAMPLES:
        is_done = len(samples) >= MOST_SAMPLES or (now_s - start_s >= least_s and is_known(samples))
        if is_done or now_s + group * min(recent) > deadline_s + budget_s:
            break
        samples += [round(seconds, 12) for seconds in time_calls(call, machine.clock, 1, group=group)]
    return samples or recent[-1:]


def is_known(samples: Sequence[float], share: float = 0.005) -> bool:
    """Return whether ten or more samples give their median to within this share (see `Timing.half_width_s`)."""
    return len(samples) >= 10 and timing_of(samples).half_width_s <= share * statistics.median(samples)


def sample_on_device(call: Callable[[], object], machine: Machine, budget_s: float) -> list[float]:
    """Return the seconds per call, in a graph where the host may fall behind. Raises RequestError if it cannot."""
    if not machine.captures:
        return sample(call, machine, budget_s)
    call()
    machine.clock.synchronize()
    submit_s = min(waited_s(call, lambda: None, now=machine.now_s) for _ in range(_LEAST_SAMPLES))
    machine.clock.synchronize()
    if submit_s <= _AHEAD_SHARE * statistics.fmean(time_calls(call, machine.clock, _LEAST_SAMPLES)):
        return sample(call, machine, budget_s)
    calls = min(_MOST_RECORDED, max(1, int(_RECORDED_S / submit_s)))
    return [seconds / calls for seconds in sample(record(call, machine, calls), machine, budget_s)]


def record(call: Callable[[], object], machine: Machine, times: int = 1) -> Callable[[], object]:
    """Return a function that runs `times` calls as one launch. Raises RequestError if they cannot be captured."""

    def work() -> None:
        for _ in range(times):
            call()

    with machine.on_side_stream():
        call()
    try:
        return machine.capture(work)
    except RequestError as error:
        raise RequestError(f"its launches would be timed, since {first_line(error)}.") from error


def random_data(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return `nbytes` of random float32 in whole elements, shape [elements]: one random tile, repeated."""
    elements = nbytes // 4
    tile = torch.rand(min(elements, _TILE_BYTES // 4), device=device)
    data = torch.empty(elements, device=device)
    for part in data.split(tile.numel()):
        part.copy_(tile[: part.numel()])
    return data


def ceiling_of(work: float, seconds: Sequence[float], method: str) -> Ceiling:
    """Return the ceiling of calls that each do `work`, from the seconds of the calls."""
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return Ceiling(
        per_s=work / statistics.median(seconds),
        low_per_s=work / quartiles[2],
        high_per_s=work / quartiles[0],
        samples=len(seconds),
        method=method,
        seconds=tuple(seconds),
    )
