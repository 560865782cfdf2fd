"""The budget of a run: the time of its parts, by a clock that is set by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from profiler import effort
from profiler.run.stages import RunBudget, RunPart

EFFORT = replace(
    effort.Effort(),
    roofs_again_share=0.05,
    replays_share=0.10,
    between_share=0.0,
    generate_share=0.0,
    queue_share=0.0,
    trials_share=0.20,
    unexplained_share=0.0,
    report_share=0.05,
)


class SetClock:
    """A machine whose time changes only when it is set."""

    def __init__(self, *, is_cuda: bool = False) -> None:
        self.seconds, self.is_cuda = 100.0, is_cuda

    def now_s(self) -> float:
        return self.seconds


def budget(machine: SetClock, **options: object) -> RunBudget:
    return RunBudget(machine, 100.0, EFFORT, **options)  # type: ignore[arg-type]


def test_the_sweep_has_what_the_parts_before_and_after_it_leave() -> None:
    machine = SetClock()
    made = budget(machine, spent_s=5.0)
    with made.apart():
        machine.seconds += 30.0  # the model is loaded
    machine.seconds += 15.0
    assert made.elapsed_s == 20.0
    assert made.sweep_s == pytest.approx(100 - 20 - 40)
    assert budget(machine, without={RunPart.TRIALS}).sweep_s == pytest.approx(100 - 20)


def test_a_sweep_that_begins_late_gets_half_of_what_is_left() -> None:
    """The parts after it have 40 of 100 s. With 30 s left they would leave it none."""
    machine = SetClock()
    made = budget(machine)
    machine.seconds += 70.0
    assert made.sweep_s == pytest.approx(15.0)
    machine.seconds += 40.0
    assert made.sweep_s == 0.0


def test_a_whole_grid_makes_the_run_as_long_as_its_visits() -> None:
    """60 s of set-up and visits plus 540 s more are 60 % of 1,000 s."""
    machine = SetClock()
    made = budget(machine, whole=True)
    machine.seconds += 60.0
    made.extend(540.0)
    assert made.total_s == pytest.approx(1000.0)
    assert made.part_s(RunPart.REPLAYS) == pytest.approx(100.0)
    assert made.roof_s == EFFORT.roof_s
    made.extend(0.0)
    assert made.total_s == pytest.approx(1000.0), "the total never shrinks"


def test_the_time_left_of_a_command_holds_its_further_runs() -> None:
    """After the first of three runs of 100 s, 200 s follow."""
    assert budget(SetClock(), further_runs=2).further_s == 200.0
    assert budget(SetClock()).further_s == 0.0


def test_a_late_sweep_shortens_the_parts_after_it_alike() -> None:
    """20 of the 40 s for these parts are left, and the first part gets 5/40 of them."""
    machine = SetClock()
    made = budget(machine)
    assert made.part_s(RunPart.REPLAYS) == pytest.approx(10.0), "its share"
    machine.seconds += 80.0
    assert made.part_s(RunPart.ROOFS) == pytest.approx(20 * 5 / 40)
    assert made.part_s(RunPart.TRIALS) == pytest.approx(20 * 20 / 25)
    machine.seconds += 30.0
    assert made.part_s(RunPart.TRIALS) == 0.0
    assert made.left_s == 0.0
