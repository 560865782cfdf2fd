"""The budget of a run and the batches that fit it; busy neighbours and slow GPUs, of which a run warns."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from machines import HOST, Others, ceiling

from profiler import effort
from profiler.data.datasheets import gpu_called
from profiler.device.device import Device
from profiler.effort import Effort
from profiler.facts.ceilings import Ceilings
from profiler.facts.run_facts import Facts
from profiler.facts.telemetry import BusyProcess, Contention
from profiler.judge.judge_run import judge_run
from profiler.judge.warnings import health_warnings
from profiler.run.setup import wait_for_neighbours
from profiler.run.stages import RunBudget, RunPart, Stages
from profiler.run.warnings import busy_words, device_warnings

EFFORT = replace(
    effort.Effort(),
    shares=dict.fromkeys(RunPart, 0.0)
    | {RunPart.CEILINGS: 0.1, RunPart.TIMING: 0.5, RunPart.REPLAYS: 0.1, RunPart.TRIALS: 0.2, RunPart.REPORT: 0.1},
)


def budget(**options: Any) -> tuple[Mock, RunBudget]:
    """A clock that only the test sets, and a budget of 100 s that begins with it."""
    machine: Any = Mock(**{"now_s.return_value": 100.0})
    return machine.now_s, RunBudget(machine, 100.0, EFFORT, **options)


def test_the_shares_of_a_run_are_all_of_it() -> None:
    shares = effort.Effort().shares
    assert set(shares) == set(RunPart)
    assert sum(shares.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("without", [(), (RunPart.TRIALS,)])
@pytest.mark.parametrize("spent_s", [0.0, 10.0, 20.0, 50.0, 70.0, 95.0, 130.0])
def test_each_part_has_time_until_the_budget_ends_and_all_end_with_it(spent_s: float, without: Any) -> None:
    """Each part takes all that it may; the set-up took `spent_s`, of which a tenth of the budget was its share."""
    clock, made = budget(without=without)
    clock.return_value += spent_s
    for part in (RunPart.TRIALS, RunPart.TIMING, RunPart.REPLAYS):
        part_s = made.part_s(part)
        assert (part_s > 0) == (made.left_s > 0 and part not in without)
        clock.return_value += part_s
    assert made.elapsed_s <= max(90.0 + spent_s / 10, spent_s) + 1e-9


def test_a_whole_grid_makes_the_run_as_long_as_its_repetitions_and_its_later_parts() -> None:
    clock, made = budget(whole=True)
    clock.return_value += 60.0
    made.extend(540.0, with_trials=True)
    total_s = made.total_s
    assert total_s == pytest.approx(60.0 + 540.0 + made.part_s(RunPart.TRIALS) + made.after_sweep_s)
    made.extend(0.0)
    assert made.total_s == total_s, "it never shrinks"


def card(name: str) -> Device:
    sheet = gpu_called(name)
    return Device("cuda", name, sheet.memory_bytes, sheet.l2_bytes, sheet.sm_count, sheet.compute_capability, sheet)


def reaching(dtype: str, flops_per_s: float, copy_bytes_per_s: float) -> Ceilings:
    return Ceilings({dtype: ceiling(flops_per_s)}, {"copy": ceiling(copy_bytes_per_s)}, 1 << 30, beyond_cache=True)


@pytest.mark.parametrize(
    ("threads", "busy", "cores", "warned"),
    [
        (2, 0.2, 2, False), (2, 1.0, 2, True), (1, 1.0, 2, False), (1, 1.9, 2, True), (16, 3.0, 16, True),
        (None, 14.0, 16, False), (None, 15.9, 16, True),
    ],
)  # fmt: skip
def test_others_are_reported_where_they_take_cores_that_are_needed(
    threads: int | None, busy: float, cores: int, warned: bool
) -> None:
    """A GPU needs one core of its host."""
    info = Device("cpu", "a CPU", 1 << 30, 1 << 20, threads, None, None) if threads else card("T4")
    found = busy_words(info.host_threads, Others(busy, cores))
    assert bool(found) == warned
    if warned:
        assert f"other processes keep {busy:.1f} of {cores} cores busy" in found[0]


def test_memory_may_spill_under_wsl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel of WSL 2 names itself in /proc/version."""
    kernel = tmp_path / "version"
    kernel.write_text("Linux version 5.15.153.1-microsoft-standard-WSL2 (root@941d701f84f1) (gcc 11.2.0)\n")
    monkeypatch.setattr("profiler.device.device.KERNEL_FILE", kernel)
    [warning] = device_warnings(card("T4"))
    assert "may spill to system memory" in warning
    assert "'Prefer No Sysmem Fallback'" in warning
    assert not list(device_warnings(Device("cpu", "a CPU", 1 << 30, 1 << 20, 1, None, None)))
    kernel.write_text("Linux version 6.8.0-45-generic (buildd@lcy02-amd64-115)\n")
    assert not list(device_warnings(card("T4")))


@pytest.mark.parametrize(
    ("name", "dtype", "flops_per_s", "copy_bytes_per_s"),
    [
        ("H100 SXM", "bfloat16", 680e12, 3.0e12),
        ("H200 SXM", "bfloat16", 686e12, 4.3e12),
        ("L40S", "bfloat16", 170e12, 0.65e12),
        ("T4", "float16", 24e12, 239.6e9),
    ],
)
def test_a_healthy_card_is_not_warned_of_and_a_slow_one_is(
    name: str, dtype: str, flops_per_s: float, copy_bytes_per_s: float
) -> None:
    """The rates were measured on real cards of these kinds, over seconds: none is the burst of its first matmuls."""
    info = card(name)
    assert health_warnings(info.datasheet, reaching(dtype, flops_per_s, copy_bytes_per_s)) == []
    [slow] = health_warnings(info.datasheet, reaching(dtype, 0.7 * flops_per_s, copy_bytes_per_s))
    assert f"this {name} sustains" in slow
    assert f"{dtype} matmuls" in slow
    [slow] = health_warnings(info.datasheet, reaching(dtype, flops_per_s, 0.7 * copy_bytes_per_s))
    assert "copies" in slow


QUIET = Contention(0.0, 64)
BUSY = Contention(1.0, 1, (BusyProcess("backup", 7, 1.0),))


def waited(total_s: float, *looks: Contention) -> tuple[Sequence[Contention], list[str]]:
    """Wait for neighbours with what is seen at each look, of which the last one is repeated."""
    stages: list[str] = []
    seen = itertools.chain(looks, itertools.repeat(looks[-1]))
    neighbours: Any = SimpleNamespace(look=lambda: next(seen))
    listener: Any = SimpleNamespace(stage=stages.append)
    return wait_for_neighbours(neighbours, Stages(listener, HOST), RunBudget(HOST, total_s, Effort())), stages


def test_a_neighbour_is_waited_for_until_it_ends_or_for_a_tenth_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look follows each wait. Waits take no time here."""
    waits_s: list[float] = []
    monkeypatch.setattr("profiler.run.setup.time", SimpleNamespace(sleep=waits_s.append))
    found, [stage] = waited(60.0, BUSY, BUSY, QUIET)
    assert (found, len(waits_s)) == ([], 2)
    assert "1.0 of 1 core busy with backup (pid 7)" in stage
    assert "at most 6 s" in stage
    waits_s.clear()
    [stays], _ = waited(10.0, *(replace(BUSY, at_unix_s=float(number)) for number in range(9)))
    assert (stays.at_unix_s, sum(waits_s)) == (len(waits_s), 1.0)


def busy(facts: Facts, cores: float) -> Facts:
    repetitions = {
        cell: [replace(repetition, foreign_cores=cores) for repetition in known]
        for cell, known in facts.repetitions.items()
    }
    return replace(facts, repetitions=repetitions, others={**facts.others, Contention: [replace(BUSY, of_cores=2)]})


def test_a_busy_machine_is_the_first_thing_said_and_no_saving_is_named(xeon_facts: Facts) -> None:
    quiet, disturbed = judge_run(xeon_facts), judge_run(busy(xeon_facts, 0.9))
    assert "This machine was busy: backup (pid 7) kept up to 1.0 of 2 cores busy in" in disturbed.answer.sentences[0]
    assert "no saving is named" in disturbed.answer.sentences[1]
    assert any("save" in sentence for sentence in quiet.answer.sentences)
    assert not any("would save" in sentence or "saves" in sentence for sentence in disturbed.answer.sentences[2:])
    assert {effect.basis for item in disturbed.evidence for effect in item.changes} <= {"tried"}


def test_without_a_ceiling_cells_have_times_and_counts_and_no_regime(xeon_facts: Facts) -> None:
    bare = judge_run(replace(xeon_facts, ceilings=replace(xeon_facts.ceilings, memory={})))
    measured = [row for row in bare.cells if row.status == "ok"]
    assert {(row.regime, row.confidence) for row in measured} == {(None, None)}
    assert all(row.latency_s > 0 and row.flops_per_s > 0 and row.model_bytes > 0 for row in measured)


def test_the_systems_own_work_is_no_neighbour(xeon_facts: Facts) -> None:
    idle = replace(busy(xeon_facts, 0.02), others=xeon_facts.others)
    assert judge_run(idle).answer == judge_run(xeon_facts).answer
