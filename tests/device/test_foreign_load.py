"""Foreign load, with a process of known work."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from profiler.device.contention import ForeignLoad


@pytest.mark.slow
@pytest.mark.cpu
def test_a_helper_process_is_no_foreign_load() -> None:
    """Both measurements differ by the CPU time of that process, which the kernel counts in ticks of 10 ms."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.1)
        foreign, without_helper = ForeignLoad(), ForeignLoad([process.pid])
        before, started_s = psutil.Process(process.pid).cpu_times(), time.perf_counter()
        time.sleep(1.0)
        busy, left = foreign.cores(), without_helper.cores()
        after, took_s = psutil.Process(process.pid).cpu_times(), time.perf_counter() - started_s
        worked = (after.user + after.system - before.user - before.system) / took_s
    finally:
        process.kill()
        process.wait()
    assert busy is not None
    assert left is not None
    assert worked > 0.1
    assert busy - left == pytest.approx(worked, abs=0.06)


def test_an_ended_process_does_not_count() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert ForeignLoad([process.pid]).watched == ForeignLoad().watched


@pytest.mark.cpu
def test_a_child_is_no_foreign_load_whether_it_runs_or_was_waited_for() -> None:
    """CPU time of a child that ends meanwhile, and of one that keeps running, counts as this process's."""
    foreign, own = ForeignLoad(), ForeignLoad(children=True)
    loop = "import time; end = time.process_time() + {}\nwhile time.process_time() < end: pass"
    running = subprocess.Popen([sys.executable, "-c", loop.format(60)])
    started_s = time.perf_counter()
    try:
        subprocess.run([sys.executable, "-c", loop.format(0.3)], check=True)
        times = psutil.Process(running.pid).cpu_times()
        busy, left, took_s = foreign.cores(), own.cores(), time.perf_counter() - started_s
    finally:
        running.kill()
        running.wait()
    assert busy is not None
    assert left is not None
    assert busy - left >= 0.9 * (0.3 + times.user + times.system) / took_s - 0.06
