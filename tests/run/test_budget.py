"""The budget of a run: the time of its parts, by a clock that is set by hand, and the batches that fit it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from machines import roof

from profiler import effort
from profiler.errors import RequestError
from profiler.facts.roofs import READ, Ceilings
from profiler.run import batch_test
from profiler.run.options import Options
from profiler.run.stages import RunBudget, RunPart

EFFORT = replace(
    effort.Effort(), roofs_again_share=0.05, replays_share=0.10, trials_share=0.20, report_share=0.05,
    **dict.fromkeys(("between_share", "generate_share", "unexplained_share"), 0.0),
)  # fmt: skip


class SetClock:
    """A machine whose time changes only when it is set."""

    def __init__(self, *, is_cuda: bool = False) -> None:
        self.seconds, self.is_cuda = 100.0, is_cuda

    def now_s(self) -> float:
        return self.seconds


def budget(machine: SetClock, **options: object) -> RunBudget:
    return RunBudget(machine, 100.0, EFFORT, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("spent_s", [0.0, 20.0, 50.0, 70.0, 95.0, 130.0])
def test_the_sweep_and_the_parts_after_it_end_with_the_budget(spent_s: float) -> None:
    """Loading is apart. Early, each part has its share; later, all shrink, and none is left out."""
    machine = SetClock()
    made = budget(machine)
    with made.apart():
        machine.seconds += 30.0
    machine.seconds += spent_s
    left_s = max(0.0, 100.0 - spent_s)
    assert (made.elapsed_s, made.left_s) == (spent_s, left_s)
    assert 0 <= made.sweep_s <= left_s
    assert (made.sweep_s > 0) == (left_s > 0)
    assert made.sweep_s == pytest.approx(100 - spent_s - 40) or made.sweep_s == pytest.approx(left_s / 2)
    machine.seconds += made.sweep_s
    for part, share in ((RunPart.ROOFS, 0.05), (RunPart.REPLAYS, 0.10), (RunPart.TRIALS, 0.20)):
        part_s = made.part_s(part)
        assert 0 <= part_s <= 100.0 * share + 1e-9
        assert (part_s > 0) == (left_s > 0)
        machine.seconds += part_s
    assert made.elapsed_s <= max(100.0, spent_s) + 1e-9


def test_a_part_that_is_left_out_gives_its_time_to_the_sweep() -> None:
    assert budget(SetClock(), without={RunPart.TRIALS}).sweep_s == pytest.approx(100 - 20)


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


def test_batches_go_two_doublings_past_the_knee_of_the_dtype_that_runs(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The knee follows the roof of the dtype that runs.

    Without a cache, a float32 decode reads 4 bytes for two FLOPs per weight. At 30 FLOPs per byte the knee is at 60
    sequences; by bfloat16's roof it is at 600. The cache and head of this model also move it, but by less than ten
    times.
    """
    roofs = Ceilings({"float32": roof(30e9), "bfloat16": roof(300e9)}, {READ: roof(1e9)}, 1, True)
    monkeypatch.setattr(batch_test, "measure_ceilings", lambda *_, **__: roofs)
    options = Options(model=str(tiny_folder), context_lens=[1], new_tokens=4, dtype="float32", device="cpu")
    sizes = batch_test.prepare_batch_test(options, "decode").grid.batch_sizes
    assert 60 < sizes[-1] <= 256


def test_a_knee_that_is_far_is_no_reason_to_pass_the_budget(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the knee is too far for the budget, the warning names a budget that is enough for all batches.

    At 10 MB/s, every visit reads the weights of 5 steps, so few batches fit. The knee is past 4096.
    """
    weights = 4 * 10_000  # the model has many more
    roofs = Ceilings({"float32": roof(1e12)}, {READ: roof(1e7)}, 1, True)
    monkeypatch.setattr(batch_test, "measure_ceilings", lambda *_, **__: roofs)
    options = Options(model=str(tiny_folder), prompt_lens=[16], new_tokens=4, device="cpu", budget_s=2.0)
    capped = batch_test.prepare_batch_test(options, "decode")
    most = capped.grid.batch_sizes[-1]
    assert 2 <= most < batch_test.MOST_SEQUENCES
    assert len(capped.grid.batch_sizes) * 5 * weights / 1e7 < options.budget_s
    [warning] = capped.warnings
    [whole, enough] = re.findall(r"up to (\d+) .* --budget (\d+)", warning)[0]
    assert f"at batch {most}:" in warning
    more = batch_test.prepare_batch_test(replace(options, budget_s=float(enough)), "decode")
    assert (more.grid.batch_sizes[-1], more.warnings) == (int(whole), ())
    with pytest.raises(RequestError, match=r"--budget 0\.01 is too small: batches of up to 2 .* --budget \d+"):
        batch_test.prepare_batch_test(replace(options, budget_s=0.01), "decode")
