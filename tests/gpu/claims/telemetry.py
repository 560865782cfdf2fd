"""The device's telemetry under load, the cost of reading it, and the detection of a second process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

import torch

from profiler.device.clock import now_s
from profiler.device.telemetry import Watch

from .bench import Attempt, Bench, Check, NotRunError

_SECONDS = 2.0
_NOTICED_S = 25.0
_SPIN = "import torch\nx = torch.randn(4096, 4096, device='cuda')\nwhile True: x @ x; torch.cuda.synchronize()"


def attempts(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("telemetry", _readings, cuda=False)
    yield Attempt("a second process on the card is noticed", _second_process, least_s=40.0)


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
    share = watch.cost_s / _SECONDS
    # The reading thread also waits for Python's lock, which this loop holds: that wait is not a cost.
    judged, why = (share < 0.05, "") if bench.cuda else (None, "judged on cards only")
    yield Check("cost of telemetry", judged, share, "< 5 % at ten looks a second", why)


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
