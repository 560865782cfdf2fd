"""Busy processes next to this one are seen by name, and the load of others is counted without our own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from profiler.device.contention import ForeignLoad, Neighbours
from profiler.facts.telemetry import Contention

_SPIN = "import time; end = time.time() + 60\nwhile time.time() < end: pass"
_START = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {_SPIN!r}], stdout=2).pid)"


@pytest.mark.timing
def test_a_busy_process_is_named_with_its_cores() -> None:
    """It is not this one's child: the process that started it has ended."""
    neighbours = Neighbours()
    pid = int(subprocess.run([sys.executable, "-c", _START], stdout=subprocess.PIPE, check=True, text=True).stdout)
    try:
        neighbours.look()
        time.sleep(1.0)
        found = neighbours.look()
    finally:
        os.kill(pid, signal.SIGKILL)
    [own] = [process for process in found.processes if process.pid == pid]
    assert "python" in own.name
    assert 0.2 < own.cores < 1.1
    assert found.cores > 0.2


@pytest.mark.parametrize(("numbers", "expected"), [((0, 12, 14), 40.0), ((0, 1), None)])
def test_cores_are_known_by_their_numbers(
    numbers: tuple[int, ...], expected: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs 12 and 14 are ours, and others keep each busy for 10 s; a container may number its own from 0."""

    def busy(ticks: int) -> None:
        lines = [f"cpu{number} {ticks if number else 0} 0 0 0 0 0 0 0 0 0" for number in numbers]
        (tmp_path / "stat").write_text("\n".join(["cpu 0 0 0 0 0 0 0 0 0 0", *lines, ""]))

    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {12, 14})
    busy(0)
    load = ForeignLoad()
    time.sleep(0.5)
    busy(1000)
    found = load.cores()
    assert found == (expected and pytest.approx(expected, rel=0.5))


def test_own_children_are_no_neighbours() -> None:
    neighbours = Neighbours()
    with subprocess.Popen([sys.executable, "-c", _SPIN]) as child:
        time.sleep(0.5)
        found = neighbours.look()
        child.kill()
    assert child.pid not in [process.pid for process in found.processes]


def test_others_disturb_where_they_leave_too_few_cores() -> None:
    one_of_two = Contention(1.0, 2)
    assert one_of_two.disturbs(threads=2)
    assert not one_of_two.disturbs(threads=1)
    assert not Contention(0.2, 2).disturbs(threads=2), "the system's own work"


@pytest.mark.cpu
def test_own_processes_are_no_foreign_load() -> None:
    """A helper that keeps running, and a child that ends meanwhile; the kernel counts CPU time in ticks of 10 ms."""
    loop = "import time; end = time.process_time() + {}\nwhile time.process_time() < end: pass"
    helper = subprocess.Popen([sys.executable, "-c", loop.format(60)])
    try:
        foreign, without_helper, without_children = ForeignLoad(), ForeignLoad([helper.pid]), ForeignLoad(children=True)
        before, started_s = psutil.Process(helper.pid).cpu_times(), time.perf_counter()
        subprocess.run([sys.executable, "-c", loop.format(0.3)], check=True)
        loads = [load.cores() for load in (foreign, without_helper, without_children)]
        after, took_s = psutil.Process(helper.pid).cpu_times(), time.perf_counter() - started_s
    finally:
        helper.kill()
        helper.wait()
    busy, helped, own = (cores for cores in loads if cores is not None)
    worked_s = after.user + after.system - before.user - before.system
    assert busy - helped == pytest.approx(worked_s / took_s, abs=0.1)
    assert busy - own >= 0.9 * (0.3 + worked_s) / took_s - 0.1
