"""The functions of torch.cuda while cards are simulated; a name that is not simulated is an error."""

from __future__ import annotations

import itertools
import types
import uuid
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from .card import Card, Event, Graph, PoolId, Stream


class Driver:
    """Answers for the cards; `names` are the simulated attributes of torch.cuda. `known` has the current card."""

    def __init__(self, cards: Sequence[Card], known: Any) -> None:
        self._cards = cards
        self._known = known
        self.pools = itertools.count(1)
        self.capture_stream: Stream | None = None
        """One per process, on the card that was current at the first capture."""

    def card(self, device: Any = None) -> Card:
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        return self._cards[self._known.current if index is None else index]

    def names(self) -> dict[str, Any]:
        return {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: len(self._cards),
            "current_device": lambda: self._known.current,
            "set_device": self._set_device,
            "get_device_properties": self._properties,
            "get_device_capability": lambda device=None: self.card(device).truth.capability,
            "get_device_name": lambda device=None: self.card(device).truth.name,
            "is_bf16_supported": lambda including_emulation=True: (
                including_emulation or self.card().truth.capability >= (8, 0)
            ),
            "mem_get_info": self._mem_get_info,
            "memory_allocated": lambda device=None: self.card(device).memory.allocated,
            "memory_reserved": lambda device=None: self.card(device).memory.reserved,
            "max_memory_allocated": lambda device=None: self.card(device).memory.peak_allocated,
            "get_allocator_backend": lambda: "native",
            "memory_snapshot": self._memory_snapshot,
            "reset_peak_memory_stats": self._reset_peak,
            "empty_cache": self.empty_cache,
            "synchronize": self.synchronize,
            "current_stream": lambda device=None: self.card(device).stream,
            "default_stream": lambda device=None: self.card(device).default_stream,
            "set_stream": self._set_stream,
            "is_current_stream_capturing": lambda: self.card().stream.core.capture is not None,
            "stream": OnStream,
            "Event": Event,
            "CUDAGraph": Graph,
            "graph_pool_handle": lambda: (0, next(self.pools)),
            "set_sync_debug_mode": self._set_sync_debug_mode,
            "get_sync_debug_mode": lambda: self._cards[0].host.sync_debug_mode,
            "manual_seed_all": lambda seed: None,
            "manual_seed": lambda seed: None,
            "get_rng_state": lambda device: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda state, device: None,
            **_classes(self),
        }

    def names_of_c(self) -> dict[str, Any]:
        return {
            "_cuda_endAllocateToPool": lambda device, pool: self.card(device).memory.end_capture(pool),
            "_cuda_releasePool": lambda device, pool: self.card(device).memory.release_pool(pool),
            "_cuda_clearCublasWorkspaces": self._clear_workspaces,
        }

    def _clear_workspaces(self) -> None:
        for card in self._cards:
            for stream in card.streams:
                stream.core.free_workspace(card.memory)

    def _set_sync_debug_mode(self, mode: int | str) -> None:
        modes = ("default", "warn", "error")
        self._cards[0].host.sync_debug_mode = modes.index(mode) if isinstance(mode, str) else mode

    def _set_device(self, device: Any) -> None:
        self._known.current = self.card(device).index

    def _properties(self, device: Any = None) -> Any:
        card = self.card(device)
        truth = card.truth
        major, minor = truth.capability
        sizes = {"total_memory": truth.memory_bytes, "L2_cache_size": truth.l2_bytes, "warp_size": 32}
        named = {"name": truth.name, "uuid": uuid_of(card), "multi_processor_count": truth.processors}
        return types.SimpleNamespace(**named, major=major, minor=minor, **sizes)

    def _mem_get_info(self, device: Any = None) -> tuple[int, int]:
        memory = self.card(device).memory
        return memory.driver_free, memory.total_bytes

    def _memory_snapshot(self) -> list[dict[str, Any]]:
        """Return the unused memory of each card by stream, and all memory of each private pool.

        The keys are those of torch's `segmentInfoToDict` (torch/csrc/cuda/Module.cpp, 2.13).
        """
        segments = []
        for card in self._cards:
            unused = {
                ((0, 0), 0 if stream is card.default_stream else id(stream)): stream.core.unused_bytes(card.memory)
                for stream in card.streams
            }
            private = {(pool, 0): nbytes for pool, nbytes in card.memory.reserved_by_pool().items()}
            segments += [
                {"device": card.index, "segment_pool_id": pool, "stream": stream, "total_size": n, "allocated_size": 0}
                for (pool, stream), n in {**unused, **private}.items()
            ]
        return segments

    def _reset_peak(self, device: Any = None) -> None:
        memory = self.card(device).memory
        memory.peak_allocated = memory.allocated

    def empty_cache(self) -> None:
        for card in self._cards:
            card.memory.release()

    def synchronize(self, device: Any = None) -> None:
        card = self.card(device)
        card.stream.refuse_capture()
        for stream in card.streams:
            card.host.wait_until(stream.core.ready_s)

    def _set_stream(self, stream: Stream) -> None:
        self._known.current = stream.card.index
        stream.card.use(stream)


class OnStream:
    """torch.cuda.StreamContext: makes a stream and its card current within the block."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = torch.cuda.current_device(), self._stream.card.stream
            torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            device, stream = self._before
            stream.card.use(stream)
            torch.cuda.set_device(device)


def _classes(driver: Driver) -> dict[str, Any]:
    """Return the simulated classes of torch.cuda: they use the current card."""

    class CurrentStream(Stream):
        def __init__(self, device: Any = None) -> None:
            super().__init__(driver.card(device))

    class Pool:
        """torch.cuda.MemPool: one user of its memory during its lifetime (aten/src/ATen/cuda/MemPool.cpp)."""

        def __init__(self) -> None:
            self._card = driver.card()
            self.id = (0, next(driver.pools))
            self._card.memory.share(self.id)

        def use_count(self) -> int:
            return self._card.memory.users(self.id)

        def __del__(self) -> None:
            with self._card.host.terminating():
                self._card.memory.release_pool(self.id)
                if self.use_count() == 0 and self._card.memory.captures:
                    raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
                self._card.memory.release(self.id)

    class GraphContext:
        """torch.cuda.graph, with its order of exit: an error in `capture_end` leaves the capture stream current."""

        def __init__(self, graph: Any, pool: PoolId | None = None, stream: Stream | None = None, **_: Any) -> None:
            self._graph, self._pool = graph, pool
            if driver.capture_stream is None:
                driver.capture_stream = Stream(driver.card())
            self._stream = OnStream(driver.capture_stream if stream is None else stream)

        def __enter__(self) -> None:
            driver.synchronize()
            driver.empty_cache()
            self._stream.__enter__()
            self._graph.capture_begin(self._pool)

        def __exit__(self, *error: Any) -> None:
            self._graph.capture_end()
            self._stream.__exit__(*error)

    return {"Stream": CurrentStream, "MemPool": Pool, "graph": GraphContext}


def uuid_of(card: Card) -> uuid.UUID:
    return uuid.UUID(int=0xC0FFEE00 + card.index)


def strict(names: dict[str, Any]) -> dict[str, Any]:
    """Return `names`, plus a raising replacement for every other function of torch.cuda."""
    kept = {*names, "OutOfMemoryError", "is_initialized", "check_error"}
    functions = {name for name in torch.cuda.__all__ if isinstance(getattr(torch.cuda, name), types.FunctionType)}
    return names | {
        name: mock.Mock(side_effect=NotImplementedError(f"the simulated card does not answer torch.cuda.{name}"))
        for name in functions - kept
        if not name.startswith("_")
    }
