"""The state after a failed capture in each torch release, and ways to restore it.

Sources are aten/src/ATen/cuda/CUDAGraph.cpp and c10/cuda/CUDACachingAllocator.cpp. PR #176752 (2.12) gives each capture
its own generator state. PR #180395 (2.13) ends the allocation to the pool on errors, too. PR #190348 (2.14) releases
the pool.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler.device.machine import machine_for
from profiler.errors import CaptureError, RequestError
from profiler.store.folder import read_gathered

from .native import why_not
from .scenario import Scenario, said
from .truth import A100, H100, Truth
from .world import World, simulated

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

MIB, GIB = 1 << 20, 1 << 30
VERSIONS = [(2, 11), (2, 12), (2, 13), (2, 14)]
CARD = torch.device("cuda", 0)


@pytest.fixture(params=VERSIONS, ids=lambda version: "torch {}.{}".format(*version))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with simulated(H100.but(torch_version=request.param)) as world:
        yield world


def of(*version: int) -> Truth:
    return H100.but(torch_version=version)


def lose_capture(nbytes: int = 0, pool: tuple[int, int] | None = None) -> Any:
    """Return the graph of a capture that fails after allocating some bytes."""
    before, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    x = torch.zeros(16, device="cuda")

    def attempt() -> None:
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream()):
            torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            x.sum().item()

    with pytest.raises(RuntimeError, match="capture"):
        attempt()
    torch.cuda.set_stream(before)
    return graph


def capture() -> Any:
    """Make a capture that succeeds."""
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(16, device="cuda")
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        x.add_(1)
    return graph


def tidy(pool: Any) -> None:
    """Restore torch after a failed capture into this torch.cuda.MemPool, on every version."""
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(0, pool.id)
    while pool.use_count() > 1:
        torch._C._cuda_releasePool(0, pool.id)
    capture()


def reserved_after_release(nbytes: int = 256 * MIB) -> int:
    """Return the bytes that torch reserves after some bytes were allocated, freed and released."""
    torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_random_numbers_are_refused_until_a_capture_succeeds(world: World) -> None:
    torch.rand(4, device="cuda")
    lose_capture()
    if world.card.truth.torch_version <= (2, 11):
        for draw in (torch.rand, torch.randn):
            with pytest.raises(RuntimeError, match="Offset increment outside graph capture encountered unexpectedly"):
                draw(4, device="cuda")
        with pytest.raises(RuntimeError, match="Offset increment"):
            torch.zeros(4, device="cuda").normal_()
        with pytest.raises(RuntimeError, match="Offset increment"):
            torch.randint(4, (4,), device="cuda")
        torch.rand(4)
    capture()
    torch.rand(4, device="cuda")


def test_a_captures_random_numbers_are_its_own(world: World) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        torch.rand(4, device="cuda")
    graph.replay()
    torch.rand(4, device="cuda")


def test_attention_draws_nothing_without_dropout() -> None:
    with simulated(of(2, 11)):
        lose_capture()
        q = torch.zeros(1, 2, 8, 64, dtype=torch.float16, device="cuda")
        torch.nn.functional.scaled_dot_product_attention(q, q, q)


def test_a_failed_capture_is_ended_by_the_name_that_torch_2_7_has() -> None:
    """torch 2.7.1 has `_cuda_endAllocateCurrentStreamToPool`; from 2.8 on it is `_cuda_endAllocateToPool`."""
    with simulated(of(2, 7)), pytest.MonkeyPatch.context() as patch:
        ended = torch._C._cuda_endAllocateToPool
        patch.setattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", ended, raising=False)
        patch.delattr(torch._C, "_cuda_endAllocateToPool")
        machine, x = machine_for(CARD), torch.zeros(16, device="cuda")
        with pytest.raises(CaptureError):
            machine.capture(lambda: x.sum().item())
        assert reserved_after_release() < 256 * MIB
        torch.rand(1, device="cuda")


def test_an_allocator_in_a_capture_state_releases_nothing(world: World) -> None:
    handle = torch.cuda.graph_pool_handle()
    lose_capture(pool=handle)
    believes = world.card.truth.torch_version <= (2, 12)
    assert (reserved_after_release() >= 256 * MIB) == believes
    if believes:
        torch._C._cuda_endAllocateToPool(0, handle)
    else:
        with pytest.raises(RuntimeError, match="not currently recording"):
            torch._C._cuda_endAllocateToPool(0, handle)
    assert reserved_after_release() < 256 * MIB


@pytest.mark.parametrize(("version", "fits"), [((2, 12), False), ((2, 13), True)])
def test_cached_memory_is_no_room_in_a_capture_state(version: tuple[int, int], fits: bool) -> None:
    """torch has 50 GB free in blocks of 25 GB. They must return to the driver before a block of 60 GB fits."""
    with simulated(H100.but(torch_version=version)):
        lose_capture()
        blocks = [torch.empty(25 * GIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
        blocks.clear()
        expected = contextlib.nullcontext() if fits else pytest.raises(torch.OutOfMemoryError)
        with expected:
            torch.empty(60 * GIB, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pool_of_a_failed_capture_is_released(version: tuple[int, int]) -> None:
    """Up to 2.13, `_cuda_releasePool` releases it; from 2.14 on, the graph itself does."""
    with simulated(H100.but(torch_version=version)):
        handle = torch.cuda.graph_pool_handle()
        graph = lose_capture(GIB, pool=handle)
        if version <= (2, 12):
            torch._C._cuda_endAllocateToPool(0, handle)
        del graph
        gc.collect()
        torch.cuda.empty_cache()
        assert (torch.cuda.memory_reserved() >= GIB) == (version <= (2, 13))
        if version <= (2, 13):
            torch._C._cuda_releasePool(0, handle)
            torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < GIB


def test_a_pool_that_is_released_twice_ends_the_process() -> None:
    """From 2.14 on the graph's destructor releases it again, which fails a C++ assertion that nothing can catch."""

    def give_up_twice() -> None:
        with simulated(of(2, 14)):
            handle = torch.cuda.graph_pool_handle()
            graph = lose_capture(pool=handle)
            torch._C._cuda_releasePool(0, handle)
            del graph
            gc.collect()

    with pytest.raises(RuntimeError, match="terminated"):
        give_up_twice()


@pytest.mark.parametrize("version", VERSIONS)
def test_one_way_to_recover_works_on_every_release(version: tuple[int, int]) -> None:
    """A MemPool counts its users: any user except itself is a failed capture."""
    with simulated(H100.but(torch_version=version)):
        pool = torch.cuda.MemPool()
        graph = lose_capture(GIB, pool=pool.id)
        del graph
        gc.collect()
        tidy(pool)
        del pool
        gc.collect()
        torch.rand(4, device="cuda")
        assert reserved_after_release() < 256 * MIB


def test_a_pool_that_is_destroyed_in_a_capture_state_ends_the_process() -> None:
    """MemPool's destructor frees its memory, which asserts that there is no capture (PR #180395)."""

    def forget() -> None:
        with simulated(of(2, 12)):
            pool = torch.cuda.MemPool()
            lose_capture(pool=pool.id)
            torch._C._cuda_releasePool(0, pool.id)
            del pool
            gc.collect()

    with pytest.raises(RuntimeError, match="terminated"):
        forget()


def test_graphs_share_a_pool(world: World) -> None:
    """The memory exists as long as one of the graphs."""
    x = torch.zeros(16, device="cuda")
    handle, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record() -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=handle, stream=stream):
            torch.empty(GIB, dtype=torch.uint8, device="cuda")
            x.add_(1)
        assert graph.pool() == handle
        return graph

    graphs = [record(), record()]
    assert GIB <= torch.cuda.memory_reserved() < 2 * GIB
    for left in (1, 0):
        graphs.pop()
        gc.collect()
        torch.cuda.empty_cache()
        assert (torch.cuda.memory_reserved() >= GIB) == bool(left)


def test_a_capture_goes_to_the_given_stream(world: World) -> None:
    stream, x = torch.cuda.Stream(), torch.zeros(16, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        assert torch.cuda.current_stream() is stream
        x.add_(1)


def test_calls_that_wait_are_errors_in_the_debug_mode() -> None:
    with simulated(H100):
        x, pageable, pinned = torch.ones(4, device="cuda"), torch.ones(4), torch.ones(4).pin_memory()
        event = torch.cuda.Event()
        event.record()
        assert torch.cuda.get_sync_debug_mode() == 0
        torch.cuda.set_sync_debug_mode("error")
        assert torch.cuda.get_sync_debug_mode() == 2
        for call in (
            x.sum().item,
            x.cpu,
            x.nonzero,
            lambda: x.copy_(pageable),
            lambda: x.copy_(pinned),
            lambda: torch.tensor(3, device="cuda"),
            torch.cuda.current_stream().synchronize,
        ):
            with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
                call()
        x.add_(1)
        x.copy_(pinned, non_blocking=True)
        event.synchronize()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
            x.sum().item()
        torch.cuda.set_sync_debug_mode(0)
        x.sum().item()
        with pytest.raises(RuntimeError, match="invalid value of debug_mode"):
            torch.cuda.set_sync_debug_mode("loud")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_machine_recovers_after_a_failed_capture(version: tuple[int, int]) -> None:
    def waits() -> None:
        torch.empty(GIB, dtype=torch.uint8, device="cuda")
        x.sum().item()

    with simulated(H100.but(torch_version=version)):
        machine = machine_for(CARD)
        x = torch.zeros(16, device="cuda")
        before = torch.cuda.current_stream()
        with pytest.raises(RequestError, match="cannot be captured"):
            machine.capture(waits)
        gc.collect()
        assert torch.cuda.current_stream() is before
        torch.rand(4, device="cuda")
        assert reserved_after_release() < 256 * MIB
        machine.capture(lambda: x.add_(1))()


def test_cudas_own_allocator_captures_without_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `backend:cudaMallocAsync`, torch has no MemPool (c10/cuda/CUDACachingAllocator.h, `createOrIncrefPool`)."""

    def no_pool() -> None:
        raise RuntimeError("cudaMallocAsync does not yet support createOrIncrefPool.")

    with simulated(H100):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
        monkeypatch.setattr(torch.cuda, "MemPool", no_pool)
        machine, x = machine_for(CARD), torch.zeros(16, device="cuda")
        machine.capture(lambda: x.add_(1))()
        with pytest.raises(CaptureError, match="cannot be captured"):
            machine.capture(lambda: x.sum().item())
        torch.rand(4, device="cuda")
        machine.capture(lambda: x.add_(1))()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "card"),
    [
        pytest.param(Scenario("mistral-7b-v0.3", 1, quant="int8", prompt_lens=[64], batch_sizes=[1]), A100, id="int8"),
        pytest.param(Scenario("mistral-7b-v0.1", 1, prompt_lens=[64], batch_sizes=[1]), A100, id="windows"),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_ends_on_every_release(scenario: Scenario, card: Truth, version: tuple[int, int], tmp_path: Path) -> None:
    """LLM.int8() waits in every linear, and a windowed layer of a growing cache copies its length to the card."""
    run, world = said(scenario, [card.but(torch_version=version)], tmp_path)
    assert run.document.finished
    assert len(run.measured) == len(run.results)
    assert world.card.memory.captures == 0


@pytest.mark.slow
def test_a_step_that_reads_its_card_is_known_to_wait(tmp_path: Path) -> None:
    """A new static cache copies its length to the card. A prefill into a reset cache reads it, unless it is
    captured: transformers' `is_tracing` then skips the read. So a successful capture of it proves nothing."""
    engines = "eager,static,graph,compile"
    run, _ = said(Scenario("mistral-7b-v0.3", 1, engine=engines, prompt_lens=[64], batch_sizes=[1]), [H100], tmp_path)
    dispatch = read_gathered(run.folder, run.document).dispatch
    waits = {
        ("eager", "prefill"): False,
        ("eager", "decode"): False,
        ("static", "prefill"): True,
        ("static", "decode"): False,
        ("graph", "prefill"): True,
        ("compile", "prefill"): True,
    }
    assert {(engine, phase): dispatch[engine, phase, 1].waits for engine, phase in waits} == waits
