"""Replays: a step's operators at the shapes of a cell, each in isolation, with cold caches and without page faults."""

import math
import statistics
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from profiler.counting.attention import AttentionCore
from profiler.counting.operators import Linear, ModelWork
from profiler.counting.walk import linear_key, linear_modules
from profiler.device.clock import time_apart
from profiler.device.machine import Machine
from profiler.device.memory import page_faults
from profiler.errors import RequestError, tolerate_errors
from profiler.facts.ceilings import Ceilings
from profiler.facts.measurements import Replay, Replays
from profiler.facts.operators import COPIES, REST
from profiler.facts.step import ExecutionPath, Step
from profiler.grid.cells import Cell, CellKey
from profiler.loading.request import ModelRequest
from profiler.measure.captured_calls import answered, callable_modules, caught_calls, masks_of_uncaptured_steps, step_of
from profiler.measure.schedule import corners
from profiler.measure.subject import Subject
from profiler.quant.storage import conversion_calls, without_waiting
from profiler.roofs.sampler import is_known
from profiler.stats import timing_of

# Attention and experts get this share of the time, and all linears the rest.
_CALLS_SHARE = 0.3
# Kernels that only convert are few, and also run inside the linears.
_CONVERSIONS_SHARE = 0.3
# The shortest time of a replay, in steps, by whether it is captured: a graph of all layers runs five times. Otherwise
# one layer's linears run twice; to capture calls, the whole step runs once, and its small kernels run twice.
_LINEAR_STEPS = {True: 5.0, False: 0.3}
_CALL_STEPS = {True: 5.0, False: 3.0}
# KV caches that differ by less than this share of the weights' bytes evict about as much of the weights.
_CACHE_STEP = 0.25

Key = TypeVar("Key", bound=Hashable)
Linears = dict[Linear, list[nn.Module]]
"""The linears of a model that can be called by themselves, each with its modules, one per layer."""


def replayable_linears(work: ModelWork, model: nn.Module) -> Linears:
    """Return the linears that the walk counted, with their modules."""
    modules = linear_modules(model)
    operators = {linear_key(op): op for op in work.of_kind(Linear) if linear_key(op) in modules}
    return {op: modules[key] for key, op in operators.items()}


def replay_kernels(
    subject: Subject,
    cells: Sequence[Cell],
    ceilings: Ceilings,
    budget_s: float,
    guard: Callable[[], AbstractContextManager[None]] = tolerate_errors,
    steps_s: Mapping[CellKey, float] | None = None,
) -> Iterator[Replays]:
    """Replay each linear, attention core and bank of experts of each cell in isolation, shape by shape.

    For a linear that converts between formats, those kernels are also timed by themselves. Cells share a replay if
    their linears get the same rows and find as much of their weights in a cache.

    `budget_s` is for all replays. A replay that takes longer than the time left, estimated from its step in `steps_s`,
    is left out. `guard` suppresses the error of a replay that fails, but not DeviceError for a lost device.
    """
    linears = replayable_linears(subject.work, subject.loaded.module)
    shapes = _keys_by_shape(subject, linears, [key for cell in cells for key in cell.keys], ceilings)
    machine, steps_s = subject.machine, steps_s or {}
    end_s = machine.now_s() + budget_s

    def has_time(key: CellKey, steps: float) -> bool:
        return key not in steps_s or machine.now_s() + steps * steps_s[key] <= end_s

    def until_failure(keys: Sequence[CellKey], replays: Iterator[Replay]) -> Replays:
        done: list[Replay] = []
        with guard():
            done.extend(replays)
        return Replays(tuple(keys), tuple(done))

    # Of a step, only linears and calls together explain the time, so the steps that an answer names have both before
    # the other corners have any, and these before other cells.
    ends = {key for cell in corners(cells) for key in cell.keys}
    size = {cell: cell.batch_size * cell.depth for cell in cells}
    named = {CellKey("decode", min(size, key=size.__getitem__)), CellKey("prefill", max(size, key=size.__getitem__))}
    ranks = {index: min((key not in named, key not in ends) for key in users) for index, users in shapes.items()}
    linears_s, calls_s = budget_s * (1 - _CALLS_SHARE) / len(shapes), budget_s * _CALLS_SHARE
    for rank in sorted(set(ranks.values())):
        part = [users for index, users in shapes.items() if ranks[index] == rank]
        keys = sorted((key for users in part for key in users), key=lambda key: key not in named)
        for users in (users for users in part if has_time(users[0], _LINEAR_STEPS[machine.captures])):
            yield until_failure(users, _replay_step_linears(subject, linears, users[0], ceilings, linears_s))
        for key in (key for key in keys if has_time(key, _CALL_STEPS[machine.captures])):
            share_s = calls_s / sum(map(len, shapes.values()))
            yield until_failure([key], replay_single_calls(subject, key, ceilings, share_s))


def replay_between(subject: Subject, keys: Sequence[CellKey], ceilings: Ceilings, budget_s: float) -> Iterator[Replays]:
    """Replay the linears of steps that no cell takes (`keys_between`), fewest rows first, within `budget_s`.

    A library may change its kernel between two cells. oneDNN's AMX matmuls of SmolLM2-135M take three times as long
    over 1024 rows as over 256 in one width, and not in the next.
    """
    machine, linears = subject.machine, replayable_linears(subject.work, subject.loaded.module)
    shapes = sorted(_keys_by_shape(subject, linears, keys, ceilings).values(), key=lambda users: users[0].tokens)
    end_s, pass_s = machine.now_s() + budget_s, 0.0
    for index, users in enumerate(shapes):
        left_s = end_s - machine.now_s()
        # Twice the rows take at most about twice as long.
        if left_s < 2 * pass_s:
            break
        replays = tuple(_replay_step_linears(subject, linears, users[0], ceilings, left_s / (len(shapes) - index)))
        layers = map(len, linears.values())
        pass_s = sum(count * replay.whole.median_s for count, replay in zip(layers, replays, strict=True))
        yield Replays(tuple(users), replays)


def _keys_by_shape(
    subject: Subject, linears: Linears, keys: Sequence[CellKey], ceilings: Ceilings
) -> dict[tuple[int, ...], list[CellKey]]:
    """Keys by the input of their linears: rows, sequences, and the bytes that are touched between them."""
    shapes: dict[tuple[int, ...], list[CellKey]] = {}
    for key in keys:
        rows = rows_of(linears, Step.of(key), subject.path_of(key))
        shape = (*rows.values(), key.cell.batch_size, _between_bytes(subject, key, ceilings))
        shapes.setdefault(shape, []).append(key)
    return shapes


def _between_bytes(subject: Subject, key: CellKey, ceilings: Ceilings) -> int:
    """Bytes of the KV cache, old and copied, that a decode step on a CPU touches between its linears, where they evict
    weights. Rounded to `_CACHE_STEP` of the model's weights, and at most what leaves no weights in a cache."""
    if subject.machine.captures or key.phase == "prefill":
        return 0
    work = subject.work.work(Step.of(key), subject.path_of(key))
    # Copied bytes are read once and written once.
    touched_bytes = float(work.kv_read_bytes + sum(work.redundant_bytes.get(cause, 0) for cause in COPIES) / 2)
    unit = _CACHE_STEP * subject.model_bytes
    return int(min(round(touched_bytes / unit) * unit, ceilings.past_caches_bytes))


def rows_of(linears: Linears, step: Step, path: ExecutionPath) -> dict[Linear, int]:
    """Return the rows that each linear really gets in a step of plain numbers."""
    return {op: int(op.executed(step, path)) for op in linears}


def replay_single_calls(subject: Subject, key: CellKey, ceilings: Ceilings, budget_s: float) -> Iterator[Replay]:
    """Replay attention and experts with the arguments of a cell's step, unless only a prefill can fill its cache."""
    machine, step, page_fault_s = subject.machine, Step.of(key), ceilings.page_fault_s
    modules = callable_modules(subject.loaded.module, subject.work, machine.available_bytes(), step)
    try:
        step_call = step_of(subject, key)
    except RequestError:
        return
    calls = caught_calls(modules, step_call) if modules else {}
    cold_bytes = cold_bytes_of(subject, ceilings)
    times = replay_calls(calls, machine, budget_s=budget_s, cold_bytes=cold_bytes, page_fault_s=page_fault_s)
    for operator, seconds in times.items():
        yield Replay(subject.work.names[operator], seconds, without_faults=page_fault_s > 0)
    # On a CPU, the small kernels of a decode step take almost no time compared with their overhead.
    if key.phase not in subject.engines[key.cell.engine].eager_phases or not (
        machine.captures or key.phase == "prefill"
    ):
        return
    with answered(subject.loaded.module, modules):
        small = replay_small(subject, key, ceilings, budget_s)
    if small:
        yield Replay(REST, small, without_faults=page_fault_s > 0)
    cores = {operator: seconds for operator, seconds in times.items() if isinstance(operator, AttentionCore)}
    if small and cores and machine.captures:  # attention may find in a cache what the kernels before it wrote
        with answered(subject.loaded.module, modules, attends=True):
            both = replay_small(subject, key, ceilings, budget_s)
        share = (timing_of(both).median_s - timing_of(small).median_s) / sum(
            operator.count * timing_of(seconds).median_s for operator, seconds in cores.items()
        )
        for operator, seconds in cores.items():
            yield Replay(subject.work.names[operator], tuple(min(1.0, max(0.0, share)) * each for each in seconds))


def replay_small(subject: Subject, key: CellKey, ceilings: Ceilings, budget_s: float) -> tuple[float, ...]:
    """Return the seconds of a step whose large kernels are `answered`; on a CPU, less those of one token."""
    machine, small, page_fault_s = subject.machine, step_of(subject, key), ceilings.page_fault_s
    if machine.captures:
        calls, cold_bytes = {REST: [small]}, cold_bytes_of(subject, ceilings)
        with masks_of_uncaptured_steps():
            return replay_calls(calls, machine, budget_s=budget_s, cold_bytes=cold_bytes).get(REST, ())
    one = step_of(subject, CellKey(key.phase, replace(key.cell, batch_size=1, prompt_len=1)))
    times = replay_calls({REST: [small], "one token": [one]}, machine, budget_s=budget_s, page_fault_s=page_fault_s)
    overhead_s = timing_of(times["one token"]).median_s
    return tuple(max(0.0, seconds - overhead_s) for seconds in times[REST])


def cold_bytes_of(subject: Subject, ceilings: Ceilings) -> int:
    """Return the bytes to read to flush the last-level cache before a call; 0 if the cache holds the model."""
    cache_bytes = subject.machine.info.last_level_cache_bytes
    # 50 µs of reading hide the launch of a graph, of about 10 µs.
    cold_bytes = max(2 * cache_bytes, int(50e-6 * ceilings.memory_bytes_per_s))
    return cold_bytes if subject.model_bytes > cache_bytes else 0


def _replay_step_linears(
    subject: Subject, linears: Linears, key: CellKey, ceilings: Ceilings, budget_s: float
) -> Iterator[Replay]:
    machine, request = subject.machine, subject.request
    rows = rows_of(linears, Step.of(key), subject.path_of(key))
    sliced = [op for op in linears if op.rows == "last" and rows[op] == key.cell.batch_size != key.tokens]
    converting = conversions(linears, rows, request)
    share_s = budget_s * _CONVERSIONS_SHARE if converting else 0.0
    cold_bytes, page_fault_s = cold_bytes_of(subject, ceilings), ceilings.page_fault_s
    times = replay_linears(
        linears,
        rows,
        machine,
        dtype=request.dtype,
        budget_s=budget_s - share_s,
        sliced=sliced,
        cold_bytes=cold_bytes,
        between_bytes=_between_bytes(subject, key, ceilings),
        page_fault_s=page_fault_s,
    )
    converted = replay_calls(converting, machine, budget_s=share_s, cold_bytes=cold_bytes, page_fault_s=page_fault_s)
    for op, seconds in times.items():
        yield Replay(subject.work.names[op], seconds, converted.get(op, ()), without_faults=page_fault_s > 0)


def conversions(
    linears: Linears, rows: Mapping[Linear, int], request: ModelRequest
) -> dict[Linear, list[Callable[[], object]]]:
    """Return the calls with which each linear converts between formats, one per layer; others are left out."""
    calls = {op: conversion_calls(modules, rows[op], request.dtype) for op, modules in linears.items()}
    return {op: layers for op, layers in calls.items() if layers}


def keys_between(keys: Collection[CellKey]) -> tuple[CellKey, ...]:
    """Return steps that fill the gaps between the rows (tokens) of `keys`: each number is doubled up to the next.

    Fewer rows than any prompt has are a decode step of that many sequences; more are a prompt. Each engine has its own.
    """
    shortest = min((key.tokens for key in keys if key.phase == "prefill"), default=math.inf)
    smallest: dict[str, Cell] = {}
    for key in keys:
        smallest[key.cell.engine] = min(key.cell, smallest.get(key.cell.engine, key.cell))
    between = []
    for below, above in pairwise(sorted({key.tokens for key in keys})):
        rows = 2 * below
        while rows * math.sqrt(2) <= above:
            for cell in smallest.values():
                if rows < shortest:
                    between.append(CellKey("decode", replace(cell, batch_size=rows)))
                else:
                    between.append(CellKey("prefill", replace(cell, batch_size=1, prompt_len=rows, context_len=0)))
            rows *= 2
    return tuple(between)


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
