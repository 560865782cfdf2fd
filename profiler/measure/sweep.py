"""The sweep over the cells: each visit warms a cell up, prefills it, and decodes with a mark per step."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from profiler.facts.telemetry import HardwareCounters
from profiler.facts.visits import Gap, Visit
from profiler.grid.cells import Cell, Phase
from profiler.loading.prompts import Prompts
from profiler.measure.rounds import TAIL_PREFILLS, CellState, Costs, Plan, Progress, Rounds, further_prefills
from profiler.stats import LEAST_SAMPLES
from profiler.units import scaled

_STEADY = 0.05
_MOST_WARM_UPS = 4
_WARM_UP_STEPS = 8
_LEAST_STEPS = 1 + LEAST_SAMPLES  # the first one pays for the growth of the cache
_NO_MEMORY = ("out of memory", "not enough memory", "allocate memory", "alloc_failed")
"""Words for out of memory: of torch on CUDA and on CPUs (c10/core/impl/alloc_cpu.cpp), and of CUDA's libraries
(CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED)."""
_REQUESTED = re.compile(r"tried to allocate ([0-9.]+) (bytes|kib|mib|gib)")
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def sweep(
    engines: Mapping[str, Engine],
    plan: Plan,
    *,
    machine: Machine,
    prompts: Prompts,
    own_bytes: int = 0,
    fits: Callable[[Cell], str | None] = lambda cell: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    before_visits: Callable[[], float] = lambda: 0.0,
    earlier: Iterable[Visit | Gap] = (),
) -> Iterator[Visit | Gap]:
    """Visit the cells; yield each visit, and each cell that has no number, as it ends.

    The corners of the grid come first, then the other cells. If that is expected to fit, second visits follow after all
    first ones, so that they lie apart in time; otherwise the corners have theirs first. Further visits are made where
    the interval is still wide, in shuffled rounds (seeded). The engines of a cell are visited one right after the
    other, every second time in reverse.

    A visit begins only if it is expected to end within the budget, and is given up when it exceeds it by `late_s`. The
    smallest cell is visited in any case, with fewer steps if it is late and `late_s` is finite. In a `whole` plan all
    cells first get two visits, however long they take. A cell that fails after an earlier visit is visited once more.

    `before_visits` is called before the visits of a cell, and returns how much the machine's own speed has varied so
    far. `fits` returns why a cell cannot fit, or None. `own_bytes` are held besides what each engine needs. `earlier`
    are the outcomes of an interrupted sweep.
    """
    states = {cell: CellState() for cell in plan.grid.cells}
    for outcome in earlier:
        if isinstance(outcome, Gap):
            states[outcome.cell].gap = outcome
        else:
            states[outcome.cell].visits.append(outcome)
    start_s = machine.now_s()
    context = VisitContext(machine, prompts, own_bytes, effort=plan.effort)
    bounded = first = context
    if not plan.whole and plan.late_s < math.inf:
        bounded = replace(context, deadline_s=start_s + plan.budget_s + plan.late_s)
        first = replace(context, hurry_s=start_s + plan.budget_s)
    costs = Costs(plan)
    rounds = Rounds(plan, states, costs)
    no_memory = [cell for cell, state in states.items() if state.gap is not None and state.gap.status == "oom"]
    first_round = 1 + max((visit.round for state in states.values() for visit in state.visits), default=-1)
    any_visit = any(state.visits for state in states.values())
    swing = 0.0
    for round_number in itertools.count(first_round):
        elapsed_s = machine.now_s() - start_s
        next_round = rounds.following(plan.budget_s - elapsed_s, swing)
        if next_round is None and any_visit:
            return
        turns, unbounded = next_round or (rounds.smallest(), True)
        if not turns:
            return
        for turn in turns:
            swing = before_visits()
            elapsed_s = machine.now_s() - start_s
            if not unbounded and elapsed_s + costs.of_all(turn) > plan.budget_s:
                continue
            for cell in turn:
                state, elapsed_s = states[cell], machine.now_s() - start_s
                left_s = max(rounds.left_s if plan.whole else 0.0, plan.budget_s - elapsed_s)
                on_progress(Progress(cell, len(state.visits) + 1, elapsed_s, left_s))
                skip_reason = _oom_reason(cell, no_memory) or (None if state.visits else fits(cell))
                if skip_reason:
                    state.gap = Gap(cell, "skipped", skip_reason)
                    yield state.gap
                    continue
                before_s = machine.now_s()
                prefills = sum(len(visit.prefills_s) for visit in state.visits)
                has_time = plan.whole or elapsed_s + costs.of(cell, len(state.visits), tail=True) <= plan.budget_s
                tail_s = plan.tail_s_of(cell) if prefills < TAIL_PREFILLS and has_time else 0.0
                of_visit = replace(bounded if any_visit else first, tail_s=tail_s)
                result = visit(engines[cell.engine], cell, round_number, of_visit)
                costs.note(cell, machine.now_s() - before_s, result)
                if result is None:
                    return  # the time is up
                any_visit |= isinstance(result, Visit)
                if isinstance(result, Gap):
                    state.fail(result)
                    no_memory += [cell] if result.status == "oom" else []
                else:
                    state.visits.append(result)
                yield result


def _oom_reason(cell: Cell, no_memory: Iterable[Cell]) -> str | None:
    """Why a cell is not tried: it is at least as large as one that ran out of memory."""
    for other in no_memory:
        if (
            cell != other
            and cell.engine == other.engine
            and cell.batch_size >= other.batch_size
            and cell.depth >= other.depth
            and cell.prefilled >= other.prefilled
        ):
            return f"larger than batch {other.batch_size} x {other.depth} tokens, which ran out of memory"
    return None


@dataclass(frozen=True)
class WarmUp:
    """The times of a cell whose steps have become stationary."""

    cell: Cell
    prefill_s: float | None
    """Seconds of its fastest prefill; None without a prompt."""
    decode_s: float
    """The fastest loop's median seconds of a step."""
    first_use: float
    """Seconds of a step at a new length over those of a later one."""
    new_shape_s: float
    """Seconds by which the first loop took longer than later ones, such as for compiling the shape."""

    def of(self, phase: Phase) -> float | None:
        return self.prefill_s if phase == "prefill" else self.decode_s


def warm_up(engine: Engine, cell: Cell, machine: Machine, *, prompts: Prompts, budget_s: float) -> WarmUp | None:
    """Run a small cell until its steps are stationary: three loops in a row within 5 %, or `budget_s`.

    It has the shape that is timed, since another number of slots would be compiled and captured for nothing. Slow steps
    are few. An error is left to the cell's visit, which reports it; the result is then None.
    """
    start_s = machine.now_s()
    loops: list[tuple[Visit, float]] = []
    context, steps = VisitContext(machine, prompts), 1
    with tolerate_errors(), torch.inference_mode(), no_gc():
        engine.prepare(cell.batch_size, cell.slots)
        while not loops or machine.now_s() < start_s + budget_s:
            before_s = start_s if not loops else machine.now_s()
            loop = run_loop(engine, cell, context, steps=min(steps, cell.decode_steps))
            loops.append((loop, machine.now_s() - before_s))
            step_s = statistics.median(loop.decode_s)
            steps_left = (start_s + budget_s - machine.now_s()) / step_s if step_s > 0 else math.inf
            steps = int(max(1, min(_WARM_UP_STEPS, steps_left)))
            recent = [statistics.median(loop.decode_s) for loop, _ in loops[-3:]]
            if len(loops) >= 3 and max(recent) <= (1 + _STEADY) * min(recent):
                break
        return _warmed(cell, loops)
    return None


def _warmed(cell: Cell, loops: Sequence[tuple[Visit, float]]) -> WarmUp:
    """The result of loops, each with its seconds; the second one is the first at most of its lengths."""
    prefills = [loop.prefill_s for loop, _ in loops if loop.prefill_s]
    decode_s = min(statistics.median(loop.decode_s) for loop, _ in loops)
    new = [statistics.median(loop.decode_s[1:]) / decode_s for loop, _ in loops[1:2] if len(loop.decode_s) > 1]
    new_shape_s = max(0.0, loops[0][1] - min(prefills, default=0.0) - decode_s)
    return WarmUp(cell, min(prefills, default=None), decode_s, max([1.0, *new]), new_shape_s)


@dataclass(frozen=True)
class VisitContext:
    """What every visit is measured with."""

    machine: Machine
    prompts: Prompts
    own_bytes: int = 0
    """Bytes held besides what an engine needs: the profiler's own, and the models of engines that own theirs."""
    visited: set[Cell] = field(default_factory=set)
    """Cells whose shapes this process has run before; a visit adds its own."""
    effort: Effort = STANDARD
    deadline_s: float = math.inf
    """The machine's time after which a visit is given up between two steps."""
    tail_s: float = 0.0
    """Seconds that the prefills may take that give the time to first token its 95th percentile; 0: none are added."""
    hurry_s: float = math.inf
    """The machine's time after which a visit does the minimum: one prefill to warm up, and few steps."""


class OutOfTimeError(Exception):
    """The deadline of a visit has passed."""


def visit(engine: Engine, cell: Cell, round_number: int, context: VisitContext) -> Visit | Gap | None:
    """Return a visit, a gap if the cell runs out of memory or fails, or None if the deadline has passed.

    Raises DeviceError if the device is lost.
    """
    machine, outcomes = context.machine, list[Gap | None]()

    def record(error: Exception) -> None:
        outcomes.append(None if isinstance(error, OutOfTimeError) else _gap(cell, error, machine))

    with tolerate_errors(record), torch.inference_mode(), no_gc():
        is_new = cell not in context.visited
        if is_new and machine.is_cuda:
            machine.release()  # segments fragmented by smaller cells would leave no room for a large one
        prepare = partial(engine.prepare, cell.batch_size, cell.slots)
        preparation_s = waited_s(prepare, machine.clock.synchronize, now=machine.now_s)
        prefills = _prefills(engine, cell, context)
        warm_up_limit_s = min(context.effort.warm_up_s, max(0.0, context.hurry_s - machine.now_s()))
        warm_up_s = _warm_prefill(prefills, warm_up_limit_s) if is_new else []
        # Each decode step of a growing cache is a new shape, for which a library may build a plan at its first use.
        first = run_loop(engine, cell, context, counted=True) if is_new and machine.is_cuda else None
        context.visited.add(cell)
        machine.reset_peak()
        # Other processes slow down a GPU's host, not the GPU; that shows in the times themselves.
        foreign_load = None if machine.is_cuda else ForeignLoad(engine.helper_pids)
        before_j = machine.source.energy_j()
        loop = run_loop(engine, cell, context)
        after_j, foreign_cores = machine.source.energy_j(), foreign_load.cores() if foreign_load else None
        times_s = [loop.prefill_s, loop.ttft_s, loop.loop_s, loop.issue_s, loop.wall_s, *loop.decode_s]
        refuse_impossible_times(seconds for seconds in times_s if seconds is not None)
        refuse_impossible_times([preparation_s + 1.0])  # preparing may take no time
        more_s, more_count = context.effort.more_prefills_s, 0
        if loop.prefill_s:
            more_count = further_prefills(loop.prefill_s, more_s, context.tail_s, first=is_new)
        more = list(itertools.islice(prefills, more_count))
        refuse_impossible_times(itertools.chain.from_iterable(more))
        # Held by the profiler and the engine for other purposes than this cell.
        peak_bytes, other_bytes = machine.peak_bytes(), context.own_bytes + engine.kept_bytes
        return replace(
            loop,
            round=round_number,
            warm_up_s=tuple(warm_up_s),
            first_decode_s=first.decode_s if first else (),
            decode_counters=_counted(first, loop) if first else None,
            # An engine that owns its model reserves its cache and generates more tokens in a visit than the cell has.
            peak_memory_bytes=None if engine.owned or peak_bytes is None else peak_bytes - other_bytes,
            energy_j=None if engine.owned or before_j is None or after_j is None else after_j - before_j,
            more_prefill_s=tuple(prefill_s for prefill_s, _ in more),
            more_ttft_s=tuple(ttft_s for _, ttft_s in more),
            preparation_s=preparation_s,
            device_memory_bytes=machine.used_bytes(),
            foreign_cores=foreign_cores,
        )
    # Only after the handler: until then, the error holds the tensors of the step that failed.
    machine.recover(cell.name)
    return outcomes[0]


def _counted(first: Visit, loop: Visit) -> HardwareCounters | None:
    """The counters of a first loop as means over the timed one, whose steps are the same and take another time."""
    if (found := first.decode_counters) is None or not (first.loop_s and loop.loop_s):
        return None
    times = (first.loop_s / len(first.decode_s)) / (loop.loop_s / len(loop.decode_s))
    return HardwareCounters(times * found.sm, times * found.tensor, times * found.dram)


def run_loop(
    engine: Engine, cell: Cell, context: VisitContext, *, steps: int | None = None, counted: bool = False
) -> Visit:
    """Run one prefill and its decode steps (or `steps` of them), with a mark after each that is read after the loop.

    The first token is fetched between the two, as a user's would be; the loop itself never waits. The GPU idles around
    a `counted` loop. Memory, energy and warm-up are added by `visit`.
    """
    machine, clock = context.machine, context.machine.clock
    decode_steps = cell.decode_steps if steps is None else steps
    if engine.whole_calls:
        return _run_whole(engine, cell, context, steps=decode_steps)
    prompts = context.prompts.of(cell) if cell.prompt_len else None
    engine.announce(cell, decode_steps)
    clock.synchronize()
    at_unix_s, faults_before = machine.unix_s(), page_faults()
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
    if counted:
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
    counters = machine.source.counters(end_s - loop_start_s) if counted else None
    return Visit(
        cell=cell,
        round=0,
        warm_up_s=(),
        peak_memory_bytes=None,
        at_unix_s=at_unix_s,
        prefill_s=clock.seconds(marks)[0] if marks else None,
        ttft_s=ttft_s,
        decode_s=tuple(clock.seconds(loop_marks)),
        loop_s=end_s - loop_start_s,
        issue_s=issued_s - loop_start_s,
        wall_s=end_s - start_s,
        prefill_faults=faults_between - faults_before,
        decode_faults=page_faults() - faults_between,
        decode_counters=counters,
    )


def _run_whole(engine: Engine, cell: Cell, context: VisitContext, *, steps: int) -> Visit:
    """One prefill and its decode steps, for an engine that runs both in one call."""
    machine, clock = context.machine, context.machine.clock
    prompts = context.prompts.of(cell)
    if engine.owned:
        at_unix_s, start_s = machine.unix_s(), machine.now_s()
        prefill_s, loops_s = engine.times(prompts, 1 + steps)
        wall_s = machine.now_s() - start_s
        return Visit(cell, 0, prefill_s, loops_s, wall_s, (), None, at_unix_s, ttft_s=prefill_s)
    marks: list[Any] = []
    token_readings: list[tuple[float, int]] = []

    def mark() -> None:
        marks.append(clock.mark())
        token_readings.append((machine.now_s(), page_faults()))

    clock.synchronize()
    at_unix_s, start_s, faults_before = machine.unix_s(), machine.now_s(), page_faults()
    engine.call(prompts.to(machine.device), 1 + steps, mark)
    issued_s = machine.now_s()
    clock.synchronize()
    end_s, (first_s, faults_between) = machine.now_s(), token_readings[1]
    prefill_s, *decode_s = clock.seconds(marks)
    return Visit(
        cell=cell,
        round=0,
        warm_up_s=(),
        peak_memory_bytes=None,
        at_unix_s=at_unix_s,
        prefill_s=prefill_s,
        ttft_s=first_s - start_s,
        decode_s=tuple(decode_s),
        loop_s=end_s - first_s,
        issue_s=issued_s - first_s,
        wall_s=end_s - start_s,
        prefill_faults=faults_between - faults_before,
        decode_faults=page_faults() - faults_between,
    )


def refuse_impossible_times(times_s: Iterable[float]) -> None:
    """Raise RuntimeError for a duration that no step can have: the clock went back, or gave no number."""
    for value in times_s:
        if not (math.isfinite(value) and value > 0):
            raise RuntimeError(f"the clock gave a step of {value:g} s")


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
