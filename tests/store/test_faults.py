"""Faults while a run measures: no finished cell is lost or written twice, and every folder can still be read."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import slow_except
from machines import CPU
from plain_engine import PlainEngine
from raw_samples import read_records

import profiler
from profiler import effort
from profiler.cli import app as cli
from profiler.device.clock import Clock
from profiler.device.machine import Machine
from profiler.errors import RunError
from profiler.facts.roofs import DriftReading
from profiler.facts.visits import Gap, Visit
from profiler.grid.cells import Cell, Grid
from profiler.grid.ranges import make_grid
from profiler.loading.prompts import Prompts
from profiler.measure.rounds import Plan
from profiler.measure.sweep import sweep
from profiler.report.progress import QuietListener
from profiler.store.folder import read_document, read_run
from profiler.store.samples import read_facts_of
from profiler.store.writer import RunStore

GRID = make_grid([2, 4, 8], [1, 2], 6)
LONG_GRID = make_grid(range(2, 62), [1, 2], 6)


def outcomes(engine: PlainEngine, clock: Any = None, earlier: Any = (), grid: Grid = GRID) -> Iterator[Visit | Gap]:
    plan = Plan(grid, budget_s=0.0, whole=True, effort=replace(effort.STANDARD, rounds=1))
    return sweep({"eager": engine}, plan, machine=Machine(CPU, clock=clock), prompts=Prompts(32), earlier=earlier)


def measure_into(folder: Path, *, resume: bool, grid: Grid = GRID) -> None:
    with RunStore(folder, resume=resume) as store:
        (folder / "run.json").write_text("{}")  # without it, the store removes the folder
        earlier = read_facts_of(folder) if resume else []
        for outcome in outcomes(PlainEngine(step_s=0.0005), earlier=earlier, grid=grid):
            store.append(outcome)


@pytest.mark.parametrize("cell", GRID.cells)
def test_out_of_memory_at_any_cell(cell: Cell) -> None:
    """That cell is `oom`, cells at least as large in both directions have no number, and all others are measured."""
    engine = PlainEngine(fits=lambda batch, tokens: batch < cell.batch_size or tokens < cell.prompt_len)
    results = list(outcomes(engine))
    gaps = {outcome.cell: outcome.status for outcome in results if isinstance(outcome, Gap)}
    larger = {
        c for c in GRID.cells if c != cell and c.batch_size >= cell.batch_size and c.prompt_len >= cell.prompt_len
    }
    assert set(gaps) == {cell, *larger}
    assert gaps[cell] == "oom"
    assert set(gaps.values()) <= {"oom", "skipped"}
    assert {o.cell for o in results if isinstance(o, Visit)} == set(GRID.cells) - set(gaps)


def test_a_prefill_that_did_not_fit_says_nothing_of_a_cache_that_is_filled() -> None:
    """A prefill of 8 tokens fails; a step after 16 filled ones needs no such prefill."""
    grid = Grid((8,), (1,), 6, context_lens=(16,))
    results = list(outcomes(PlainEngine(fits=lambda _, tokens: tokens < 8), grid=grid))
    assert [(type(found), found.cell.context_len) for found in results if found.cell.context_len] == [(Visit, 16)]
    assert [found.status for found in results if isinstance(found, Gap)] == ["oom"]


def test_a_full_disk_is_named_although_closing_fails_too(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        with RunStore(tmp_path / "run") as store:
            (tmp_path / "run" / "run.json").write_text("{}")
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            for _ in range(9):
                store.append(DriftReading(1.0, 1.0, 1.0))

    try:
        with pytest.raises(RunError, match="the samples before this one are saved"):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.ci
def test_killed_at_twenty_moments_and_resumed(tmp_path: Path) -> None:
    """After 20 SIGKILLs while the sweep writes, one resume finishes the run: no cell is lost or measured twice."""
    folder = tmp_path / "run"
    moments = random.Random(0)
    context = multiprocessing.get_context("fork")
    killed = 0
    for _ in range(20):
        resume = (folder / "samples.jsonl").exists()
        child = context.Process(target=measure_into, args=(folder,), kwargs={"resume": resume, "grid": LONG_GRID})
        child.start()
        time.sleep(0.005 + 0.03 * moments.random())
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        lines = (folder / "samples.jsonl").read_bytes().split(b"\n")[:-1] if folder.exists() else []
        for line in lines:
            json.loads(line)
    assert killed >= 10
    measure_into(folder, resume=True, grid=LONG_GRID)
    records = read_records(folder)
    visited = [(record["batch_size"], record["prompt_len"]) for record in records]
    assert sorted(visited) == sorted((cell.batch_size, cell.prompt_len) for cell in LONG_GRID.cells)


@pytest.mark.parametrize("failing", range(6))
def test_a_disk_that_fills_up_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """The error is one line, every line before it can be read, and a resume with free space finishes the run."""
    folder = tmp_path / "run"
    calls = iter(range(1000))
    real = os.fsync

    def fsync(fd: int) -> None:
        if next(calls) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(RunError, match="No space left on device"):
            measure_into(folder, resume=False)
    assert len(read_records(folder)) >= failing
    measure_into(folder, resume=True)
    assert {(r["batch_size"], r["prompt_len"]) for r in read_records(folder)} == {
        (cell.batch_size, cell.prompt_len) for cell in GRID.cells
    }


class BrokenClock(Clock):
    """Returns `value` as the duration of one step, in the decode loop number `after`."""

    def __init__(self, value: float, after: int) -> None:
        self.value = value
        self.left = after

    def seconds(self, marks: Any) -> list[float]:
        times = super().seconds(marks)
        if len(times) > 1:  # only decode loops are counted: the number of prefills depends on the machine's noise
            self.left -= 1
            if self.left == 0:
                times[len(times) // 2] = self.value
        return times


@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan, math.inf])
def test_a_clock_that_jumps_or_gives_no_number(value: float) -> None:
    results = list(outcomes(PlainEngine(step_s=0.0002), BrokenClock(value, after=2)))
    gaps = [outcome for outcome in results if isinstance(outcome, Gap)]
    assert len(gaps) == 1
    assert gaps[0].status == "failed"
    assert f"the clock gave a step of {value:g} s" in gaps[0].reason
    times = [t for o in results if isinstance(o, Visit) for t in (o.prefill_s, *o.decode_s)]
    assert all(t is not None and 0 < t < 1 for t in times)


class Interrupting(QuietListener):
    """Raises KeyboardInterrupt when a stage begins."""

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def stage(self, text: str) -> None:
        if self._stage in text:
            raise KeyboardInterrupt


STAGES = ("loading", "timing", "roofs", "dispatch", "replaying", "writing the report")


@pytest.mark.parametrize("stage", slow_except(STAGES[:2], STAGES))
def test_ctrl_c_in_each_stage(tiny_folder: Path, tmp_path: Path, stage: str) -> None:
    """Before the first cell no folder is left, or it reads as interrupted; later the measured cells are saved."""
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        profiler.profile(
            str(tiny_folder), prompt_lens=[16], batch_sizes=[1], new_tokens=8, budget_s=0.5, weights="random",
            out=folder, listener=Interrupting(stage),
        )  # fmt: skip
    if stage in ("loading", "roofs", "dispatch"):
        assert not folder.exists()
        return
    cells = read_run(folder).cells
    assert (cells["status"] == "ok").all() == (stage != "timing")
    assert read_document(folder).finished == (stage == "writing the report")


def test_sigterm_is_an_interruption() -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, cli._interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
