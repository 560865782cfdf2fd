"""Failures that affect only their own part of a run, and failures that end the run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hurry import with_effort
from machines import HOST, small

import profiler
from profiler.engines.transformers import EagerEngine
from profiler.errors import DeviceError, RankError, RequestError
from profiler.facts.visits import Gap
from profiler.grid.cells import Cell
from profiler.loading.prompts import Prompts
from profiler.measure import trials
from profiler.measure.sweep import VisitContext, visit, warm_up
from profiler.ranks.process_group import ProcessGroup
from profiler.report.progress import QuietListener
from profiler.run.stages import Stages

CELL = Cell(1, 8, 8)


class Failing:
    """An engine whose first call raises."""

    name = "eager"

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def prepare(self, batch: int, slots: int) -> None:
        raise self.error


class Hears(QuietListener):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def stage(self, text: str) -> None:
        self.heard.append(text)


def visited(error: BaseException) -> Any:
    return visit(Failing(error), CELL, 0, VisitContext(HOST, Prompts(64)))  # type: ignore[arg-type]


def no_memory() -> BaseException:
    """Return torch's error for more bytes than a 47-bit address space has."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("recompile_limit reached\nwith more"), "RuntimeError: recompile_limit reached"),
        (RequestError("this engine cannot."), "this engine cannot."),
    ],
)
def test_a_cell_that_raises_is_a_gap_with_its_type_and_first_line(error: Exception, reason: str) -> None:
    assert visited(error) == Gap(CELL, "failed", reason)


@pytest.mark.parametrize(
    "error", [no_memory(), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")]
)
def test_an_allocator_that_has_no_memory_is_out_of_memory(error: Exception) -> None:
    assert visited(error) == Gap(CELL, "oom", "out of memory")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DeviceError("it is lost"), RankError("rank 1 ended")])
def test_what_ends_a_run_ends_it(error: BaseException) -> None:
    with pytest.raises(type(error)):
        visited(error)
    with pytest.raises(type(error)):
        warm_up(Failing(error), CELL, HOST, prompts=Prompts(64), budget_s=1.0)  # type: ignore[arg-type]
    with pytest.raises(type(error)), Stages(QuietListener(), HOST).optional("a stage", "it is missing"):
        raise error


def test_a_stage_that_fails_is_told_and_what_it_held_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor of the failed step is freed before memory is released, although its error is still being handled."""
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[object] = []
    machine, listener = small(), Hears()
    monkeypatch.setattr(machine, "release", lambda: alive.append(held[0]()))

    def step() -> None:
        tensor = torch.ones(4)
        held.append(weakref.ref(tensor))
        raise AttributeError("no attribute 'cos'")

    stages = Stages(listener, machine)
    with stages.optional("the replays", "kernels have no times"):
        step()
    assert listener.heard == ["the replays failed (AttributeError: no attribute 'cos'): kernels have no times."]
    assert [part.what for part in stages.missing] == ["the replays"]
    assert alive == [None]


def test_whatever_a_rank_raises_in_a_step_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other ranks would wait for the rest of the step."""
    monkeypatch.setattr(ProcessGroup, "failure", lambda _self, error: RankError(f"reported {error}"))
    group = object.__new__(ProcessGroup)
    for error in (RuntimeError("x"), AttributeError("x")):
        with pytest.raises(RankError, match="reported x"), group.together():
            raise error
    with pytest.raises(RequestError, match="a wrong request"), group.together():
        raise RequestError("a wrong request")


@pytest.mark.slow
@pytest.mark.ci
def test_a_batch_size_that_fails_leaves_a_run_with_the_others(
    profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch of one is measured, judged and reported, although other parts of the run fail.

    The model raises AttributeError at a batch of two, variants raise unexpected errors, and the roofs cannot be
    measured again.
    """
    prefill = EagerEngine.prefill
    tried: list[object] = []

    def failing(self: EagerEngine, ids: torch.Tensor, slots: int) -> Any:
        if ids.shape[0] == 2:
            raise AttributeError("no attribute 'cos'")
        return prefill(self, ids, slots)

    def unforeseen(*_: object, **__: object) -> Any:
        raise KeyError("what nobody foresaw")

    monkeypatch.setattr(EagerEngine, "prefill", failing)
    monkeypatch.setattr(trials, "interleaved_steps", lambda *given: tried.append(given) or unforeseen())
    monkeypatch.setattr("profiler.run.measure.remeasure_roofs", unforeseen)
    with_effort(monkeypatch, trials_share=15.0, roofs_again_s=0.5)
    listener = Hears()
    run = profile_tiny(batch_sizes=[1, 2], no_levers=False, listener=listener)
    assert dict(zip(run.cells["batch_size"], run.cells["status"], strict=True)) == {1: "ok", 2: "failed"}
    assert run.document.finished
    assert any("AttributeError: no attribute 'cos'" in warning for warning in run.document.warnings)
    assert tried, "a variant was tried and then skipped"
    missing = {part.what: part.why for part in run.document.missing}
    assert missing.pop("the second measurement of the roofs") == "KeyError: 'what nobody foresaw'"
    assert missing.pop("dispatch on the hollow twin") == "AttributeError: no attribute 'cos'"
    assert all(what.startswith("trying ") for what in missing)
    assert {part.sentence for part in run.document.missing} < set(run.document.warnings)
