"""One visit of one cell: warm up, prefill, and the decode loop with a mark per step."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from profiler.device.clock import Clock, no_gc, waited_s
from profiler.device.contention import ForeignLoad
from profiler.device.machine import Machine
from profiler.device.memory import page_faults
from profiler.effort import STANDARD, Effort
from profiler.engines.base import Engine
from profiler.errors import NoRoomError, RoofscopeError, describe_error, tolerate_errors
from profiler.facts.scheduler import SchedulerIterations
from profiler.facts.telemetry import HardwareCounters
from profiler.facts.visits import Gap, Visit
from profiler.grid.cells import Cell
from profiler.loading.prompts import Prompts
from profiler.stats import CLAIM_VISITS, LEAST_SAMPLES, samples_for
from profiler.units import scaled

_STEADY = 0.05
_MOST_WARM_UPS = 4
_WARM_UP_STEPS = 8
MORE_PREFILLS = LEAST_SAMPLES - 1
TAIL_PREFILLS = samples_for(95)
"""Prefills with which the time to first token has its 95th percentile."""
_LEAST_STEPS = 1 + LEAST_SAMPLES  # the first one pays for the growth of the cache
_NO_MEMORY = ("out of memory", "not enough memory", "allocate memory", "alloc_failed")
"""Words for out of memory: of torch on CUDA and on CPUs (c10/core/impl/alloc_cpu.cpp), and of CUDA's libraries
(CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED)."""
_REQUESTED = re.compile(r"tried to allocate ([0-9.]+) (bytes|kib|mib|gib)")
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def warm_up(engine: Engine, cell: Cell, machine: Machine, *, prompts: Prompts, budget_s: float) -> None:
    """Run a small cell until its steps are stationary: three loops in a row within 5 %, or `budget_s`.

    It has the shape that is timed, since another number of slots would be compiled and captured for nothing. An error
    is left to the cell's visit, which reports it.
    """
    deadline_s = machine.now_s() + budget_s
    recent: list[float] = []
    context, steps = VisitContext(machine, prompts), 1
    with tolerate_errors(), torch.inference_mode(), no_gc():
        engine.prepare(cell.batch_size, cell.slots)
        while machine.now_s() < deadline_s:
            loop = run_loop(engine, cell, context, steps=min(steps, cell.decode_steps))
            step_s = sorted(loop.decode_s)[len(loop.decode_s) // 2]
            recent = [*recent[-2:], step_s]
            steps_left = (deadline_s - machine.now_s()) / step_s if step_s > 0 else math.inf
            steps = int(max(1, min(_WARM_UP_STEPS, steps_left)))
            if len(recent) == 3 and max(recent) <= (1 + _STEADY) * min(recent):
                return


@dataclass(frozen=True)
class VisitContext:
    """What every visit is measured with."""

    machine: Machine
    prompts: Prompts
    own_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes held besides what an engine needs, by engine: the profiler's own, and other engines' models."""
    visited: set[Cell] = field(default_factory=set)
    """Cells whose shapes this process has run before; a visit adds its own."""
    effort: Effort = STANDARD
    deadline_s: float = math.inf
    """The machine's time after which a visit is given up between two steps."""
    tail_s: float = 0.0
    """Seconds that the prefills may take that give the time to first token its 95th percentile; 0: none are added."""
    hurry_s: float = math.inf
    """The machine's time after which a visit does the minimum: one prefill to warm up, and few steps."""


def further_prefills(prefill_s: float, most_s: float, tail_s: float) -> int:
    """Return how many prefills a visit adds to the first: as many as fit into `most_s`, but at most `MORE_PREFILLS`.

    If `TAIL_PREFILLS` fit into `tail_s`, so many that two visits have them.
    """
    if TAIL_PREFILLS * prefill_s <= tail_s:
        return max(MORE_PREFILLS, TAIL_PREFILLS // CLAIM_VISITS - 1)
    return min(MORE_PREFILLS, int(most_s / prefill_s))


class OutOfTimeError(Exception):
    """The deadline of a visit has passed."""


def visit_safely(engine: Engine, cell: Cell, round_number: int, context: VisitContext) -> Visit | Gap | None:
    """Return a visit, a gap if the cell runs out of memory or fails, or None if the deadline has passed.

    Raises DeviceError if the device is lost.
    """
    outcomes: list[Gap | None] = []

    def record(error: Exception) -> None:
        outcomes.append(None if isinstance(error, OutOfTimeError) else _gap(cell, error, context.machine))

    with tolerate_errors(record), torch.inference_mode(), no_gc():
        return _visit(engine, cell, round_number, context)
    # Only after the handler: until then, the error holds the tensors of the step that failed.
    context.machine.recover(cell.name)
    return outcomes[0]


def _gap(cell: Cell, error: Exception, machine: Machine) -> Gap:
    text = str(error).lower()
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in text for words in _NO_MEMORY):
        return Gap(cell, "oom", "out of memory" + _fragmentation(text, machine))
    if isinstance(error, RoofscopeError):
        return Gap(cell, "oom" if isinstance(error, NoRoomError) else "failed", str(error))
    return Gap(cell, "failed", describe_error(error))


def _fragmentation(text: str, machine: Machine) -> str:
    """How much memory was free, but in pieces, when a step ran out of memory; empty if too little was free.

    Called while the step's tensors are still held. torch reports how much it tried to allocate
    (CUDACachingAllocator.cpp), rounded to hundredths of its unit.
    """
    match = _REQUESTED.search(text)
    if not machine.is_cuda or match is None:
        return ""
    requested_bytes, free_bytes = float(match[1]) * _UNITS[match[2]], machine.available_bytes()
    if free_bytes < 1.01 * requested_bytes:
        return ""
    return (
        f": {scaled(free_bytes, 'B')} were free, in pieces too small for the {scaled(requested_bytes, 'B')} requested;"
        " set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which joins them"
    )


def _visit(engine: Engine, cell: Cell, round_number: int, context: VisitContext) -> Visit:
    machine = context.machine
    is_new = cell not in context.visited
    if is_new and machine.is_cuda:
        machine.release()  # segments fragmented by smaller cells would leave no room for a large one
    prepare = partial(engine.prepare, cell.batch_size, cell.slots)
    preparation_s = waited_s(prepare, machine.clock.synchronize, now=machine.now_s)
    prefills = _prefills(engine, cell, context)
    warm_up_limit_s = min(context.effort.warm_up_s, max(0.0, context.hurry_s - machine.now_s()))
    warm_up_s = _warm_prefill(prefills, warm_up_limit_s) if is_new else []
    # Each decode step of a growing cache is a new shape, for which a library may build a plan at its first use.
    first_decode_s = run_loop(engine, cell, context).decode_s if is_new and machine.is_cuda else ()
    context.visited.add(cell)
    machine.reset_peak()
    # Other processes slow down a GPU's host, not the GPU; that shows in the times themselves.
    foreign_load = None if machine.is_cuda else ForeignLoad(engine.helper_pids)
    at_unix_s, before_j = machine.unix_s(), machine.source.energy_j()
    loop = run_loop(engine, cell, context)
    after_j, foreign_cores = machine.source.energy_j(), foreign_load.cores() if foreign_load else None
    host_times_s = [loop.loop_s, loop.issue_s, loop.wall_s, preparation_s + 1.0]  # preparing may take no time
    refuse_impossible_times(
        [*host_times_s, *loop.decode_s, *(value for value in (loop.prefill_s, loop.ttft_s) if value is not None)]
    )
    more_count = (
        further_prefills(loop.prefill_s, context.effort.more_prefills_s, context.tail_s) if loop.prefill_s else 0
    )
    more = list(itertools.islice(prefills, more_count))
    refuse_impossible_times(itertools.chain.from_iterable(more))
    # Held by the profiler and the engine for other purposes than this cell.
    peak_bytes, other_bytes = machine.peak_bytes(), context.own_bytes.get(engine.name, 0) + engine.kept_bytes
    return Visit(
        cell=cell,
        round=round_number,
        prefill_s=loop.prefill_s,
        decode_s=loop.decode_s,
        wall_s=loop.wall_s,
        warm_up_s=tuple(warm_up_s),
        first_decode_s=first_decode_s,
        peak_memory_bytes=None if peak_bytes is None else peak_bytes - other_bytes,
        at_unix_s=at_unix_s,
        energy_j=None if before_j is None or after_j is None else after_j - before_j,
        ttft_s=loop.ttft_s,
        more_prefill_s=tuple(prefill_s for prefill_s, _ in more),
        more_ttft_s=tuple(ttft_s for _, ttft_s in more),
        loop_s=loop.loop_s,
        issue_s=loop.issue_s,
        preparation_s=preparation_s,
        device_memory_bytes=machine.used_bytes(),
        foreign_cores=foreign_cores,
        prefill_faults=loop.prefill_faults,
        decode_faults=loop.decode_faults,
        scheduled=loop.scheduled,
        cache_used_bytes=loop.cache_used_bytes,
        decode_counters=loop.counters,
    )


@dataclass(frozen=True)
class _Loop:
    """One prefill and the decode loop after it."""

    prefill_s: float | None
    ttft_s: float | None
    decode_s: tuple[float, ...]
    loop_s: float
    issue_s: float
    wall_s: float
    prefill_faults: int
    decode_faults: int
    scheduled: tuple[SchedulerIterations, ...] = ()
    cache_used_bytes: int | None = None
    counters: HardwareCounters | None = None


def run_loop(engine: Engine, cell: Cell, context: VisitContext, *, steps: int | None = None) -> _Loop:
    """Run one prefill and its decode steps (or `steps` of them), with a mark after each that is read after the loop.

    The first token is fetched between the two, as a user's would be; the loop itself never waits.
    """
    machine, clock = context.machine, context.machine.clock
    decode_steps = cell.decode_steps if steps is None else steps
    if engine.whole_calls:
        return _run_whole(engine, cell, context, steps=decode_steps)
    prompts = context.prompts.of(cell) if cell.prompt_len else None
    engine.announce(cell, decode_steps)
    clock.synchronize()
    faults_before = page_faults()
    start_s = machine.now_s()
    marks, ttft_s = [], None
    if prompts is None:
        state = engine.fill(cell.batch_size, cell.context_len, cell.slots)
    else:
        ids = prompts.to(machine.device)
        marks.append(clock.mark())
        state = engine.prefill(ids, cell.slots)
        marks.append(clock.mark())
        state.token_B1.cpu()
        ttft_s = machine.now_s() - start_s
    clock.synchronize()
    machine.source.counters()  # their interval starts here
    faults_between = page_faults()
    loop_start_s = machine.now_s()
    loop_marks = [clock.mark()]
    for _ in range(decode_steps):
        state = engine.decode(state)
        loop_marks.append(clock.mark())
        if machine.now_s() > context.deadline_s:
            raise OutOfTimeError
        if machine.now_s() > context.hurry_s and len(loop_marks) > _LEAST_STEPS:
            break
    issued_s = machine.now_s()
    clock.synchronize()
    end_s = machine.now_s()
    counters = machine.source.counters()
    return _Loop(
        prefill_s=clock.seconds(marks)[0] if marks else None,
        ttft_s=ttft_s,
        decode_s=tuple(clock.seconds(loop_marks)),
        loop_s=end_s - loop_start_s,
        issue_s=issued_s - loop_start_s,
        wall_s=end_s - start_s,
        prefill_faults=faults_between - faults_before,
        decode_faults=page_faults() - faults_between,
        counters=counters,
    )


def follow(
    engine: Engine, cell: Cell, steps: int | None, context: VisitContext
) -> tuple[float | None, tuple[float, ...]]:
    """Run what rank 0 announced, as rank 0 does; return the seconds of the prefill, and of each decode step."""
    with torch.inference_mode(), no_gc():
        if steps is None:
            return next(_prefills(engine, cell, context))[0], ()
        loop = run_loop(engine, cell, context, steps=steps)
    return loop.prefill_s, loop.decode_s


def _run_whole(engine: Engine, cell: Cell, context: VisitContext, *, steps: int) -> _Loop:
    """One prefill and its decode steps, for an engine that runs both in one call."""
    machine, clock = context.machine, context.machine.clock
    prompts = context.prompts.of(cell)
    marks: list[Any] = []
    token_readings: list[tuple[float, int]] = []

    def mark() -> None:
        marks.append(clock.mark())
        token_readings.append((machine.now_s(), page_faults()))

    clock.synchronize()
    start_s, faults_before = machine.now_s(), page_faults()
    engine.call(prompts.to(machine.device), 1 + steps, mark)
    issued_s = machine.now_s()
    clock.synchronize()
    end_s, (first_s, faults_between) = machine.now_s(), token_readings[1]
    prefill_s, *decode_s = clock.seconds(marks)
    return _Loop(
        prefill_s=prefill_s,
        ttft_s=first_s - start_s,
        decode_s=tuple(decode_s),
        loop_s=end_s - first_s,
        issue_s=issued_s - first_s,
        wall_s=end_s - start_s,
        prefill_faults=faults_between - faults_before,
        decode_faults=page_faults() - faults_between,
        scheduled=engine.scheduled,
        cache_used_bytes=engine.cache_used_bytes,
    )


def refuse_impossible_times(times_s: Iterable[float]) -> None:
    """Raise RuntimeError for a duration that no step can have: the clock went back, or gave no number."""
    for value in times_s:
        if not (math.isfinite(value) and value > 0):
            raise RuntimeError(f"the clock gave a step of {value:g} s")


def _prefills(engine: Engine, cell: Cell, context: VisitContext) -> Iterator[tuple[float, float]]:
    """Yield the seconds of consecutive prefills of this cell, each with its time to first token as a user sees it."""
    if not cell.prompt_len:
        return
    machine, clock = context.machine, context.machine.clock
    prompts = context.prompts.of(cell)
    while True:
        engine.announce(cell, None)
        clock.synchronize()
        marks: list[Any] = []
        mark = partial(_mark, clock, marks)
        start_s = machine.now_s()
        ids = prompts.to(machine.device)
        if engine.whole_calls:
            engine.call(ids, 1, mark).cpu()
        else:
            mark()
            token_B1 = engine.prefill(ids, cell.slots).token_B1  # noqa: N806 -- the state holds a whole cache
            mark()
            token_B1.cpu()
        ttft_s = machine.now_s() - start_s
        clock.synchronize()
        yield clock.seconds(marks)[0], ttft_s


def _mark(clock: Clock, marks: list[Any]) -> None:
    marks.append(clock.mark())


def _warm_prefill(prefills: Iterator[tuple[float, float]], most_s: float) -> list[float]:
    """Prefills of a new shape until two in a row agree, or `most_s`; the first ones pick kernels and take memory."""
    times: list[float] = []
    for seconds, _ in prefills:
        times.append(seconds)
        is_steady = len(times) > 1 and abs(times[-1] / times[-2] - 1) <= _STEADY
        if is_steady or len(times) == _MOST_WARM_UPS or sum(times) > most_s:
            break
    return times
