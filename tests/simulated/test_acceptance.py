"""The acceptance script on simulated GPUs: it passes on a sound one, and a fault of each group fails its own check."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from profiler.counting.operators import ModelWork
from profiler.device.machine import CudaMachine
from profiler.device.telemetry import NvmlSource
from profiler.errors import RequestError
from profiler.measure.subject import Subject

from . import mutations
from .acceptance import CARDS, cut, on_card, scoreboard
from .native import why_not
from .truth import Truth

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

Planted = contextlib.AbstractContextManager[Any]


def with_result(name: str, change: Callable[..., Any]) -> Planted:
    """Apply `change` to a function's result and arguments, within the context."""
    module, _, own = name.rpartition(".")
    right = getattr(__import__(module, fromlist=[own]), own)
    return mock.patch(name, lambda *args, **more: change(right(*args, **more), *args))


def with_method_result(owner: type, name: str, change: Callable[..., Any]) -> Planted:
    right = getattr(owner, name)
    return mock.patch.object(owner, name, lambda self, *args, **more: change(right(self, *args, **more), self, *args))


def a_plain_capture() -> Planted:
    """Capture as torch does: on the process's only capture stream, which stays current after a failed capture."""

    def capture(self: Any, work: Callable[[], object], **_: Any) -> Any:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                work()
        except RuntimeError as error:
            raise RequestError("it cannot be captured") from error
        return graph.replay

    return mock.patch.object(CudaMachine, "capture", capture)


def halved_roof() -> Planted:
    def half(roof: Any, *args: Any) -> Any:
        return replace(roof, per_s=roof.per_s / 2)

    return with_result("claims.roofs.measure_gemm", half)


def doubled_replays() -> Planted:
    def twice(times: Any, *args: Any) -> Any:
        return {name: tuple(2 * second for second in seconds) for name, seconds in times.items()}

    return with_result("profiler.measure.kernels.replay_linears", twice)


def other_tokens() -> Planted:
    def others(tokens: Any, engine: Any, *args: Any) -> Any:
        return torch.full(tokens.shape, 7) if engine.name == "graph" else tokens

    return with_result("claims.tokens.greedy_tokens", others)


def one_linear_less(name: str) -> Callable[[], Planted]:
    def less(work: ModelWork, *args: Any) -> ModelWork:
        return replace(work, operators=tuple(op for op in work.operators if not op.name.endswith("up_proj")))

    return lambda: with_result(name, less)


def no_conversions() -> Planted:
    return mock.patch("profiler.measure.kernels.conversions", return_value={})


def no_power() -> Planted:
    return with_method_result(NvmlSource, "read", lambda reading, *args: replace(reading, power_w=None))


def half_the_peak() -> Planted:
    return with_method_result(Subject, "predicted_peak", lambda nbytes, *args: nbytes // 2)


@dataclass(frozen=True)
class Fault:
    """A fault, the attempts with and without it, and the check that must fail."""

    group: str
    attempts: Sequence[str]
    check: str
    plant: Callable[[], Planted] = contextlib.nullcontext
    spoilt: Callable[[Truth], Truth] = lambda truth: truth
    """The card with the fault, if the fault is in the card."""
    cards: int = 1


FAULTS = {
    "a neighbour holds the card": Fault(
        "installation", ["doctor"], "doctor: memory", spoilt=lambda card: card.but(taken_bytes=60 << 30)
    ),
    "a capture that leaves the stream": Fault(
        "recovery", ["a capture that fails"], "after a failed capture: the current stream is the default one",
        a_plain_capture,
    ),
    "a roof halved": Fault("roofs", ["bfloat16 product"], "bfloat16 product measured twice", halved_roof),
    "replays doubled": Fault(
        "trace", ["decode: kernels of the step / replayed"], "decode: kernels of the step / replayed, all",
        doubled_replays,
    ),
    "a warm-up that is timed": Fault(
        "time", ["ours / a plain loop"], "prefill: ours / a plain loop", mutations.timed_warm_up
    ),
    "other tokens": Fault("tokens", ["tokens: graph = eager"], "tokens: graph = eager", other_tokens),
    "a linear not counted": Fault(
        "counts", ["prefill FLOPs: torch's counter"], "prefill FLOPs of all linears: torch's counter",
        one_linear_less("claims.counts.walk"),
    ),
    "a weight not counted": Fault(
        "bytes", ["bytes: the memory controller"], "decode bytes: executed / memory controller",
        one_linear_less("claims.dram.walk"),
    ),
    "dequantisation forgotten": Fault(
        "precision", ["int8wo: a run"], "int8wo: the dequantisation term / replays of its own", no_conversions
    ),
    "no power": Fault("telemetry", ["telemetry"], "telemetry", no_power),
    "captures on the first card": Fault(
        "devices", ["two cards in one process"], "a graph's step on the second card / on the first",
        a_plain_capture, cards=2,
    ),
    "half the peak": Fault("doubling", ["doubling"], "predicted / measured peak memory", half_the_peak),
}  # fmt: skip
CI = "other tokens"


def results_of(fault: Fault, folder: Path, *, planted: bool) -> dict[str, bool | None]:
    """Return the results of the checks of a fault's attempts on an H100, with the fault or without it."""
    card = fault.spoilt(CARDS["H100"]) if planted else CARDS["H100"]
    with on_card(*[card] * fault.cards) as acceptance, cut(acceptance, folder, 1):
        bench = acceptance._bench(folder, dry_run=False)
        with fault.plant() if planted else contextlib.nullcontext():
            attempts = [each for each in acceptance.groups()[fault.group](bench) if each.name in fault.attempts]
            assert len(attempts) == len(fault.attempts)
            found = {check.name: check for check in acceptance.checks(bench, attempts)}
    for check in found.values():
        print(check)
    return {name: check.passed for name, check in found.items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.ci] * (name == CI)) for name in FAULTS])
def test_a_planted_fault_fails_its_check(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    assert False not in results_of(fault, tmp_path / "sound", planted=False).values()
    assert results_of(fault, tmp_path / "planted", planted=True)[fault.check] is False


def test_there_is_a_fault_for_every_group(tmp_path: Path) -> None:
    with on_card(CARDS["H100"]) as acceptance:
        assert {fault.group for fault in FAULTS.values()} == set(acceptance.groups())


def test_the_script_runs_to_its_end_in_its_time(tmp_path: Path) -> None:
    """Models have one layer. Time is on the simulated host's clock, and includes judging and drawing."""
    found = scoreboard([CARDS["T4"]], tmp_path / "out", layers=1)
    assert [check for check in found["checks"] if check["passed"] is False] == []
    assert found["code"] == 0
    assert found["passed"] > 50
    assert found["in_time"]
    assert sum(found["took_s"].values()) == pytest.approx(found["seconds"], rel=0.01)
