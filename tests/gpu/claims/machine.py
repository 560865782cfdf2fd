"""The machine: what works according to `roofscope doctor`, its telemetry, another process on it, and a second card."""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from profiler.checks.doctor import examine
from profiler.device.clock import now_s, waited_s
from profiler.device.machine import machine_for
from profiler.device.telemetry import Watch

from .bench import Attempt, Bench, Check, NotRunError, cells_measured, within

_NEEDED = ("driver", "torch", "device", "memory", "graphs", "fits")
"""Parts of doctor that must work; the rest is optional, or not available on many rented cards."""
_SECONDS = 2.0
_NOTICED_S = 25.0
_STREAM_BYTES = 1 << 30
_SPIN = "import torch\nx = torch.randn(4096, 4096, device='cuda')\nwhile True: x @ x; torch.cuda.synchronize()"


def installation(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("doctor", _doctor, least_s=40.0, cuda=False)


def telemetry(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("telemetry", _readings, cuda=False)
    yield Attempt("a second process on the card is noticed", _second_process, least_s=40.0)


def counters(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("counters of a known stream", _counters)
    yield Attempt("energy next to power", _energy)


def devices(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("two cards in one process", _two, least_s=60.0)


def _doctor(bench: Bench) -> Iterator[Check]:
    findings = {each.name: each for each in examine(str(bench.device) if bench.cuda else "cpu").findings}
    for name in _NEEDED:
        if finding := findings.get(name):
            yield bench.on_a_card(f"doctor: {name}", finding.works, finding.says, "works")


def _readings(bench: Bench) -> Iterator[Check]:
    with Watch(bench.machine.source, interval_s=0.1) as watch:
        x = torch.randn(2048 if bench.cuda else 256, 2048, device=bench.device)
        end_s = now_s() + _SECONDS
        while now_s() < end_s:
            x @ x.T
            bench.machine.clock.synchronize()
    seen = {name for reading in watch.readings for name, value in asdict(reading).items() if value not in (None, (), 0)}
    needed = {"clock_hz", "power_w", "temperature_c", "memory_used_bytes"} if bench.cuda else {"memory_used_bytes"}
    yield Check("telemetry", needed <= seen, sorted(seen), f"has {sorted(needed)}")
    # Read here: a thread also waits for Python's lock, which the loop above holds, and that wait is not a cost.
    share = 10 * waited_s(bench.machine.source.read, bench.machine.clock.synchronize, repeats=10)
    yield bench.on_a_card("cost of telemetry", share < 0.05, share, "< 5 % at ten looks a second")


def _counters(bench: Bench) -> Iterator[Check]:
    """A sample is up to 0.1 s old: the counters of a stream of 2 s may differ by 4 %, whatever came before it."""
    source, sheet = bench.machine.source, bench.machine.info.datasheet
    data, found = torch.zeros(_STREAM_BYTES, dtype=torch.uint8, device=bench.device), {}
    for seconds, busy_s, idle_s in ((0.6, 0.3, 0.0), (1.0, 0.3, 0.0), (2.0, 0.3, 0.0), (2.0, 0.0, 0.5)):
        _read(bench, data, busy_s)
        time.sleep(idle_s)
        source.counters()
        nbytes, took_s = _read(bench, data, seconds)
        counters = source.counters(took_s)
        if counters is None or sheet is None:
            raise NotRunError("this GPU has no counters, or no datasheet")
        found[seconds, idle_s] = counters.dram * sheet.bandwidth_bytes_per_s * took_s / nbytes
    value = {f"{seconds:g} s, after {idle_s:g} s of idle": share for (seconds, idle_s), share in found.items()}
    apart = max(abs(share - 1) for (seconds, _), share in found.items() if seconds == _SECONDS)
    yield Check("counters / bytes of a known stream", apart < 0.05, value, "within 5 % in 2 s")


def _read(bench: Bench, data: torch.Tensor, seconds: float, idle_s: float = 0.0) -> tuple[float, float]:
    start_s, nbytes = now_s(), 0.0
    while now_s() < start_s + seconds:
        data.sum()
        bench.machine.clock.synchronize()
        nbytes += data.nbytes
        time.sleep(idle_s)
    return nbytes, now_s() - start_s


def _energy(bench: Bench) -> Iterator[Check]:
    """Compare NVML's energy counter with its power (a mean over 1 s on newer cards): at full load, and pulsed."""
    source, found = bench.machine.source, {}
    data = torch.zeros(_STREAM_BYTES, dtype=torch.uint8, device=bench.device)
    for name, idle_s in (("full load", 0.0), ("pulsed", 2e-3)):
        _read(bench, data, 1.0, idle_s)
        before_j = source.energy_j()
        with Watch(source, interval_s=0.05) as watch:
            _, seconds = _read(bench, data, 2 * _SECONDS, idle_s)
        after_j, powers = source.energy_j(), [reading.power_w for reading in watch.readings if reading.power_w]
        if before_j is None or after_j is None or not powers:
            raise NotRunError("NVML reports no energy or no power of this GPU")
        found[name] = (after_j - before_j) / seconds, statistics.fmean(powers)
    for name, (counted_w, read_w) in found.items():
        value = {"counted_w": counted_w, "read_w": read_w, "limit_w": source.read().power_limit_w}
        yield within(f"energy counter / power readings, {name}", counted_w / read_w, 0.15, value)


def _second_process(bench: Bench) -> Iterator[Check]:
    source = bench.machine.source
    neighbour = subprocess.Popen([sys.executable, "-c", _SPIN])
    try:
        end_s = now_s() + _NOTICED_S
        while now_s() < end_s and not (source.read().other_processes or 0):
            time.sleep(0.5)
        others = source.read().other_processes
    finally:
        neighbour.kill()
        neighbour.wait()
    if others is None:
        raise NotRunError("NVML hides the processes of this card")
    yield Check("a second process on the card is noticed", others >= 1, others, ">= 1")


def _two(bench: Bench) -> Iterator[Check]:
    if torch.cuda.device_count() < 2:
        raise NotRunError("one card is here")
    found: dict[tuple[str, int], float] = {}
    try:
        for index in (0, 1):
            one = replace(bench, device=torch.device("cuda", index))
            options = {"engine": "eager,graph", "prompt_lens": [64], "batch_sizes": [1], "budget_s": 20.0}
            run = one.run(f"card-{index}", bench.small, **options)
            decode = run.cells[run.cells["phase"] == "decode"].set_index("engine")
            yield cells_measured(f"card {index}: every cell is measured", run, list(run.answer))
            found[run.document.device.name, index] = float(decode["latency_s"].loc["graph"])
    finally:
        machine_for(bench.device)  # restore torch's current card
    (one, _), (other, _) = found
    if one != other:
        raise NotRunError(f"the cards differ: {one}, {other}")
    first_s, second_s = found.values()
    yield within("a graph's step on the second card / on the first", second_s / first_s, 0.25, [first_s, second_s])
