"""Run captured calls in isolation: with cold caches, without page faults, and each layer with its own weights."""

import statistics
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from profiler.device.clock import time_apart
from profiler.device.machine import Machine
from profiler.device.memory import page_faults
from profiler.quant.storage import without_waiting
from profiler.roofs.sampler import is_known

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
    """Return the seconds of single calls of each operator, with `between_bytes` of other data read in every pass.

    `linears` maps an operator to its modules, one per layer, and `rows` to its tokens. The rows of `sliced` operators
    are the last ones of their prompts, passed as transformers does: as a slice of the hidden states. That is another
    call: for a frozen weight torch 2.13 makes a copy per prompt (82 ms, not 3, for SmolLM2-135M's LM head in bfloat16).
    """

    def input_of(name: Key, module: Any) -> torch.Tensor:
        width = int(module.in_features if hasattr(module, "in_features") else module.weight.shape[0])
        if name in sliced:
            return torch.randn(rows[name], 2, width, device=machine.device, dtype=dtype)[:, -1:, :]
        return torch.randn(1, rows[name], width, device=machine.device, dtype=dtype)

    inputs = {name: input_of(name, modules[0]) for name, modules in linears.items()}
    bind = without_waiting if machine.captures else partial
    calls = {name: [bind(module, inputs[name]) for module in modules] for name, modules in linears.items()}
    other_data = torch.ones(between_bytes // torch.int64.itemsize, dtype=torch.int64)
    layers = max(map(len, linears.values()), default=1)
    between = [part.sum for part in other_data.chunk(layers)] if between_bytes else []
    return replay_calls(
        calls, machine, budget_s=budget_s, cold_bytes=cold_bytes, between=between, page_fault_s=page_fault_s
    )


def replay_calls(
    calls: Mapping[Key, Sequence[Callable[[], object]]],
    machine: Machine,
    *,
    budget_s: float,
    cold_bytes: int = 0,
    between: Sequence[Callable[[], object]] = (),
    page_fault_s: float = 0.0,
) -> dict[Key, tuple[float, ...]]:
    """Return the seconds of single calls under each key, in isolation; a key has one call per layer.

    Calls run layer by layer, as in a step. Each weight thus comes from where a step finds it: memory, or a cache that
    holds all of them. They are repeated until each key is known to within 1 % or `budget_s` is spent, with the calls of
    `between` among them.

    A sample is the mean of a pass. Layers differ, since some are in a cache or on slower pages, and a step pays their
    sum. For SmolLM2-135M in bfloat16 on a Xeon, the median call times its layers is a tenth less.

    `page_fault_s` is subtracted for each page fault of a call. In isolation a call returns its pages and takes them
    again; a step, which holds other memory as well, may not. That is 0.4 of the 0.7 s of the small kernels of a prefill
    of 8 x 512 in bfloat16. The step's own faults are counted in the step.

    On CUDA the calls of a key are captured as a graph and replayed, since events around single calls of small kernels
    would time the host. `cold_bytes` are read before each replay (see `_replay_graph`). A key whose calls wait for the
    device is left out: no graph can contain them, and their time on the host is part of overhead. Raises CaptureError
    for other calls that cannot be captured.
    """
    clock = machine.clock
    if machine.captures:
        each_s = budget_s / max(1, len(calls))
        graphs = {name: _replay_graph(layers, machine, each_s, cold_bytes) for name, layers in calls.items()}
        return {name: samples for name, samples in graphs.items() if samples}
    groups: list[tuple[Key | None, Sequence[Callable[[], object]]]] = [*calls.items(), (None, between)]
    order = sorted(
        ((index / len(layers), name, call) for name, layers in groups for index, call in enumerate(layers)),
        key=lambda item: item[0],
    )
    times: dict[Key, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for layers in calls.values():
            layers[0]()
        clock.synchronize()
        deadline_s = machine.now_s() + budget_s
        while not all(times.values()) or (machine.now_s() < deadline_s and not all(map(_is_settled, times.values()))):
            marks, faults_before, names = list[Any](), list[int](), list[Key | None]()
            for _, name, call in order:
                faults_before.append(page_faults())
                marks.append(clock.mark())
                call()
                marks.append(clock.mark())
                names.append(name)
                # A pass over large inputs may take long; it ends early once each operator has been seen.
                if machine.now_s() > deadline_s and set(names) >= set(calls):
                    break
            clock.synchronize()
            call_faults = (after - before for before, after in pairwise([*faults_before, page_faults()]))
            pass_s: dict[Key, list[float]] = {}
            for name, seconds, count in zip(names, clock.seconds(marks)[::2], call_faults, strict=True):
                if name is not None:
                    pass_s.setdefault(name, []).append(max(0.0, seconds - count * page_fault_s))
            for name, layers_s in pass_s.items():
                times[name].append(round(statistics.fmean(layers_s), 12))
    return {name: tuple(samples) for name, samples in times.items()}


# Replays of a graph that takes longer than its budget.
_LEAST_REPLAYS = 2
# Calls in a graph before which nothing runs: a share of its launch is timed with each of them.
_LEAST_CALLS = 32
ENOUGH_SAMPLES = 16
_MOST_SAMPLES = 64
_KNOWN_HALF_WIDTH = 0.01


def _is_settled(samples: Sequence[float]) -> bool:
    """Whether further samples would hardly move the median, or would not justify their space on disk."""
    is_enough = len(samples) >= ENOUGH_SAMPLES and is_known(samples, _KNOWN_HALF_WIDTH)
    return is_enough or len(samples) >= _MOST_SAMPLES


def _replay_graph(
    calls: Sequence[Callable[[], object]], machine: Machine, budget_s: float, cold_bytes: int
) -> tuple[float, ...]:
    """Seconds of one of `calls` on the device: all of them captured as one graph and replayed.

    Before each replay a buffer of `cold_bytes` is read, so that caches contain nothing that a step would not find
    there. The replay is submitted meanwhile, so its launch is not timed. Reading also evicts what the last replay
    wrote: a flush that writes would leave dirty lines, whose write-back falls into the replay.

    Nothing is read for a model that fits into a cache: a few calls are then repeated until their graph's launch hardly
    counts. Empty if the calls wait for the device.
    """
    repeats = 1 if cold_bytes else -(-_LEAST_CALLS // len(calls))

    def run_all() -> None:
        for _ in range(repeats):
            for call in calls:
                call()

    flush = torch.zeros(cold_bytes // 4, dtype=torch.float32, device=machine.device).sum if cold_bytes else None
    with torch.inference_mode():
        with machine.on_side_stream():
            run_all()
        if machine.waits(run_all):
            return ()
        replay = machine.capture(run_all)
        replay()
        samples: list[float] = []
        deadline_s = machine.now_s() + budget_s
        while not _is_settled(samples):
            if len(samples) >= _LEAST_REPLAYS and machine.now_s() >= deadline_s:
                break
            samples += time_apart(replay, machine.clock, 1, flush=flush)
    return tuple(round(seconds / (repeats * len(calls)), 12) for seconds in samples)
