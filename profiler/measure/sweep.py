"""The sweep over the cells: each repetition warms a cell up, prefills it, and decodes with a mark per step."""

import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from profiler.device.clock import no_gc, waited_s
from profiler.device.contention import ForeignLoad
from profiler.device.machine import Machine
from profiler.device.memory import page_faults
from profiler.engines.base import Engine
from profiler.errors import NoFreeMemoryError, OutOfTimeError, RoofscopeError, describe_error, tolerate_errors
from profiler.facts.repetitions import Gap, Repetition
from profiler.facts.telemetry import HardwareCounters
from profiler.grid.cells import Cell
from profiler.loading.prompts import Prompts
from profiler.measure.schedule import UNLIMITED, Limits, Progress, Schedule, further_prefills
from profiler.stats import LEAST_SAMPLES
from profiler.units import scaled

_STEADY = 0.05
_MOST_WARM_UPS = 4
_WARM_UP_STEPS = 8
_LEAST_STEPS = 1 + LEAST_SAMPLES  # the first one pays for the growth of the cache
_NO_MEMORY = ("out of memory", "not enough memory", "allocate memory", "alloc_failed")
"""Words for out of memory of torch, on CUDA and on CPUs (c10/core/impl/alloc_cpu.cpp), and of CUDA's libraries."""
_REQUESTED = re.compile(r"tried to allocate ([0-9.]+) (bytes|kib|mib|gib)")
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


@dataclass(frozen=True)
class RepetitionContext:
    """What all repetitions of a sweep share."""

    machine: Machine
    prompts: Prompts
    own_bytes: int = 0
    """Bytes held besides what an engine needs: the profiler's own, and the models of engines that own theirs."""
    engines: Sequence[Engine] = ()
    """All engines of the run: each keeps caches while another is timed."""
    timed: set[Cell] = field(default_factory=set)
    """Cells whose shapes this process has run before; a repetition adds its own."""


Sweep = Callable[
    [Schedule, Mapping[str, Engine], RepetitionContext, Callable[[Progress], None]], Iterator[Repetition | Gap]
]


def sweep(
    schedule: Schedule, engines: Mapping[str, Engine], context: RepetitionContext, show: Callable[[Progress], None]
) -> Iterator[Repetition | Gap]:
    """Time the cells in the order of a schedule; yield each repetition, and each cell without a number, as it ends."""
    outcome: Repetition | Gap | None
    for cell in schedule:
        show(schedule.progress(cell))
        start_s = context.machine.now_s()
        if reason := schedule.skip_reason(cell):
            outcome = Gap(cell, "skipped", reason)
        else:
            outcome = repetition(engines[cell.engine], cell, schedule.round, context, schedule.limits(cell))
        if outcome is None:
            return  # the time is up
        schedule.note(outcome, context.machine.now_s() - start_s)
        yield outcome


@dataclass(frozen=True)
class WarmUp:
    """The times of a cell whose steps have become stationary."""

    cell: Cell
    prefill_s: float | None
    """Seconds of its fastest prefill; None without a prompt."""
    decode_s: float
    """Seconds of its fastest step: other processes only make steps slower."""
    first_use: float
    """Seconds of a step at a new length over those of a later one."""
    new_shape_s: float
    """Seconds by which the first loop took longer than later ones, such as for compiling the shape."""


def warm_up(engine: Engine, cell: Cell, machine: Machine, *, prompts: Prompts, budget_s: float) -> WarmUp | None:
    """Run a small cell until its steps are stationary: three loops in a row within 5 %, or `budget_s`.

    It has the shape that is timed, since another number of slots would be compiled and captured for nothing. Slow steps
    are few. An error is left to the cell's repetition, which reports it; the result is then None.
    """
    start_s = machine.now_s()
    loops: list[tuple[Repetition, float]] = []
    context, steps = RepetitionContext(machine, prompts), 1
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
        prefill_s = min((loop.prefill_s for loop, _ in loops if loop.prefill_s), default=None)
        decode_s = min(itertools.chain.from_iterable(loop.decode_s for loop, _ in loops))
        # The second loop is the first one at most of its lengths.
        later_s = min(statistics.median(loop.decode_s) for loop, _ in loops)
        new = [statistics.median(loop.decode_s[1:]) / later_s for loop, _ in loops[1:2] if len(loop.decode_s) > 1]
        new_shape_s = max(0.0, loops[0][1] - (prefill_s or 0.0) - decode_s)
        return WarmUp(cell, prefill_s, decode_s, max([1.0, *new]), new_shape_s)
    return None


def repetition(
    engine: Engine, cell: Cell, round_number: int, context: RepetitionContext, limits: Limits = UNLIMITED
) -> Repetition | Gap | None:
    """Return a repetition, a gap if it fails, or None after the deadline. Raises DeviceError if the device is lost."""
    machine, outcomes = context.machine, list[Gap | None]()

    def record(error: Exception) -> None:
        outcomes.append(None if isinstance(error, OutOfTimeError) else _gap(cell, error, machine))

    with tolerate_errors(record), torch.inference_mode(), no_gc():
        return _timed(engine, cell, round_number, context, limits)
    # Only after the handler: until then, the error holds the tensors of the step that failed.
    machine.recover(cell.name)
    return outcomes[0]


def _timed(engine: Engine, cell: Cell, round_number: int, context: RepetitionContext, limits: Limits) -> Repetition:
    """Prepare the cell and warm it up if it is new, time its loop, and add prefills as far as the limits allow."""
    machine, is_new = context.machine, cell not in context.timed
    if is_new and machine.is_cuda:
        machine.release()  # segments fragmented by smaller cells would leave no memory for a large one
    prepare = partial(engine.prepare, cell.batch_size, cell.slots)
    preparation_s = waited_s(prepare, machine.clock.synchronize, now=machine.now_s)
    most_s = min(limits.effort.warm_up_s, max(0.0, limits.hurry_s - machine.now_s()))
    warm_up_s = _warm_prefills(engine, cell, context, most_s) if is_new and cell.prompt_len else []
    # Each decode step of a growing cache is a new shape, for which a library may build a plan at its first use.
    first = run_loop(engine, cell, context, limits, counted=True) if is_new and machine.is_cuda else None
    context.timed.add(cell)
    machine.reset_peak()
    # Other processes slow down a GPU's host, not the GPU; that shows in the times themselves.
    foreign_load = None if machine.is_cuda else ForeignLoad(engine.helper_pids)
    before_j = machine.source.energy_j()
    loop = run_loop(engine, cell, context, limits)
    after_j, foreign_cores = machine.source.energy_j(), foreign_load.cores() if foreign_load else None
    times_s = [loop.prefill_s, loop.ttft_s, loop.loop_s, loop.issue_s, loop.wall_s, *loop.decode_s]
    times_s.append(preparation_s + 1.0)  # preparing may take no time
    refuse_impossible_times(seconds for seconds in times_s if seconds is not None)
    count = further_prefills(loop.prefill_s, limits, first=is_new) if loop.prefill_s else 0
    more = [_prefill(engine, cell, context) for _ in range(count)]
    refuse_impossible_times(itertools.chain.from_iterable(more))
    # Held by the profiler and the engine for other purposes than this cell.
    others_bytes = sum(other.held_bytes for other in context.engines if other is not engine)
    peak_bytes, other_bytes = machine.peak_bytes(), context.own_bytes + engine.kept_bytes + others_bytes
    return replace(
        loop,
        round=round_number,
        warm_up_s=tuple(warm_up_s),
        first_decode_s=first.decode_s if first else (),
        decode_counters=_counted(first, loop) if first else None,
        # An engine that owns its model reserves its cache and generates more tokens in a repetition than the cell has.
        peak_memory_bytes=None if engine.owned or peak_bytes is None else peak_bytes - other_bytes,
        energy_j=None if engine.owned or before_j is None or after_j is None else after_j - before_j,
        more_prefill_s=tuple(prefill_s for prefill_s, _ in more),
        more_ttft_s=tuple(ttft_s for _, ttft_s in more),
        preparation_s=preparation_s,
        device_memory_bytes=machine.used_bytes(),
        foreign_cores=foreign_cores,
    )


def _counted(first: Repetition, loop: Repetition) -> HardwareCounters | None:
    """The counters of a first loop as means over the timed one, whose steps are the same and take another time."""
    times = (first.loop_s or 0.0) / (loop.loop_s or math.inf) * len(loop.decode_s) / max(1, len(first.decode_s))
    found = first.decode_counters
    return found and HardwareCounters(times * found.sm, times * found.tensor, times * found.dram)


def run_loop(
    engine: Engine, cell: Cell, context: RepetitionContext, limits: Limits = UNLIMITED, *,
    steps: int | None = None, counted: bool = False,
) -> Repetition:  # fmt: skip
    """Run one prefill and its decode steps (or `steps` of them), with a mark after each that is read after the loop.

    The first token is fetched between the two, as a user's would be; the loop itself never waits. An engine of whole
    calls runs both in one. The GPU idles around a `counted` loop. Memory, energy and warm-up are added by `repetition`.
    """
    machine = context.machine
    decode_steps = cell.decode_steps if steps is None else steps
    prompts = context.prompts.of(cell) if cell.prompt_len else None
    engine.announce(cell, decode_steps)
    marks = _Marks(machine)
    if prompts is None:
        state = engine.fill(cell.batch_size, cell.context_len, cell.slots)
    elif engine.owned and decode_steps:
        prefill_s, steps_s = engine.times(prompts, 1 + decode_steps)
        wall_s = machine.now_s() - marks.start_s
        return Repetition(cell, 0, prefill_s, steps_s, wall_s, (), None, marks.at_unix_s, ttft_s=prefill_s)
    elif engine.whole_calls:
        tokens = engine.call(prompts.to(machine.device), 1 + decode_steps, marks.mark_token)
        if not decode_steps:
            tokens.cpu()
            marks.first_token()
        return marks.repetition(cell)
    else:
        ids = prompts.to(machine.device)
        marks.mark()
        state = engine.prefill(ids, cell.slots)
        marks.mark()
        state.token_B1.cpu()
        marks.first_token()
    machine.clock.synchronize()
    if counted and decode_steps:
        machine.source.counters()  # their interval starts here
    if decode_steps:
        marks.mark()
    marks.begin_steps()
    for step in range(decode_steps):
        state = engine.decode(state)
        marks.mark()
        if machine.now_s() > limits.deadline_s:
            raise OutOfTimeError(cell.name)
        if machine.now_s() > limits.hurry_s and step + 1 >= _LEAST_STEPS:
            break
    return marks.repetition(cell, reads_counters=counted and decode_steps > 0)


class _Marks:
    """Marks of a prefill and the steps after it, with the host's time and page faults at their ends."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.ttft_s: float | None = None
        self._marks: list[Any] = []
        machine.clock.synchronize()
        self.at_unix_s, self._faults = machine.unix_s(), page_faults()
        self.start_s = machine.now_s()

    def mark(self) -> None:
        self._marks.append(self.machine.clock.mark())

    def mark_token(self) -> None:
        """Mark a token of a whole call, whose steps begin right after its prefill."""
        self.mark()
        if len(self._marks) == 2:
            self.first_token()
            self.begin_steps()

    def first_token(self) -> None:
        """The first token is at the host."""
        self.ttft_s = self.machine.now_s() - self.start_s

    def begin_steps(self) -> None:
        """The first step begins at the last mark."""
        self._first_step = len(self._marks) - 1
        self._faults_between = page_faults()
        self._loop_start_s = self.machine.now_s()

    def repetition(self, cell: Cell, *, reads_counters: bool = False) -> Repetition:
        """Return the repetition whose last step the host has just submitted; wait until it is done."""
        issued_s = self.machine.now_s()
        self.machine.clock.synchronize()
        end_s = self.machine.now_s()
        counters = self.machine.source.counters(end_s - self._loop_start_s) if reads_counters else None
        seconds = self.machine.clock.seconds(self._marks)
        return Repetition(
            cell=cell,
            round=0,
            warm_up_s=(),
            peak_memory_bytes=None,
            at_unix_s=self.at_unix_s,
            prefill_s=None if self.ttft_s is None else seconds[0],
            ttft_s=self.ttft_s,
            decode_s=tuple(seconds[self._first_step :]),
            loop_s=end_s - self._loop_start_s,
            issue_s=issued_s - self._loop_start_s,
            wall_s=end_s - self.start_s,
            prefill_faults=self._faults_between - self._faults,
            decode_faults=page_faults() - self._faults_between,
            decode_counters=counters,
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
        return Gap(cell, "oom" if isinstance(error, NoFreeMemoryError) else "failed", str(error))
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


def _prefill(engine: Engine, cell: Cell, context: RepetitionContext) -> tuple[float, float]:
    """Return the seconds of a prefill without steps after it, and its time to first token as a user sees it."""
    prefill = run_loop(engine, cell, context, steps=0)
    return prefill.prefill_s or 0.0, prefill.ttft_s or 0.0


def _warm_prefills(engine: Engine, cell: Cell, context: RepetitionContext, most_s: float) -> list[float]:
    """Prefills of a new shape until two in a row agree, or `most_s`; the first ones pick kernels and take memory."""
    times: list[float] = []
    for _ in range(_MOST_WARM_UPS):
        times.append(_prefill(engine, cell, context)[0])
        is_steady = len(times) > 1 and abs(times[-1] / times[-2] - 1) <= _STEADY
        if is_steady or sum(times) > most_s:
            break
    return times
