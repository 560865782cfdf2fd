"""A failed capture has no effect on the process: random numbers, memory, the current stream.

torch up to 2.11 leaves the generator capturing (PyTorch PR #176752 came later). Up to 2.12 the allocator then frees
nothing (PR #180395). Later versions leak the memory of the capture (issue #190308).
"""

from collections.abc import Iterator

import torch

from profiler.errors import RequestError

from .bench import Attempt, Bench, Check, free, random_numbers

_ALLOCATED_BYTES = 256 << 20
_LEFT_BYTES = 96 << 20
"""Bytes that cuBLAS and the capture's stream may take as workspaces; less than the capture allocated."""

AFTER = "after a failed capture: "


def attempts(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("a capture that fails", _failing_capture)
    yield Attempt(f"{AFTER}the process works", _after)
    yield Attempt("a graph replays after the end of another one", _own_workspace)


def _failing_capture(bench: Bench) -> Iterator[Check]:
    """The step allocates, multiplies and then waits for a value, which no capture can record."""
    x = torch.ones(64, 64, device=bench.device)

    def waits() -> None:
        kept = torch.empty(_ALLOCATED_BYTES, dtype=torch.uint8, device=bench.device).fill_(1)
        (x @ x).sum().item()
        del kept

    with bench.machine.on_side_stream():
        waits()
    free()
    before = torch.cuda.memory_reserved(bench.device)
    try:
        bench.machine.capture(waits)
        says = ""
    except RequestError as error:
        says = str(error)
    yield Check("a step that waits cannot be captured", bool(says), says, "RequestError")
    current, default = torch.cuda.current_stream(bench.device), torch.cuda.default_stream(bench.device)
    yield Check(f"{AFTER}the current stream is the default one", current == default, str(current))
    free()
    left = torch.cuda.memory_reserved(bench.device) - before
    limit = f"< {_LEFT_BYTES >> 20} MiB of {_ALLOCATED_BYTES >> 20}"
    yield Check(f"{AFTER}what it allocated is given back", left < _LEFT_BYTES, left, limit)


def _after(bench: Bench) -> Iterator[Check]:
    yield random_numbers(f"{AFTER}random numbers are drawn", bench.device, str(torch.__version__))
    data = torch.empty(4 * _ALLOCATED_BYTES, dtype=torch.uint8, device=bench.device)
    held = torch.cuda.memory_reserved(bench.device)
    del data
    free()
    given = held - torch.cuda.memory_reserved(bench.device)
    limit = f">= {4 * _ALLOCATED_BYTES}"
    yield Check(f"{AFTER}empty_cache gives memory back", given >= 4 * _ALLOCATED_BYTES, given, limit)
    x = torch.zeros(1, device=bench.device)
    with bench.machine.on_side_stream():
        x.add_(1)
    x.zero_()
    bench.machine.capture(lambda: x.add_(1))()
    yield Check(f"{AFTER}another one replays", x.item() == 1.0, x.item(), "1 added to 0")


def _own_workspace(bench: Bench) -> Iterator[Check]:
    """Two graphs of matmuls that split their inner dimension use cuBLAS's workspace; the first outlives the second.

    If they shared a workspace, the first would write to memory that the second's end gave to `other`.
    """
    shape = {"dtype": bench.dtype, "device": bench.device}
    left, right = torch.ones(16, 1 << 16, **shape) / 256, torch.ones(1 << 16, 16, **shape) / 256
    result = torch.empty(16, 16, **shape)

    def multiply() -> None:
        result.copy_(left @ right)

    with bench.machine.on_side_stream():
        multiply()
    second = bench.machine.capture(multiply)
    first = bench.machine.capture(multiply)
    second()
    del second
    free()
    other = torch.full((_LEFT_BYTES,), 1, dtype=torch.uint8, device=bench.device)
    result.zero_()
    first()
    wrong = {"results": int((result != 1).sum()), "bytes of another tensor": int((other != 1).sum())}
    yield Check("a graph replays after the end of another one", not any(wrong.values()), wrong, "0 wrong")
