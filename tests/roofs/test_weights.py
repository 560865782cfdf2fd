"""The bandwidth of the model's weights, for any cost of a call; each storage counts once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from machines import CPU
from memories import SimulatedMachine, SimulatedMemory
from torch import nn

from profiler.device.memory import storage_bytes
from profiler.facts.roofs import WeightReadRoof
from profiler.roofs.bandwidth import _storages, measure_weights

MIB = 1 << 20


def read(
    tensors: list[torch.Tensor | None], call_s: float = 20e-6, available_bytes: int = 64 << 30
) -> WeightReadRoof | None:
    """Measure with a memory of 60 GB/s and a cache of 1 MiB that takes no time."""
    memory = SimulatedMemory(lambda nbytes: 60e9 if nbytes > MIB else 1e15, call_s)
    with memory:
        return measure_weights(tensors, SimulatedMachine(memory, available_bytes), 0.01)


@pytest.mark.parametrize("call_s", [0.0, 20e-6])
def test_a_stream_in_the_same_pieces_pays_for_the_same_calls(call_s: float) -> None:
    found = read([torch.empty(1024, 2048) for _ in range(20)], call_s)
    assert found is not None
    assert found.nbytes == 20 * 8 * MIB
    assert found.stream is not None
    assert found.roof.per_s == found.stream.per_s == pytest.approx(8 * MIB / (8 * MIB / 60e9 + call_s), rel=1e-3)


def test_pages_that_are_slower_than_a_streams_show() -> None:
    """Every second weight takes three times as long to read, so all together are read half as fast."""
    far = [torch.empty(1024, 2048) for _ in range(10)]
    lie_far = {part.data_ptr() for part in far}

    class Far(SimulatedMemory):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_far = args and isinstance(args[0], torch.Tensor) and args[0].data_ptr() in lie_far
            before_s = self.now_s
            found = super().__torch_dispatch__(func, types, args, kwargs)
            self.now_s += 2 * (self.now_s - before_s) * bool(is_far)
            return found

    with Far(lambda _: 60e9) as memory:
        found = measure_weights([*far, *(torch.empty(1024, 2048) for _ in range(10))], SimulatedMachine(memory), 0.01)
    assert found is not None
    assert found.stream is not None
    assert found.roof.per_s / found.stream.per_s == pytest.approx(0.5, rel=1e-3)


def test_a_model_that_leaves_no_room_for_such_a_stream_is_read_in_part() -> None:
    """Weights take 160 MiB, and 400 MiB are free: a tenth of those is 40 MiB, so every fourth weight is read."""
    found = read([torch.empty(1024, 2048) for _ in range(20)], available_bytes=400 * MIB)
    assert found is not None
    assert found.nbytes == 5 * 8 * MIB


def test_a_model_that_lies_elsewhere_is_no_witness() -> None:
    assert read([torch.empty(1024, 2048, device="meta")]) is None
    assert read([]) is None


def test_tied_and_packed_weights_count_as_they_are_stored() -> None:
    table = nn.Parameter(torch.empty(4096, 512))
    packed = torch.empty(2 * MIB, dtype=torch.uint8)
    half, eight = torch.empty(1024, 2048, dtype=torch.bfloat16), torch.empty(2048, 2048).to(torch.float8_e4m3fn)
    tensors: list[torch.Tensor | None] = [table, table.t(), packed, half, eight, None]
    found = read(tensors)
    assert found is not None
    assert found.nbytes == storage_bytes(tensors) == (8 + 2 + 4 + 4) * MIB


def test_weights_are_read_as_whole_words_whatever_they_hold() -> None:
    """A CPU adds bfloat16 values more slowly than its memory delivers them, so all bytes are read as int64."""
    half, full = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(64, 32)
    found = _storages([half, full, half.t()], CPU)
    assert [(part.dtype, part.nbytes) for part in found] == [(torch.int64, 64 * 32 * 2), (torch.int64, 64 * 32 * 4)]
