"""The model's own weights as a stream: their very pages, beside others cut into their sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from profiler.machine.clock import time_calls
from profiler.machine.machine import Machine
from profiler.machine.memory import inner_tensors
from profiler.roofs.sampling import random_bytes, record, roof_of
from profiler.roofs.values import Roof, Witness

# A stream as large as the weights may take this share of the memory that is free; larger models are read in part.
_MEMORY_SHARE = 0.1
_LEAST_PASSES = 5


def measure_weights(tensors: Iterable[torch.Tensor | None], machine: Machine, budget_s: float) -> Witness | None:
    """Bytes a second of a sum over each of a model's weights on the device, beside a stream cut into the same pieces.

    Many short reads reach less than one long one, wherever they lie (24 of 32 GB/s over the 272 weights of
    SmolLM2-135M): only what the stream's pieces do not lose as well is the weights' own. Where the device captures, a
    pass over all of them is one launch: a fast card ends a read before its host has submitted the next, and both rates
    would be the host's. None where no weight lies on the device. Raises RequestError where a pass cannot be captured.
    """
    weights = _fitting(_storages(tensors, machine.device), machine.available_bytes() * _MEMORY_SHARE)
    if not weights:
        return None
    elements = [part.numel() for part in weights]
    nbytes = sum(part.nbytes for part in weights)
    stream = random_bytes(nbytes, machine.device).view(torch.int64).split(elements)
    seconds = _in_turn(weights, stream, machine, budget_s)
    own, pieces = (_roof(nbytes, each_s, len(weights)) for each_s in seconds)
    return Witness(nbytes, own, pieces)


def _fitting(parts: Sequence[torch.Tensor], room_bytes: float) -> list[torch.Tensor]:
    """Every part, or every so-manieth where all of them are more than the room."""
    total = sum(part.nbytes for part in parts)
    return list(parts[:: max(1, math.ceil(total / max(room_bytes, 1.0)))])


def _in_turn(
    weights: Sequence[torch.Tensor], stream: Sequence[torch.Tensor], machine: Machine, budget_s: float
) -> tuple[list[float], list[float]]:
    """Seconds of passes over both, neighbours in time, so that a machine that changes changes for both."""

    def over(parts: Sequence[torch.Tensor]) -> None:
        for part in parts:
            part.sum()

    passes: list[Callable[[], object]] = [partial(over, weights), partial(over, stream)]
    for each in passes:
        each()
    if machine.captures:
        passes = [record(each, machine) for each in passes]
    read_own, read_stream = passes
    own: list[float] = []
    pieces: list[float] = []
    deadline_s = machine.now_s() + budget_s
    while len(own) < _LEAST_PASSES or machine.now_s() < deadline_s:
        own += time_calls(read_own, machine.clock, 1)
        pieces += time_calls(read_stream, machine.clock, 1)
    return own, pieces


def _roof(nbytes: int, seconds: Sequence[float], parts: int) -> Roof:
    return roof_of(nbytes, seconds, f"sum of each of {parts} parts, {nbytes >> 20} MiB")


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
