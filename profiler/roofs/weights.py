"""The model's own weights as a stream: their very pages, in their sizes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import torch

from profiler.machine.clock import time_calls
from profiler.machine.machine import Machine
from profiler.machine.memory import inner_tensors
from profiler.roofs.sampling import roof_of, sample
from profiler.roofs.values import Witness

# The least that torch's reductions share among all threads (ATen's GRAIN_SIZE): reading it again takes hardly more
# than the call itself.
_CALL_ELEMENTS = 1 << 15
_CALLS = 100
# Where calls take more of the time than this, what is left says little of the memory.
_MOST_IN_CALLS = 0.25


def measure_weights(tensors: Iterable[torch.Tensor | None], machine: Machine, budget_s: float) -> Witness | None:
    """Bytes a second of a sum over each of a model's weights on the device, less what so many calls take.

    None where the weights are so small that the calls would decide, or where none lies on the device.
    """
    parts = _storages(tensors, machine.device)
    if not parts:
        return None

    def one_pass() -> None:
        for part in parts:
            part.sum()

    tiny = torch.zeros(_CALL_ELEMENTS, dtype=torch.int64, device=machine.device)
    # A mean: a pass has so many calls that it meets its share of those that a busy machine holds up.
    calls_s = len(parts) * statistics.fmean(time_calls(tiny.sum, machine.clock, _CALLS))
    seconds = sample(one_pass, machine, budget_s)
    if calls_s > _MOST_IN_CALLS * min(seconds):
        return None
    nbytes = sum(part.nbytes for part in parts)
    method = f"sum of each of {len(parts)} weights, {nbytes >> 20} MiB"
    return Witness(nbytes, roof_of(nbytes, [each_s - calls_s for each_s in seconds], method))


def _storages(tensors: Iterable[torch.Tensor | None], device: torch.device) -> list[torch.Tensor]:
    """The distinct storages behind `tensors` that lie on the device, each as one flat tensor of int64.

    torch adds those up as fast as memory gives them, as a stream is read; single bytes and bfloat16 (on a CPU) slower:
    17 GB/s where the same bytes give 24.
    """
    found: dict[int, torch.Tensor] = {}
    for inner in (inner for tensor in tensors for inner in inner_tensors(tensor)):
        if inner.device != device:
            continue
        storage = inner.untyped_storage()
        if elements := storage.nbytes() // torch.int64.itemsize:
            flat = torch.empty(0, dtype=torch.int64, device=device)
            found[storage.data_ptr()] = flat.set_(storage, 0, (elements,))
    return list(found.values())
