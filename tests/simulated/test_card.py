"""The simulated card follows CUDA's rules, and the machine accesses it as promised."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from profiler.device.machine import Machine, machine_for
from profiler.device.telemetry import Watch
from profiler.engines.transformers import GenerateEngine
from profiler.errors import RequestError
from profiler.facts.telemetry import POWER_CAP

from .mode import CardMode
from .native import why_not
from .truth import H100, T4, PowerCap
from .world import World, simulated

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

CARD = torch.device("cuda", 0)
MIB = 1 << 20


@pytest.fixture
def world() -> Iterator[World]:
    with simulated(H100.but(l2_bytes=0, smallest_kernel_s=0.0)) as world:
        yield world


@pytest.fixture
def machine(world: World) -> Machine:
    return machine_for(CARD)


def test_a_kernel_takes_its_roof_and_the_host_runs_ahead(world: World) -> None:
    a = torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    began = world.host.now_s
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a @ a
    before.record()
    a @ a
    after.record()
    assert world.host.now_s - began == pytest.approx(2 * 7e-6 + 2e-6), "two launches and two events"
    with pytest.raises(RuntimeError, match="not ready"):
        before.elapsed_time(after)
    torch.cuda.synchronize()
    assert before.elapsed_time(after) == pytest.approx(1e3 * 2 * 8192**3 / 8.4e14, rel=1e-3)


def test_the_launch_queue_fills(world: World) -> None:
    """The host is at most 1,024 launches ahead."""
    x = torch.zeros(300 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    began, kernel_s = world.host.now_s, 2 * 300 * MIB / H100.bytes_per_s
    for _ in range(1100):
        x.add_(1)
    assert world.host.now_s - began == pytest.approx((1100 - 1024) * kernel_s, rel=0.03)


def test_reading_a_value_waits(world: World) -> None:
    x = torch.zeros(300 * MIB, dtype=torch.uint8, device="cuda")
    x.add_(1)
    x[0].item()
    assert world.host.now_s >= world.card.stream.ready_s


def test_generate_ends_with_its_last_token(machine: Machine) -> None:
    """At each step, `generate` reads from the card whether all sequences have ended."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    with torch.device("cuda"), torch.inference_mode():
        engine = GenerateEngine(LlamaForCausalLM(config).eval(), machine)
        marks: list[None] = []
        tokens = engine.call(torch.ones(2, 3, dtype=torch.long), 5, lambda: marks.append(None))
    assert tokens.shape == (2, 5)
    assert len(marks) == 6


def test_reserved_is_not_allocated(world: World, machine: Machine) -> None:
    """Memory that torch reserves after it frees a tensor is available to this process, and not used by another."""
    free, used = machine.available_bytes(), machine.used_bytes()
    held = torch.empty(30 << 30, dtype=torch.uint8, device="cuda")
    assert machine.available_bytes() == free - (30 << 30)
    del held
    assert torch.cuda.memory_reserved() == 30 << 30
    assert torch.cuda.mem_get_info()[0] < free
    assert machine.available_bytes() == free
    assert machine.used_bytes() == used
    machine.release()
    assert torch.cuda.mem_get_info()[0] == free


def test_nothing_references_a_storage_that_was_handed_over(world: World) -> None:
    """Calls are remembered by the layout of their arguments. References to the arguments would keep every copied
    weight alive."""
    weight = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    same = torch.empty(0, dtype=torch.uint8, device="cuda").set_(weight.untyped_storage(), 0, (300 * MIB,), (1,))
    assert torch.cuda.memory_allocated() >= 300 * MIB
    del weight, same
    assert torch.cuda.memory_allocated() == 0


def test_memory_ends(world: World) -> None:
    kept = torch.empty(70 << 30, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(12 << 30, dtype=torch.uint8, device="cuda")
    del kept
    torch.empty(12 << 30, dtype=torch.uint8, device="cuda")


def test_a_short_kernel_takes_as_long_as_the_shortest() -> None:
    """This holds for any number of bytes, launched separately or replayed."""
    with simulated(H100) as world:
        x = torch.zeros(16, device="cuda")
        replay = machine_for(CARD).capture(lambda: x.add_(1))
        world.card.log = log = []
        x.add_(1)
        replay()
        world.card.log = None
    assert [kernel.duration_s for kernel in log] == [H100.smallest_kernel_s] * 2


def test_a_cache_serves_what_was_just_touched() -> None:
    with simulated(H100.but(smallest_kernel_s=0.0)) as world:
        x = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda").fill_(1)
        large = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        world.card.log = log = []
        x.sum()
        large.sum()
        x.sum()
        assert [(kernel.memory_bytes >> 20, kernel.l2_bytes >> 20) for kernel in log] == [(0, 8), (100, 0), (8, 0)]


@pytest.mark.parametrize(("reads", "writes_back", "delayed"), [(False, True, 1), (True, True, 0), (False, False, 0)])
def test_the_writes_of_a_flush_delay_the_next_kernel(reads: bool, writes_back: bool, delayed: int) -> None:
    """The delay is the cache's size over the memory's bandwidth. A flush that reads leaves nothing to write back."""
    with simulated(H100.but(l2_writes_back=writes_back)) as world:
        flushed = torch.zeros(2 * H100.l2_bytes, dtype=torch.uint8, device="cuda")
        weight = torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")
        for _ in range(2):
            flushed.sum() if reads else flushed.fill_(1)
            world.card.log = log = []
            weight.sum()
            weight.sum()
            world.card.log = None
    first, second = (kernel.duration_s for kernel in log)
    assert second == pytest.approx(400 * MIB / H100.bytes_per_s, rel=1e-3)
    assert first - second == pytest.approx(delayed * H100.l2_bytes / H100.bytes_per_s, rel=1e-3)


def test_writes_reach_memory_once() -> None:
    """Writes reach it now or later: each of several large writes waits for the rest of the previous one."""
    with simulated(H100) as world:
        buffers = [torch.empty(200 * MIB, dtype=torch.uint8, device="cuda") for _ in range(5)]
        small = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        world.card.log = log = []
        for buffer in buffers:
            buffer.fill_(1)
        small.fill_(1)
        buffers[0].sum()
        world.card.log = None
    written = sum(kernel.memory_bytes for kernel in log) - 200 * MIB
    assert written == 5 * 200 * MIB
    assert [kernel.memory_bytes for kernel in log[:3]] == [150 * MIB, 200 * MIB, 200 * MIB]


def test_arithmetic_lowers_the_clock_of_a_card_at_its_power_cap() -> None:
    """The clock falls after 8192^3 products for 0.1 s, and recovers after other work for the same time."""
    with simulated(H100.but(power_cap=PowerCap(after_computing_s=0.1, share=0.8))) as world:
        a = torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")
        stream = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
        source = machine_for(CARD).source
        product_s = 2 * 8192**3 / H100.flops_per_s["bfloat16"]

        def seconds(work: Callable[[], object], total_s: float) -> float:
            """Return the seconds of one more call, after calls for `total_s`."""
            start_s = world.host.now_s
            while world.host.now_s - start_s < total_s:
                work()
                torch.cuda.synchronize()
            world.card.log = log = []
            work()
            world.card.log = None
            return float(log[0].duration_s)

        assert seconds(stream.sum, 0.2) == pytest.approx(300 * MIB / H100.bytes_per_s)
        assert source.read().clock_hz == H100.clock_hz
        assert source.read().throttle == ()
        assert seconds(lambda: a @ a, 0.05) == pytest.approx(product_s)
        assert seconds(lambda: a @ a, 0.1) == pytest.approx(product_s / 0.8)
        reading = source.read()
        assert reading.clock_hz == pytest.approx(0.8 * H100.clock_hz, rel=1e-3)
        assert reading.throttle == (POWER_CAP,)
        assert reading.power_w == reading.power_limit_w == H100.power_w
        assert seconds(stream.sum, 0.2) == pytest.approx(300 * MIB / H100.bytes_per_s)
        assert source.read().clock_hz == H100.clock_hz
        assert seconds(lambda: a @ a, 0.0) == pytest.approx(product_s)


def test_a_replay_is_one_launch_of_all_kernels(world: World, machine: Machine) -> None:
    x = torch.zeros(300 * MIB, dtype=torch.uint8, device="cuda")

    def work() -> None:
        for _ in range(50):
            x.add_(1)

    with machine.on_side_stream():
        work()
    replay = machine.capture(work)
    torch.cuda.synchronize()
    host_s, busy_s = world.host.now_s, world.card.busy_s
    replay()
    assert world.host.now_s - host_s == pytest.approx(H100.graph_launch_s)
    assert world.card.busy_s - busy_s == pytest.approx(50 * 2 * 300 * MIB / H100.bytes_per_s)


def test_a_capture_that_waits_fails_and_leaves_the_stream_as_it_was(world: World, machine: Machine) -> None:
    """After a failure, torch.cuda.graph stays on its capture stream (torch/cuda/graphs.py, `__exit__`)."""
    x = torch.zeros(16, device="cuda")
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
    assert torch.cuda.current_stream() is not before, "torch stays on its capture stream"
    torch.cuda.set_stream(before)
    with pytest.raises(RequestError, match="not permitted when stream is capturing"):
        machine.capture(lambda: x.sum().item())
    assert torch.cuda.current_stream() is before
    machine.capture(lambda: x.add_(1))()


def test_running_out_of_memory_in_a_capture_is_no_fault_of_the_capture(machine: Machine) -> None:
    before = torch.cuda.current_stream()
    with pytest.raises(torch.OutOfMemoryError):
        machine.capture(lambda: torch.zeros(100 << 30, dtype=torch.uint8, device="cuda"))
    assert torch.cuda.current_stream() is before


def test_a_name_that_is_not_answered_is_an_error(world: World) -> None:
    with pytest.raises(NotImplementedError, match="memory_summary"):
        torch.cuda.memory_summary()


def test_streams_and_graphs_are_those_of_the_machines_card() -> None:
    """Without `set_device` they would be card 0's, and a capture would record nothing."""
    with simulated(H100, T4) as world:
        machine = machine_for(torch.device("cuda", 1))
        x = torch.zeros(1 << 20, device="cuda:1")
        with machine.on_side_stream():
            x.add_(1)
        busy_s = world.cards[1].busy_s
        machine.capture(lambda: x.add_(1))()
        assert world.cards[1].busy_s > busy_s
        assert world.cards[0].busy_s == 0.0


def test_a_capture_without_a_stream_goes_to_the_card_of_the_first_one() -> None:
    """torch.cuda.graph has one capture stream per process (`default_capture_stream`). The second card's work runs
    immediately on another stream, and the graph is empty."""
    with simulated(H100, H100) as world:
        tensors = [torch.zeros(1 << 20, device=f"cuda:{index}") for index in range(2)]

        def captured_on(index: int) -> bool:
            torch.cuda.set_device(index)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                tensors[index].add_(1)
            busy_s = world.cards[index].busy_s
            graph.replay()
            return world.cards[index].busy_s > busy_s

        assert captured_on(0)
        assert not captured_on(1)


def test_a_watch_reads_by_the_simulated_clock(world: World, machine: Machine) -> None:
    with Watch(machine.source, interval_s=0.5) as watch:
        world.host.advance(2.2)
    assert [reading.at_unix_s % 1 for reading in watch.readings] == [0.5, 0.0, 0.5, 0.0]
    assert all(reading.clock_hz == H100.clock_hz for reading in watch.readings)


def test_a_known_call_has_the_computed_effect(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of a model's second step is known and has the same effect, if it allocates the same memory."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    asked: list[object] = []
    worked_out = CardMode.__torch_dispatch__

    def counted(self: CardMode, func: object, *rest: Any) -> Any:
        asked.append(func)
        return worked_out(self, func, *rest)

    with torch.device("cuda"), torch.inference_mode():
        model = LlamaForCausalLM(config).eval()
        ids = torch.ones(2, 5, dtype=torch.long)
    monkeypatch.setattr(CardMode, "__torch_dispatch__", counted)
    steps = []
    for _ in range(2):
        asked.clear()
        world.card.log = log = []
        with torch.inference_mode():
            model(ids, use_cache=False)
        steps.append([(*kernel.work[:1], *kernel.work[3:], kernel.memory_bytes, kernel.duration_s) for kernel in log])
    assert len(steps[0]) > 50
    assert steps[0] == steps[1]
    assert len(asked) < 10, "all calls except those that are never remembered"


def test_a_number_is_part_of_a_calls_key(world: World) -> None:
    """Python's numbers are tensors of the host. An int keeps an integer dtype, a float does not."""
    x = torch.zeros(4, dtype=torch.int64, device="cuda")
    assert [(x + number).dtype for number in (1, 2, 1.5, 1, True)] == [torch.int64] * 2 + [torch.float32] + [
        torch.int64
    ] * 2
    assert [x.clamp(max=number).dtype for number in (1, 1.5, 1)] == [torch.int64, torch.float32, torch.int64]


def test_there_is_no_card_outside_the_simulation() -> None:
    with contextlib.suppress(RuntimeError), simulated(H100):
        pass
    assert not torch.cuda.is_available()


@pytest.mark.timing
def test_an_operator_costs_less_than_a_fifth_of_torchs_fake_mode() -> None:
    """Its cost includes price, memory and place on the card's clock. It was measured as 0.01 of the fake mode's."""

    def least_s(device: str) -> float:
        x = torch.empty(64, 64, device=device)
        found = []
        for _ in range(20):
            began_s = time.process_time()
            for _ in range(200):
                x * x
            found.append(time.process_time() - began_s)
        return min(found)

    with simulated(H100), torch.inference_mode():
        simulated_s = least_s("cuda")
    with FakeTensorMode(), torch.inference_mode():
        faked_s = least_s("cpu")
    assert simulated_s < 0.2 * faked_s
