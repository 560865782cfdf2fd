"""The overhead of the last day: used while the host steps at its speed; and the time that measuring it takes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from machines import HOST, FakeClock
from small_models import SIZES, small_model
from subjects import subject_of
from transformers import LlamaForCausalLM

from profiler.device.machine import Machine
from profiler.errors import tolerate_errors
from profiler.facts.overhead import OverheadSamples
from profiler.measure.overhead import measure_overhead

STALL_S = 60.0
STEP_S = 40e-3
"""A step of the overhead model, on a machine at its usual speed."""


class Paced(Machine, FakeClock):
    """A CPU of one clock, on which a step of the overhead model takes `overhead_model_s`. The step after
    `stalls_after` of them takes `STALL_S` more."""

    def __init__(self, overhead_model_s: float) -> None:
        Machine.__init__(self, HOST.device, clock=self)
        FakeClock.__init__(self)
        self.overhead_model_s, self.passed_s, self.steps = overhead_model_s, 0.0, 0
        self.stalls_after: int | None = None

    def now_s(self) -> float:
        return self.passed_s

    def mark(self) -> float:
        return self.passed_s


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Paced:
    """A machine that steps the overhead model in 40 ms, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine, forward = Paced(STEP_S), LlamaForCausalLM.forward

    def step(self: Any, *args: Any, **named: Any) -> Any:
        if self.config.hidden_size < SIZES["hidden_size"]:
            machine.passed_s += machine.overhead_model_s + STALL_S * (machine.steps == machine.stalls_after)
            machine.steps += 1
        return forward(self, *args, **named)

    monkeypatch.setattr(LlamaForCausalLM, "forward", step)
    return machine


Measure = Callable[..., list[OverheadSamples]]
subject_at = cache(lambda folder: subject_of(str(folder)))


@pytest.fixture
def measured(tiny_folder: Path, paced: Paced) -> Measure:
    """Measure the overhead of a model, by default the tiny one in one eager engine at batch 1."""

    def measure(
        folder: Path = tiny_folder, sizes: Sequence[int] = (1,), budget_s: float = 4.0, **options: Any
    ) -> list[OverheadSamples]:
        subject, config = subject_at(folder)
        paced.steps = 0
        return measure_overhead(subject.loaded, config, paced, sizes, ["eager"], budget_s, **options)

    return measure


def test_kept_samples_are_used_after_a_check_of_two_short_loops(measured: Measure, paced: Paced) -> None:
    first = measured(fresh=False)
    whole = paced.steps
    assert measured(fresh=False) == first
    # The first call after loading, a loop that is not timed, and a prefill and a step before the four.
    assert paced.steps <= 1 + 6 + 6 < whole
    assert {item.phase: min(item.alone_s) for item in first} == pytest.approx({"prefill": STEP_S, "decode": STEP_S})


@pytest.mark.parametrize(
    ("speed", "fresh", "is_used"),
    [(1.08, False, True), (0.93, False, True), (1.2, False, False), (0.8, False, False), (1.05, True, False)],
)
def test_kept_samples_are_measured_again_on_request_or_where_the_host_is_slower_or_faster_than_then(
    measured: Measure, paced: Paced, speed: float, fresh: bool, is_used: bool
) -> None:
    first = measured(fresh=False)
    paced.overhead_model_s *= speed
    again = measured(fresh=fresh)
    assert (again == first) == is_used
    assert min(again[-1].alone_s) == pytest.approx(STEP_S * (1 if is_used else speed))
    assert measured(fresh=False) == again, "what was measured is kept in place of it"


def test_another_place_of_the_model_is_the_same_overhead_and_another_shape_is_not(
    measured: Measure, paced: Paced, tiny_folder: Path, tmp_path: Path
) -> None:
    first = measured(fresh=False)
    elsewhere, wider = tmp_path / "elsewhere", tmp_path / "wider"
    shutil.copytree(tiny_folder, elsewhere)
    small_model("Llama", intermediate_size=256, max_position_embeddings=256).save_pretrained(wider)
    paced.overhead_model_s *= 1.05
    assert measured(elsewhere, fresh=False) == first
    for others in (measured(wider, fresh=False), measured(sizes=(1, 2), fresh=False)):
        assert min(others[-1].alone_s) == pytest.approx(1.05 * STEP_S)
    for file in (tmp_path / "cache").rglob("overhead/*.json"):
        assert not {"tiny", "wider", "elsewhere"} & set(file.read_text().split())
        file.write_text("[")
    assert min(measured(fresh=False)[-1].alone_s) == pytest.approx(1.05 * STEP_S)


def test_samples_of_a_very_short_time_are_not_kept(measured: Measure, paced: Paced) -> None:
    """They have a step or two, and a later run may have more time."""
    measured(budget_s=0.5, fresh=False)
    paced.overhead_model_s *= 1.05
    assert min(measured(fresh=False)[-1].alone_s) == pytest.approx(1.05 * STEP_S)


CORES = 3
"""Steps in which the attention cores of a prefill and of a decode step are captured; they are not timed."""


@pytest.mark.parametrize(
    ("step_s", "stalls_after", "is_kept"),
    [
        (STEP_S, None, True), (0.3, None, True), (0.41, None, True), (1.0, None, False), (60.0, None, False),
        (STEP_S, 18, False), (STEP_S, 22, False), (STEP_S, 27, False), (STEP_S, 32, True), (STEP_S, 42, True),
    ],
)  # fmt: skip
def test_all_sizes_together_take_at_most_twice_their_time_or_are_missing_with_the_reason(
    measured: Measure, paced: Paced, step_s: float, stalls_after: int | None, is_kept: bool
) -> None:
    """A step cannot be cut, but none is timed after the one that passes twice the time. Complete turns are kept.

    One step of the overhead model by itself stalls, of the first turn of prefills, of the first turn of decode steps,
    of the second size, and of the second turn of prefills.
    """
    paced.overhead_model_s, paced.stalls_after, errors = step_s, stalls_after, list[str]()
    found = measured(sizes=(1, 2, 4), guard=lambda: tolerate_errors(lambda error: errors.append(str(error))))
    first_call_s, late_s = step_s, max(step_s, STALL_S if stalls_after else 0.0)
    assert paced.passed_s <= 8.0 + first_call_s + late_s + CORES * step_s
    if is_kept:
        sizes = {(item.phase, item.batch_size) for item in found}
        assert sizes >= {("prefill", 1), ("prefill", 2), ("prefill", 4), ("decode", 1)}
        assert all(item.among_s and item.bare_s and item.alone_s and item.cores for item in found)
        assert stalls_after is None or ("decode", 4) not in sizes
    else:
        assert (found, set(errors)) == ([], {"its steps did not end within 8.00 s"})


def test_a_stall_leaves_the_complete_loops_of_an_overhead_model_that_steps_only_by_itself(
    measured: Measure, paced: Paced, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(subject_at(tiny_folder)[0].loaded.offloaded_bytes, "host", 1)
    paced.stalls_after = 30
    assert {item.phase: item.alone_s for item in measured()} == {
        "prefill": pytest.approx([STEP_S]),
        "decode": pytest.approx([STEP_S] * 11),
    }
