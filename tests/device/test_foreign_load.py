"""Whose work on the cores is foreign, by a process whose work is known."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from profiler.device.contention import ForeignLoad


@pytest.mark.cpu
def test_a_process_beside_this_one_is_no_foreign_load() -> None:
    """What both looks differ by is the CPU time of that process, which the kernel counts in ticks of 10 ms."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.1)
        foreign, beside = ForeignLoad(), ForeignLoad([process.pid])
        before, started_s = psutil.Process(process.pid).cpu_times(), time.perf_counter()
        time.sleep(1.0)
        busy, left = foreign.cores(), beside.cores()
        after, took_s = psutil.Process(process.pid).cpu_times(), time.perf_counter() - started_s
        worked = (after.user + after.system - before.user - before.system) / took_s
    finally:
        process.kill()
        process.wait()
    assert busy is not None
    assert left is not None
    assert worked > 0.1
    assert busy - left == pytest.approx(worked, abs=0.06)


def test_a_process_that_has_ended_is_none_of_them() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert ForeignLoad([process.pid]).watched == ForeignLoad().watched


@pytest.mark.cpu
def test_a_child_is_no_foreign_load_whether_it_runs_or_was_waited_for() -> None:
    """Seconds of a child that ends meanwhile, and of one that goes on, are this process's own."""
    foreign, own = ForeignLoad(), ForeignLoad(children=True)
    loop = "import time; end = time.process_time() + {}\nwhile time.process_time() < end: pass"
    going_on = subprocess.Popen([sys.executable, "-c", loop.format(60)])
    started_s = time.perf_counter()
    try:
        subprocess.run([sys.executable, "-c", loop.format(0.3)], check=True)
        times = psutil.Process(going_on.pid).cpu_times()
        busy, left, took_s = foreign.cores(), own.cores(), time.perf_counter() - started_s
    finally:
        going_on.kill()
        going_on.wait()
    assert busy is not None
    assert left is not None
    assert busy - left >= 0.9 * (0.3 + times.user + times.system) / took_s - 0.06
