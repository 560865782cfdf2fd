"""Run captured calls by themselves: cold caches on CPU and CUDA, page faults taken off.

The products run in the model's order with the model's own weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from profiler.device.machine import Machine
from profiler.device.memory import page_faults
from profiler.quant.conversions import without_waiting
from profiler.stats import timing_of

Key = TypeVar("Key", bound=Hashable)


def replay_linears(
    linears: Mapping[Key, Sequence[nn.Module]],
    rows: Mapping[Key, int],
    machine: Machine,
    *,
    dtype: torch.dtype,
    budget_s: float,
    sliced: Collection[Key] = (),
    cold_bytes: int = 0,
    between_bytes: int = 0,
    page_fault_s: float = 0.0,
) -> dict[Key, tuple[float, ...]]:
    """Seconds of single calls of each operator on its own, with `between_bytes` of other data read in every pass.

    `linears` maps an operator to its modules, one a layer; `rows` gives its tokens. Those of `sliced` operators are
    the last of so many prompts, handed over as transformers does: as a slice of the hidden states. That is not the same
    call: of a frozen weight torch 2.13 makes a copy for each prompt, 82 ms instead of 3 for the LM head of SmolLM2-135M
    in bfloat16 on two cores.
    """

    def input_of(name: Key, width: int) -> torch.Tensor:
        if name in sliced:
            return torch.randn(rows[name], 2, width, device=machine.device, dtype=dtype)[:, -1:, :]
        return torch.randn(1, rows[name], width, device=machine.device, dtype=dtype)

    inputs = {name: input_of(name, _in_features(modules[0])) for name, modules in linears.items()}
    called = without_waiting if machine.captures else partial
    calls = {name: [called(module, inputs[name]) for module in modules] for name, modules in linears.items()}
    between = _reads(between_bytes, max(map(len, linears.values()), default=1))
    return replay_calls(
        calls, machine, budget_s=budget_s, cold_bytes=cold_bytes, between=between, page_fault_s=page_fault_s
    )


def _reads(nbytes: int, layers: int) -> list[Callable[[], object]]:
    """A read of its own share of `nbytes` for each layer."""
    if not nbytes:
        return []
    return [part.sum for part in torch.ones(nbytes // torch.int64.itemsize, dtype=torch.int64).chunk(layers)]


def replay_calls(
    calls: Mapping[Key, Sequence[Callable[[], object]]],
    machine: Machine,
    *,
    budget_s: float,
    cold_bytes: int = 0,
    between: Sequence[Callable[[], object]] = (),
    page_fault_s: float = 0.0,
) -> dict[Key, tuple[float, ...]]:
    """Seconds of single calls under each key on their own, where a key has one call a layer.

    Calls are made layer by layer, as in a step, so that each weight comes from where a step finds it: memory, or a
    cache that holds them all, until each key is known to within 1 % or the budget is spent. A sample is the mean of a
    pass: layers differ, some lie in a cache or on slower pages, and what a step pays is their sum (of SmolLM2-135M in
    bfloat16 on a Xeon the median call, times its layers, is a tenth less); calls `between` them are made as well, and
    not timed. `page_fault_s` is taken off for each page fault of a call: alone it hands its pages back and takes them
    again, which a step, that holds other memory as well, may not (0.4 of the 0.7 s of the small kernels of a prefill of
    8 x 512 in bfloat16), and the step's own are counted in the step. On CUDA the calls of a key are captured as a graph
    and replayed: events around single calls of small kernels would time the host; there
    `cold_bytes` are read before each replay (see `_replayed_graph`). A key whose calls wait for the device is left out
    there: no graph holds them, and events around them would time the host, which is a part of dispatch already. Raises
    CaptureError for other calls that cannot be captured.
    """
    clock = machine.clock
    if machine.captures:
        each_s = budget_s / max(1, len(calls))
        graphs = {name: _replayed_graph(layers, machine, each_s, cold_bytes) for name, layers in calls.items()}
        return {name: samples for name, samples in graphs.items() if samples}
    several: list[tuple[Key | None, Sequence[Callable[[], object]]]] = [*calls.items(), (None, between)]
    order = sorted(
        ((index / len(layers), name, call) for name, layers in several for index, call in enumerate(layers)),
        key=lambda item: item[0],
    )
    times: dict[Key, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for layers in calls.values():
            layers[0]()
        clock.synchronize()
        deadline_s = machine.now_s() + budget_s
        while not all(times.values()) or (machine.now_s() < deadline_s and not all(map(_known, times.values()))):
            marks: list[Any] = []
            faults: list[int] = []
            names: list[Key | None] = []
            for _, name, call in order:
                faults.append(page_faults())
                marks.append(clock.mark())
                call()
                marks.append(clock.mark())
                names.append(name)
                # A pass over large inputs may take long; it ends early once each operator has been seen.
                if machine.now_s() > deadline_s and set(names) >= set(calls):
                    break
            clock.synchronize()
            counts = (after - before for before, after in pairwise([*faults, page_faults()]))
            of_pass: dict[Key, list[float]] = {}
            for name, seconds, count in zip(names, clock.seconds(marks)[::2], counts, strict=True):
                if name is not None:
                    of_pass.setdefault(name, []).append(max(0.0, seconds - count * page_fault_s))
            for name, found in of_pass.items():
                times[name].append(round(statistics.fmean(found), 12))
    return {name: tuple(samples) for name, samples in times.items()}


_LEAST_REPLAYS = 5
# Of a graph that takes longer than its budget.
_LEAST_LATE_REPLAYS = 2
# As many calls in a graph that nothing runs before: a share of its launch is timed with each of them.
_LEAST_CALLS = 32
ENOUGH_SAMPLES = 16
_MOST_SAMPLES = 64
_KNOWN_HALF_WIDTH = 0.01


def _known(samples: Sequence[float]) -> bool:
    """Whether further samples would hardly move a median, or not enough to be worth their room on the disk."""
    if len(samples) < ENOUGH_SAMPLES:
        return False
    if len(samples) >= _MOST_SAMPLES:
        return True
    timing = timing_of(samples)
    return timing.half_width_s <= _KNOWN_HALF_WIDTH * timing.median_s


def _replayed_graph(
    calls: Sequence[Callable[[], object]], machine: Machine, budget_s: float, cold_bytes: int
) -> tuple[float, ...]:
    """Seconds of one of `calls` on the device alone: all of them captured as one graph and replayed.

    Before each replay a buffer of `cold_bytes` is read, so that nothing lies in a cache that a step would not find
    there; the replay is submitted meanwhile, so that its launch is not timed either. Reading also evicts what the last
    replay wrote: a flush that writes would leave dirty lines, whose write-back falls into the replay. Of a model that a
    cache holds nothing is read: few calls are then repeated, until their graph's launch hardly counts. Empty where the
    calls wait for the device.
    """
    repeats = 1 if cold_bytes else -(-_LEAST_CALLS // len(calls))

    def every() -> None:
        for _ in range(repeats):
            for call in calls:
                call()

    flush = torch.zeros(cold_bytes // 4, dtype=torch.float32, device=machine.device) if cold_bytes else None
    clock = machine.clock
    with torch.inference_mode():
        with machine.on_side_stream():
            every()
        if machine.waits(every):
            return ()
        replay = machine.capture(every)
        replay()
        samples: list[float] = []
        deadline_s = machine.now_s() + budget_s

        def enough() -> bool:
            late = machine.now_s() >= deadline_s
            return len(samples) >= (_LEAST_LATE_REPLAYS if late else _LEAST_REPLAYS) and (late or _known(samples))

        while not enough():
            if flush is not None:
                flush.sum()
            marks = [clock.mark()]
            replay()
            marks.append(clock.mark())
            clock.synchronize()
            samples += clock.seconds(marks)
    return tuple(round(seconds / (repeats * len(calls)), 12) for seconds in samples)


def _in_features(module: Any) -> int:
    return int(module.in_features if hasattr(module, "in_features") else module.weight.shape[0])
