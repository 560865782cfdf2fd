"""The acceptance script on simulated cards: it passes on sound ones, and each planted fault fails its own check."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from profiler.counting.operators import ModelWork
from profiler.device.machine import CudaMachine
from profiler.device.telemetry import NvmlSource
from profiler.engines.transformers import GraphEngine
from profiler.errors import RequestError
from profiler.measure import kernels
from profiler.measure.dispatch import hollow_config
from profiler.measure.subject import Subject

from . import mutations, tools
from .acceptance import CARDS, cut, on_card, scoreboard
from .native import why_not
from .truth import Throttle, Truth

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


def a_poisoned_generator() -> Planted:
    words = "Offset increment outside graph capture encountered unexpectedly."
    return mock.patch.object(torch, "rand", side_effect=RuntimeError(words))


def one_workspace() -> Planted:
    """cuBLAS's workspace is freed only before the first capture and after the second, so both graphs share it."""
    free, keep = torch._C._cuda_clearCublasWorkspaces, lambda: None
    calls = iter((free, keep, keep, free))

    @contextlib.contextmanager
    def shared() -> Iterator[None]:
        next(calls)()
        yield
        next(calls)()

    return mock.patch("profiler.device.machine._own_workspaces", shared)


def a_run_that_poisons() -> Planted:
    """The last capture of a run fails, and the generator stays in the capture state, as in torch up to 2.11."""

    def poison(run: Any, *args: Any) -> Any:
        pool, waits = torch.cuda.MemPool(), torch.ones(1, device="cuda").item
        with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool.id):
            waits()
        torch.cuda.set_stream(torch.cuda.default_stream())
        torch._C._cuda_endAllocateToPool(0, pool.id)
        torch._C._cuda_releasePool(0, pool.id)
        return run

    return with_result("profiler.profile", poison)


def experts_without_a_kernel() -> Planted:
    """The experts' product fails for more rows than the first call of a loaded model has."""
    right = torch._grouped_mm

    def product(left: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        if left.shape[0] > 8:
            raise RuntimeError("no kernel image is available")
        return right(left, *args, **more)

    return mock.patch.object(torch, "_grouped_mm", product)


def second_roofs_after_heating() -> Planted:
    """The card is busy for some seconds between the roofs and the second measurement of the first roof."""
    from claims import roofs

    right, products = roofs._roof_with_clocks, iter(range(_HEATING_PRODUCTS))

    def heated(bench: Any, *args: Any) -> Any:
        x = torch.empty(_SIDE, _SIDE, dtype=torch.float16, device=bench.device)
        for _ in products:
            x @ x
        bench.machine.clock.synchronize()
        return right(bench, *args)

    return mock.patch.object(roofs, "_roof_with_clocks", heated)


@contextlib.contextmanager
def a_clock_that_stands_still() -> Iterator[None]:
    """NVML always reports the clock of the cold card."""
    clock_hz = CARDS["H100"].clock_hz
    with (
        second_roofs_after_heating(),
        with_method_result(NvmlSource, "read", lambda reading, *args: replace(reading, clock_hz=clock_hz)),
    ):
        yield


def halved_roof() -> Planted:
    def half(roof: Any, *args: Any) -> Any:
        return replace(roof, per_s=roof.per_s / 2)

    return with_result("claims.roofs.measure_gemm", half)


def gemv_by_its_launches() -> Planted:
    def slow(roofs: Any, *args: Any) -> Any:
        memory = {name: replace(roof, per_s=roof.per_s / 2) for name, roof in roofs.memory.items()}
        return replace(roofs, memory={**roofs.memory, **{name: memory[name] for name in memory if "gemv" in name}})

    return with_result("claims.roofs.measure", slow)


def doubled_replays() -> Planted:
    def twice(times: Any, *args: Any) -> Any:
        return {name: tuple(2 * second for second in seconds) for name, seconds in times.items()}

    return with_result("profiler.measure.kernels.replay_linears", twice)


def another_layer(name: str) -> Callable[[], Planted]:
    """The hollow twin has one more layer than the model."""

    def plant() -> Planted:
        def more(config: Any, *args: Any) -> Any:
            config.num_hidden_layers += 1
            return config

        return mock.patch(name, lambda *args: more(hollow_config(*args)))

    return plant


def a_masked_graph() -> Planted:
    """A prefill of the graph engine gets a mask, while the static engine's does not."""

    def prefill(self: Any, ids: Any, slots: int) -> Any:
        mask = torch.zeros(1, 1, ids.shape[1], slots, dtype=torch.bool, device=ids.device)
        self._model(input_ids=ids, attention_mask=mask, past_key_values=self._slots(1, slots), use_cache=True)

    return mock.patch.object(GraphEngine, "prefill", prefill)


def plans_at_the_first_visit() -> Planted:
    """There is no untimed loop, so cuDNN plans for each new length in the first timed loop."""
    from claims import times

    class Everything(set[Any]):
        def __contains__(self, cell: object) -> bool:
            return True

    right = times.VisitBench
    return mock.patch.object(times, "VisitBench", lambda *args: right(*args, visited=Everything()))


def other_tokens() -> Planted:
    def others(tokens: Any, engine: Any, *args: Any) -> Any:
        return torch.full(tokens.shape, 7) if engine.name == "graph" else tokens

    return with_result("claims.tokens.greedy_tokens", others)


def one_linear_less(name: str) -> Callable[[], Planted]:
    def less(work: ModelWork, *args: Any) -> ModelWork:
        return replace(work, operators=tuple(op for op in work.operators if not op.name.endswith("up_proj")))

    return lambda: with_result(name, less)


def half_a_stream() -> Planted:
    return with_result("claims.dram.random_bytes", lambda data, *args: data[: data.numel() // 2])


def twice_the_bytes() -> Planted:
    return with_result("profiler.quant.storage.storage_bytes", lambda nbytes, *args: 2 * nbytes)


def no_conversions() -> Planted:
    return mock.patch("profiler.measure.kernels.conversions", return_value={})


def a_format_that_fails() -> Planted:
    from claims.bench import Bench

    right = Bench.load

    def load(self: Any, model: str, dtype: Any = None, quant: str = "none") -> Any:
        if quant == "fp4":
            raise RuntimeError("no kernel image is available")
        return right(self, model, dtype, quant)

    return mock.patch.object(Bench, "load", load)


def half_the_energy() -> Planted:
    return with_method_result(NvmlSource, "energy_j", lambda joules, *args: joules / 2)


def no_power() -> Planted:
    return with_method_result(NvmlSource, "read", lambda reading, *args: replace(reading, power_w=None))


def an_unseen_neighbour() -> Planted:
    return mock.patch.object(tools.Neighbour, "__init__", lambda self, world, *args: setattr(self, "_card", world.card))


def a_run_that_keeps_memory() -> Planted:
    leak = []

    def keep(run: Any, *args: Any) -> Any:
        leak.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
        return run

    return with_result("profiler.profile", keep)


def doubling_that_stops() -> Planted:
    from profiler.run.validate import prepare

    def cut_short(prepared: Any, options: Any, *args: Any) -> Any:
        return prepare(replace(options, batch_sizes=[1, 2]))

    return with_result("claims.doubling.prepare_batch_test", cut_short)


def half_the_peak() -> Planted:
    return with_method_result(Subject, "predicted_peak", lambda nbytes, *args: nbytes // 2)


_SIDE = 1 << 15
_HEATING_PRODUCTS = 400
"""34 s on an H100: 2 x 32,768^3 FLOPs each, at 840 TFLOP/s."""


def warming(card: Truth) -> Truth:
    """Return the card with a clock that falls by a fifth during `second_roofs_after_heating`, and not before."""
    return card.but(throttle=Throttle(after_busy_s=40.0, share=0.8))


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
    "a poisoned generator": Fault(
        "recovery", ["a capture that fails", "after a failed capture: random numbers are drawn"],
        "after a failed capture: random numbers are drawn", a_poisoned_generator,
    ),
    "an allocator that gives nothing back": Fault(
        "recovery", ["a capture that fails", "after a failed capture: empty_cache gives memory back"],
        "after a failed capture: empty_cache gives memory back", lambda: mock.patch.object(torch.cuda, "empty_cache"),
    ),
    "graphs that share a workspace": Fault(
        "recovery", ["a graph replays after the end of another one"], "a graph replays after the end of another one",
        one_workspace,
    ),
    "a roof halved": Fault("roofs", ["bfloat16 product"], "bfloat16 product measured twice", halved_roof),
    "a stream above the datasheet": Fault(
        "roofs", ["streams"], "stream / datasheet", spoilt=lambda card: card.but(bytes_per_s=1.5 * card.bytes_per_s)
    ),
    "a roof timed by its launches": Fault(
        "roofs", ["GEMV in a graph"], "GEMV: roof / the same in a graph", gemv_by_its_launches
    ),
    "a clock that stands still": Fault(
        "roofs", ["bfloat16 product"], "bfloat16 product measured twice", a_clock_that_stands_still, warming
    ),
    "half the energy": Fault("roofs", ["energy next to power"], "energy counter / power readings", half_the_energy),
    "labels swapped": Fault(
        "roofs", ["selftest"], "selftest: a large matrix product",
        lambda: mock.patch("profiler.checks.selftest.ABOVE_ROOF", 0.0),
    ),
    "a wrong kernel name": Fault(
        "trace", ["decode: attention kernel"], "decode: attention kernel",
        lambda: mock.patch.dict(tools._KERNELS, {"cudnn attention": "sm90_xmma_gemm_bf16bf16_bf16f32"}),
    ),
    "launches off by a layer": Fault(
        "trace", ["decode: operators that launch, twin = model"], "decode: operators that launch, twin = model",
        another_layer("claims.trace.hollow_config"),
    ),
    "replays doubled": Fault(
        "trace", ["decode: kernels of the step / replayed"], "decode: kernels of the step / replayed, all",
        doubled_replays,
    ),
    "replays L2-warm": Fault(
        "trace", ["replays after two kinds of flush"], "replays of the run / after a read flush",
        lambda: mock.patch.object(kernels, "cold_bytes_of", return_value=0),
    ),
    "a graph prefill with a mask": Fault(
        "trace", ["attention of a static and a graph prefill"], "attention kernels of a static and a graph prefill",
        a_masked_graph,
    ),
    "a warm-up that is timed": Fault(
        "time", ["ours / a plain loop"], "prefill: ours / a plain loop", mutations.timed_warm_up
    ),
    "plans at the first visit": Fault(
        "time", ["a shape twice in a row"], "a visit of a new shape: first / second", plans_at_the_first_visit
    ),
    "hidden dispatch as overhead": Fault(
        "time", ["the split of the main run"], "cells with under 15 % unexplained", mutations.hidden_dispatch
    ),
    "marks that cost": Fault(
        "time", ["the split of the main run"], "instrument / fastest step", spoilt=lambda card: card.but(event_s=1e-4)
    ),
    "a twin of another depth": Fault(
        "time", ["the host's time for a step"], "host-bound decode: issued / hollow twin",
        another_layer("profiler.measure.dispatch.hollow_config"),
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
    "half a stream": Fault(
        "bytes", ["bytes: the memory controller"], "bytes of a stream that is read / memory controller", half_a_stream
    ),
    "bytes of a format": Fault("precision", ["nf4: bytes"], "nf4: linear bytes / 16 bits", twice_the_bytes),
    "dequantisation forgotten": Fault(
        "precision", ["int8wo: a run"], "int8wo: the dequantisation term / replays of its own", no_conversions
    ),
    "a format that fails": Fault("precision", ["fp4: bytes", "another dtype"], "fp4: bytes", a_format_that_fails),
    "int8's captures": Fault(
        "precision", ["int8: a run"], "int8: random numbers are drawn after the run", a_run_that_poisons,
        lambda card: card.but(torch_version=(2, 11)),
    ),
    "experts' captures": Fault(
        "precision", ["a mixture of experts"], "experts: random numbers are drawn after the run", a_run_that_poisons,
        lambda card: card.but(torch_version=(2, 11)),
    ),
    "experts without a kernel": Fault(
        "precision", ["a mixture of experts"], "a Mixtral of four layers: every cell ends", experts_without_a_kernel
    ),
    "no power": Fault("telemetry", ["telemetry"], "telemetry", no_power),
    "an unseen neighbour": Fault(
        "telemetry", ["a second process on the card is noticed"], "a second process on the card is noticed",
        an_unseen_neighbour,
    ),
    "captures on the first card": Fault(
        "devices", ["two cards in one process"], "a graph's step on the second card / on the first",
        a_plain_capture, cards=2,
    ),
    "doubling that stops early": Fault("doubling", ["doubling"], "doubling ends at a limit", doubling_that_stops),
    "half the peak": Fault("doubling", ["doubling"], "predicted / measured peak memory", half_the_peak),
    "a run that keeps memory": Fault(
        "trace", ["the main run"], "memory is given back after the run main", a_run_that_keeps_memory
    ),
    "a swallowed OOM": Fault(
        "doubling", ["out of memory is a row, and memory is given back"],
        "out of memory is a row, and memory is given back", mutations.swallowed_oom,
    ),
}  # fmt: skip


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


_SOUND: dict[tuple[str, tuple[str, ...]], dict[str, bool | None]] = {}
"""Results without a fault, by attempts."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_its_check(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    key = fault.group, tuple(fault.attempts)
    if key not in _SOUND:
        _SOUND[key] = results_of(fault, tmp_path / "sound", planted=False)
    assert False not in _SOUND[key].values()
    assert results_of(fault, tmp_path / "planted", planted=True)[fault.check] is False


def test_there_is_a_fault_for_every_group(tmp_path: Path) -> None:
    with on_card(CARDS["H100"]) as acceptance:
        assert {fault.group for fault in FAULTS.values()} == set(acceptance.groups())


@pytest.mark.parametrize(
    "card",
    [
        pytest.param(warming(CARDS["H100"]), id="warms"),
        pytest.param(
            CARDS["A100"].but(
                clock_hz=1.1 * CARDS["A100"].clock_hz,
                flops_per_s={name: 1.25 * speed for name, speed in CARDS["A100"].flops_per_s.items()},
            ),
            id="boosts",
        ),
    ],
)
def test_a_card_that_warms_or_boosts_fails_no_check_of_its_roofs(card: Truth, tmp_path: Path) -> None:
    """A warm card has a lower clock when its roofs are measured again. At one clock, the roofs agree."""
    with on_card(card) as acceptance, second_roofs_after_heating():
        bench = acceptance._bench(tmp_path, dry_run=False)
        every = acceptance.groups()["roofs"](bench)
        attempts = [each for each in every if each.name == "streams" or "product" in each.name]
        found = list(acceptance.checks(bench, attempts))
    assert len(found) > 10
    assert not [check for check in found if not check.passed]


def test_memory_reserved_by_torch_is_no_room_on_a_full_card(tmp_path: Path) -> None:
    """torch reserves 20 GB from an earlier run. The batch that must exceed the memory would fit there.

    The runs themselves free their memory.
    """
    with on_card(CARDS["A100"]) as acceptance, cut(acceptance, tmp_path, 1):
        bench = acceptance._bench(tmp_path, dry_run=False)
        torch.empty(20 << 30, dtype=torch.uint8, device=bench.device)
        *_, attempt = acceptance.groups()["doubling"](bench)
        check, *_ = acceptance.checks(bench, [attempt])
    assert check.passed, check


def test_a_card_with_little_room_is_not_filled(tmp_path: Path) -> None:
    with on_card(CARDS["T4"].but(taken_bytes=11 << 30)) as acceptance, cut(acceptance, tmp_path, 1):
        bench = acceptance._bench(tmp_path, dry_run=False)
        *_, attempt = acceptance.groups()["doubling"](bench)
        check, *_ = acceptance.checks(bench, [attempt])
    assert (check.passed, check.why) == (None, "4.3 GB are free, 6 are needed")


@pytest.mark.parametrize("without", [(), ("bitsandbytes", "torchao")], ids=["whole", "bare"])
def test_the_script_runs_to_its_end_in_its_time(without: tuple[str, ...], tmp_path: Path) -> None:
    """Models have one layer. Time is on the simulated host's clock, and includes judging and drawing."""
    found = scoreboard([CARDS["T4"]], tmp_path / "out", layers=1, without=without)
    assert [check for check in found["checks"] if check["passed"] is False] == []
    assert found["code"] == 0
    assert found["passed"] > 50
    assert found["in_time"]
    assert sum(found["took_s"].values()) == pytest.approx(found["seconds"], rel=0.01)
    whys = {check["name"]: check["why"] for check in found["checks"]}
    for quant in ("nf4", "int8"):
        assert (whys.get(f"{quant}: bytes") == "bitsandbytes is not installed") == bool(without)


def test_checks_without_time_are_listed(tmp_path: Path) -> None:
    found = scoreboard([CARDS["T4"]], tmp_path / "out", "--minutes", "0.1", layers=1)
    assert {check["passed"] for check in found["checks"]} == {None}
    assert found["seconds"] < 6
    [why] = {check["why"] for check in found["checks"] if check["name"] == "doubling"}
    assert why.endswith("it may take 45")
