"""The acceptance script on simulated GPUs: it passes on a sound one, and a fault of each group fails its own check."""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from profiler.counting.operators import ModelWork
from profiler.device.machine import CudaMachine
from profiler.errors import RequestError

from . import mutations
from .acceptance import CARDS, cut, on_card, scoreboard

pytestmark = pytest.mark.slow

Planted = contextlib.AbstractContextManager[Any]


def changed(name: str, change: Callable[..., Any]) -> Callable[[], Planted]:
    """Apply `change` to the results and the arguments of a function or a method, within the context."""

    def plant() -> Planted:
        right = pkgutil.resolve_name(name)
        return mock.patch(name, lambda *args, **more: change(right(*args, **more), *args))

    return plant


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


def doubled(times: dict[str, tuple[float, ...]], *_: Any) -> dict[str, tuple[float, ...]]:
    return {name: tuple(2 * second for second in seconds) for name, seconds in times.items()}


def other_tokens(tokens: Any, engine: Any, *_: Any) -> Any:
    return torch.full(tokens.shape, 7) if engine.name == "graph" else tokens


def one_linear_less(work: ModelWork, *_: Any) -> ModelWork:
    return replace(work, operators=tuple(op for op in work.operators if not op.name.endswith("up_proj")))


@dataclass(frozen=True)
class Fault:
    """A fault, the attempt that is made with and without it, and its check that must fail."""

    group: str
    attempt: str
    check: str
    plant: Callable[[], Planted] = contextlib.nullcontext
    taken_bytes: int = CARDS["H100"].taken_bytes
    """Bytes of the card that others hold, if that is the fault."""
    cards: int = 1


FAULTS = {
    "a neighbour holds the card": Fault("installation", "doctor", "doctor: memory", taken_bytes=60 << 30),
    "a capture that leaves the stream": Fault(
        "recovery", "a capture that fails", "after a failed capture: the current stream is the default one",
        a_plain_capture,
    ),
    "a roof halved": Fault(
        "roofs", "bfloat16 product", "bfloat16 product measured twice",
        changed("claims.roofs.measure_gemm", lambda roof, *_: replace(roof, per_s=roof.per_s / 2)),
    ),
    "replays doubled": Fault(
        "trace", "decode: kernels of the step / replayed", "decode: kernels of the step / replayed, all",
        changed("profiler.measure.kernels.replay_linears", doubled),
    ),
    "a warm-up that is timed": Fault(
        "time", "ours / a plain loop", "prefill: ours / a plain loop", mutations.timed_warm_up
    ),
    "other tokens": Fault(
        "tokens", "tokens: graph = eager", "tokens: graph = eager", changed("claims.tokens.greedy_tokens", other_tokens)
    ),
    "a weight not counted": Fault(
        "bytes", "bytes: the memory controller", "decode bytes: executed / memory controller",
        changed("claims.counts.walk", one_linear_less),
    ),
    "dequantisation forgotten": Fault(
        "precision", "int8wo: a run", "int8wo: the dequantisation term / replays of its own",
        changed("profiler.measure.kernels.conversions", lambda *_: {}),
    ),
    "no power": Fault(
        "telemetry", "telemetry", "telemetry",
        changed("profiler.device.telemetry.NvmlSource.read", lambda reading, *_: replace(reading, power_w=None)),
    ),
    "captures on the first card": Fault(
        "devices", "two cards in one process", "a graph's step on the second card / on the first",
        a_plain_capture, cards=2,
    ),
    "half the peak": Fault(
        "doubling", "doubling", "predicted / measured peak memory",
        changed("profiler.measure.subject.Subject.predicted_peak", lambda nbytes, *_: nbytes // 2),
    ),
}  # fmt: skip
CI = "other tokens"


def results_of(fault: Fault, folder: Path, *, planted: bool) -> dict[str, bool | None]:
    """Return the results of the checks of a fault's attempt on an H100, with the fault or without it."""
    card = CARDS["H100"].but(taken_bytes=fault.taken_bytes) if planted else CARDS["H100"]
    with on_card(*[card] * fault.cards) as acceptance, cut(acceptance, folder, 1):
        bench = acceptance._bench(folder, dry_run=False)
        with fault.plant() if planted else contextlib.nullcontext():
            [attempt] = [each for each in acceptance.groups()[fault.group](bench) if each.name == fault.attempt]
            return {check.name: check.passed for check in acceptance.checks(bench, [attempt])}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.ci] * (name == CI)) for name in FAULTS])
def test_a_planted_fault_fails_its_check(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    assert False not in results_of(fault, tmp_path / "sound", planted=False).values()
    assert results_of(fault, tmp_path / "planted", planted=True)[fault.check] is False


def test_the_script_runs_to_its_end_in_its_time(tmp_path: Path) -> None:
    """Models have one layer. Time is on the simulated host's clock."""
    found = scoreboard([CARDS["T4"]], tmp_path / "out", layers=1)
    assert [check for check in found["checks"] if check["passed"] is False] == []
    assert found["code"] == 0
    assert found["passed"] > 50
    assert found["imports_s"] + sum(found["took_s"].values()) == pytest.approx(found["seconds"], rel=0.01)
    assert found["seconds"] < 60 * found["minutes"]
