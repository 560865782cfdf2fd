"""The sweep: every cell visited in interleaved rounds, until its interval is narrow or the time is spent."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from profiler.clock import Clock
from profiler.grid import Cell, Grid
from profiler.memory import peak_bytes, reset_peak
from profiler.timing.engines import Engine
from profiler.timing.outcomes import Gap, Visit
from profiler.timing.sampling import estimate

_SEED = 0
_LEAST_ROUNDS = 2
_MOST_ROUNDS = 30
_STEADY = 0.05
_MOST_WARM_UPS = 4
_WARM_UP_S = 1.0


@dataclass(frozen=True)
class Progress:
    """Where the sweep is."""

    cell: Cell
    round: int
    elapsed_s: float
    left_s: float
    """Expected seconds to the end, from the visits so far; never more than the budget allows."""
    visits: int


@dataclass(frozen=True)
class Plan:
    """What to sweep, and when it is enough."""

    grid: Grid
    budget_s: float
    half_width: float = 0.02
    """Target half-width of the 95 % interval, as a share of the median."""
    expected_s: Mapping[Cell, float] = field(default_factory=dict)
    """Expected seconds a visit, used for the time left until a cell has been seen."""


@dataclass
class _Seen:
    """What is known of a cell so far."""

    visits: list[Visit] = field(default_factory=list)
    gap: Gap | None = None

    def narrow(self, half_width: float) -> bool:
        if len(self.visits) < _LEAST_ROUNDS:
            return False
        prefill = estimate([[visit.prefill_s] for visit in self.visits])
        decode = estimate([steady(visit.decode_s) for visit in self.visits])
        return max(prefill.half_width, decode.half_width) <= half_width


def steady(decode_s: tuple[float, ...]) -> tuple[float, ...]:
    """The decode steps after the first one."""
    return decode_s[1:]


def sweep(
    engine: Engine,
    plan: Plan,
    *,
    device: torch.device,
    clock: Clock,
    vocab_size: int,
    fits: Callable[[Cell], str | None] = lambda cell: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    energy_j: Callable[[], float | None] = lambda: None,
    earlier: Iterable[Visit | Gap] = (),
) -> Iterator[Visit | Gap]:
    """Visit the cells and yield each visit, and each cell that has no number, as it ends.

    The first round goes from small to large, so that a cell that does not fit is met before larger ones, and is
    always finished; later rounds are shuffled (seeded), visit only cells whose interval is still wide, and stop at
    the budget. `fits` gives the reason why a cell cannot fit, or None; `energy_j` reads a counter of joules.
    `earlier` are the outcomes of an interrupted sweep: its cells are known, and the first round visits only the others.
    """
    seen = {cell: _Seen() for cell in plan.grid.cells}
    for outcome in earlier:
        if isinstance(outcome, Gap):
            seen[outcome.cell].gap = outcome
        else:
            seen[outcome.cell].visits.append(outcome)
    shuffle = random.Random(_SEED)
    start = time.perf_counter()
    durations: dict[Cell, float] = {}
    visits = 0
    for round_number in range(_MOST_ROUNDS):
        open_cells = [cell for cell, state in seen.items() if state.gap is None and not state.narrow(plan.half_width)]
        if round_number == 0:
            open_cells = [cell for cell in open_cells if not seen[cell].visits]
        elif not open_cells:
            return
        else:
            shuffle.shuffle(open_cells)
        visits_before = visits
        for position, cell in enumerate(open_cells):
            elapsed_s = time.perf_counter() - start
            cost_s = _cost(cell, plan, durations)
            if round_number >= _LEAST_ROUNDS and elapsed_s + cost_s > plan.budget_s:
                continue
            if round_number > 0 and elapsed_s > plan.budget_s:
                return
            left_s = _left_s(open_cells[position:], round_number, elapsed_s, plan, durations)
            on_progress(Progress(cell, round_number, elapsed_s, left_s, visits))
            state = seen[cell]
            reason = _larger_than_failed(cell, seen) or (fits(cell) if round_number == 0 else None)
            if reason:
                state.gap = Gap(cell, "skipped", reason)
                yield state.gap
                continue
            before_s = time.perf_counter()
            energy_before_j = energy_j()
            outcome = _visit_safely(engine, cell, round_number, plan.grid, device, clock, vocab_size)
            outcome = _with_energy(outcome, energy_before_j, energy_j())
            durations[cell] = time.perf_counter() - before_s
            visits += 1
            if isinstance(outcome, Gap):
                state.gap = outcome
            else:
                state.visits.append(outcome)
            yield outcome
        if visits == visits_before and round_number > 0:
            return


def warm_up(
    engine: Engine, cell: Cell, *, device: torch.device, clock: Clock, vocab_size: int, budget_s: float
) -> None:
    """Run a small cell until its steps are stationary: three loops in a row within 5 %, or `budget_s`."""
    deadline = time.perf_counter() + budget_s
    recent: list[float] = []
    with torch.inference_mode(), _no_gc():
        while time.perf_counter() < deadline:
            _prefill_s, decode_s, _state = _run(engine, seeded_prompts(cell, vocab_size, device), 8, clock)
            recent = [*recent[-2:], sorted(decode_s)[len(decode_s) // 2]]
            if len(recent) == 3 and max(recent) <= (1 + _STEADY) * min(recent):
                return


def _visit_safely(
    engine: Engine, cell: Cell, round_number: int, grid: Grid, device: torch.device, clock: Clock, vocab_size: int
) -> Visit | Gap:
    try:
        with torch.inference_mode(), _no_gc():
            return _visit(engine, cell, round_number, grid, device, clock, vocab_size)
    except torch.OutOfMemoryError as error:
        return _out_of_memory(cell, device, error)
    except RuntimeError as error:
        if "not enough memory" in str(error) or "out of memory" in str(error).lower():
            return _out_of_memory(cell, device, error)
        return Gap(cell, "failed", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")


def _with_energy(outcome: Visit | Gap, before_j: float | None, after_j: float | None) -> Visit | Gap:
    if isinstance(outcome, Gap) or before_j is None or after_j is None:
        return outcome
    return replace(outcome, energy_j=after_j - before_j)


def _visit(
    engine: Engine, cell: Cell, round_number: int, grid: Grid, device: torch.device, clock: Clock, vocab_size: int
) -> Visit:
    prompts = seeded_prompts(cell, vocab_size, device)
    warm_ups: list[float] = []
    if round_number == 0:
        warm_ups = _warm_prefill(engine, prompts, clock)
    reset_peak(device)
    at_unix_s = time.time()
    clock.synchronize()
    before_ns = time.perf_counter_ns()
    prefill_s, decode_s, state = _run(engine, prompts, grid.decode_steps, clock)
    wall_s = (time.perf_counter_ns() - before_ns) * 1e-9
    del state
    return Visit(
        cell=cell,
        round=round_number,
        prefill_s=prefill_s,
        decode_s=tuple(decode_s),
        wall_s=wall_s,
        warm_up_s=tuple(warm_ups),
        peak_memory_bytes=peak_bytes(device),
        at_unix_s=at_unix_s,
    )


def _run(engine: Engine, prompts: torch.Tensor, steps: int, clock: Clock) -> tuple[float, list[float], object]:
    """One prefill and `steps` decode steps with a mark after each; nothing is read before the end."""
    marks = [clock.mark()]
    state = engine.prefill(prompts)
    marks.append(clock.mark())
    for _ in range(steps):
        state = engine.decode(state)
        marks.append(clock.mark())
    clock.synchronize()
    prefill_s, *decode_s = clock.seconds(marks)
    return prefill_s, decode_s, state


def _warm_prefill(engine: Engine, prompts: torch.Tensor, clock: Clock) -> list[float]:
    """Prefills of a shape that is new until two in a row agree: kernels are picked and memory is taken once."""
    times: list[float] = []
    while len(times) < _MOST_WARM_UPS and sum(times) < _WARM_UP_S:
        clock.synchronize()
        marks = [clock.mark()]
        engine.prefill(prompts)
        marks.append(clock.mark())
        clock.synchronize()
        times += clock.seconds(marks)
        if len(times) > 1 and abs(times[-1] / times[-2] - 1) <= _STEADY:
            break
    return times


def seeded_prompts(cell: Cell, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Random token ids [batch, prompt], the same for the same cell: as long as asked, with no tokenizer involved."""
    generator = torch.Generator().manual_seed(_SEED + 1_000_003 * cell.batch_size + cell.prompt_len)
    ids = torch.randint(0, vocab_size, (cell.batch_size, cell.prompt_len), generator=generator)
    return ids.to(device)


def _out_of_memory(cell: Cell, device: torch.device, error: Exception) -> Gap:
    del error
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Gap(cell, "oom", "out of memory")


def _larger_than_failed(cell: Cell, seen: Mapping[Cell, _Seen]) -> str | None:
    for other, state in seen.items():
        if (
            state.gap is not None
            and state.gap.status == "oom"
            and cell != other
            and cell.batch_size >= other.batch_size
            and cell.prompt_len >= other.prompt_len
        ):
            return f"larger than batch {other.batch_size} x prompt {other.prompt_len}, which ran out of memory"
    return None


def _cost(cell: Cell, plan: Plan, durations: Mapping[Cell, float]) -> float:
    """Expected seconds of a visit: the last one's, else the plan's figure scaled by what visits cost so far."""
    if cell in durations:
        return durations[cell]
    known = [other for other in durations if plan.expected_s.get(other)]
    scale = sum(durations[c] for c in known) / sum(plan.expected_s[c] for c in known) if known else 1.0
    return scale * plan.expected_s.get(cell, 0.0)


def _left_s(
    rest: list[Cell], round_number: int, elapsed_s: float, plan: Plan, durations: Mapping[Cell, float]
) -> float:
    this_round_s = sum(_cost(cell, plan, durations) for cell in rest)
    if round_number == 0:
        # A first visit warms its shape up as well; the rounds behind it run to the budget or end early.
        return max(this_round_s, plan.budget_s - elapsed_s)
    return max(0.0, plan.budget_s - elapsed_s)


@contextmanager
def _no_gc() -> Iterator[None]:
    """Python's collector may stop a step for milliseconds; it runs between visits instead."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
