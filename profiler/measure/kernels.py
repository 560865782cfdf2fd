"""Replays of a step's operators, each timed by itself at the shapes of a cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from profiler.counting.operators import Linear, ModelWork
from profiler.counting.walk import LinearKey, linear_key, linear_modules
from profiler.errors import RequestError, tolerate_errors
from profiler.facts.measurements import Replay, Replays
from profiler.facts.operators import REST
from profiler.facts.roofs import Ceilings
from profiler.facts.step import ExecutionPath, Step
from profiler.grid.cells import Cell, CellKey
from profiler.loading.request import ModelRequest
from profiler.measure.captured_calls import answered, callable_modules, caught_calls, step_of
from profiler.measure.replay import replay_calls, replay_linears
from profiler.measure.subject import Subject
from profiler.quant.conversions import conversion_calls
from profiler.quant.storage import model_storage_bytes
from profiler.stats import timing_of

# Attention and experts get this share of the time, all linears the rest.
_CALLS_SHARE = 0.3
# Kernels that only convert are few, and are run inside the linears as well.
_CONVERSIONS_SHARE = 0.3
# As long as a card's power is averaged over before its cap lowers the clock, and some more.
LOAD_S = 1.0
# The least time of a replay in steps, by whether it is captured: a graph of all layers is run five times; otherwise one
# layer's linears twice, and of the calls the whole step once to catch them, and its small kernels twice.
_LINEAR_STEPS = {True: 5.0, False: 0.3}
_CALL_STEPS = {True: 5.0, False: 3.0}
# No more of them, whatever the host's clock says.
_MOST_PREFILLS = 1000
# What holds several up in turn for seconds (a neighbour) is in one turn of them and not in the others.
_TURNS = 3
# Caches that differ by less of the weights' bytes leave about as much of them where they were.
_TOLD_APART = 0.25


@dataclass(frozen=True)
class Linears:
    """The linears of a model that can be called alone, each with its modules, one a layer."""

    operators: dict[LinearKey, Linear]
    modules: dict[LinearKey, list[nn.Module]]


def replayable_linears(work: ModelWork, modules: dict[LinearKey, list[nn.Module]]) -> Linears:
    """The modules that the walk counted."""
    operators = {linear_key(op): op for op in work.operators if isinstance(op, Linear) and linear_key(op) in modules}
    return Linears(operators, {key: modules[key] for key in operators})


def replay_kernels(
    subject: Subject,
    cells: Sequence[Cell],
    ceilings: Ceilings,
    budget_s: float,
    on_failure: Callable[[Exception], object] = lambda error: None,
    steps_s: Mapping[CellKey, float] | None = None,
) -> Iterator[Replays]:
    """Each linear, attention core and bank of experts of each cell run alone, shape by shape.

    Of a linear that converts between formats, those kernels are run on their own as well. Cells whose linears see the
    same rows, and find as much of their weights in a cache, share their replay. `budget_s` is for all of them: by the
    seconds of its step in `steps_s`, a replay that takes longer than what is left is left out. What fails is left out,
    after a call of `on_failure`. Raises DeviceError where the device is lost.
    """
    linears = replayable_linears(subject.work, linear_modules(subject.loaded.module))
    shapes = _alike(subject, linears, [key for cell in cells for key in cell.keys], ceilings)
    machine, steps_s = subject.machine, steps_s or {}
    end_s = machine.now_s() + budget_s

    def has_time(key: CellKey, steps: float) -> bool:
        return key not in steps_s or machine.now_s() + steps * steps_s[key] <= end_s

    for users in (users for users in shapes.values() if has_time(users[0], _LINEAR_STEPS[machine.captures])):
        share_s = budget_s * (1 - _CALLS_SHARE) / len(shapes)
        of_linears = partial(_linears_under_load, subject, linears, users[0], ceilings, share_s)
        yield Replays(tuple(users), _tolerated(of_linears, subject, on_failure))
    keys = [key for users in shapes.values() for key in users]
    for key in (key for key in keys if has_time(key, _CALL_STEPS[machine.captures])):
        of_calls = partial(replay_single_calls, subject, key, ceilings, budget_s * _CALLS_SHARE / len(keys))
        yield Replays((key,), _tolerated(of_calls, subject, on_failure))


def _linears_under_load(
    subject: Subject, linears: Linears, key: CellKey, ceilings: Ceilings, budget_s: float
) -> Iterator[Replay]:
    """Every linear of a cell's step, on a card after some time of the cell's own prefills."""
    if subject.machine.captures and key.phase == "prefill":
        _run_prefills(subject, key, min(LOAD_S, budget_s / 2))
    yield from _linears_alone(subject, linears, key, ceilings, budget_s)


def _tolerated(
    measure: Callable[[], Iterator[Replay]], subject: Subject, on_failure: Callable[[Exception], object]
) -> tuple[Replay, ...]:
    """The replays that `measure` gives until it fails."""
    found: list[Replay] = []
    failures: list[Exception] = []
    with tolerate_errors(failures.append):
        found.extend(measure())
    for error in failures:
        on_failure(error)
    return tuple(found)


def replay_between(
    subjects: Sequence[Subject], keys: Sequence[CellKey], ceilings: Ceilings, budget_s: float
) -> Iterator[tuple[Replays, ...]]:
    """The linears of steps that no cell takes (`keys_between`, a rank's), fewest rows first, as far as `budget_s`
    reaches: those of each of `subjects` in turn, which are one model on one machine, whole or a rank's share of it.

    A library may change its kernel between two cells: oneDNN's AMX products of SmolLM2-135M take three times as long
    over 1024 rows as over 256 in one width, and not in the next.
    """
    first, machine = subjects[0], subjects[0].machine
    each = [replayable_linears(subject.work, linear_modules(subject.loaded.module)) for subject in subjects]
    shapes = sorted(_alike(first, each[0], keys, ceilings).values(), key=lambda users: users[0].tokens)
    end_s, pass_s = machine.now_s() + budget_s, 0.0
    for index, users in enumerate(shapes):
        left_s = end_s - machine.now_s()
        # Twice the rows take at most about twice as long.
        if left_s < 2 * pass_s:
            break
        shape_s, turns = left_s / (len(shapes) - index), 1 if len(subjects) == 1 else _TURNS
        until_s, share_s = machine.now_s() + shape_s, shape_s / turns / len(subjects)
        found: list[list[Replay]] | None = None
        for _ in range(turns):
            if found is not None and machine.now_s() + pass_s > until_s:
                break
            now = [
                list(_linears_alone(subject, own, users[0], ceilings, share_s))
                for subject, own in zip(subjects, each, strict=True)
            ]
            pass_s = sum(map(_pass_s, each, now))
            found = now if found is None else [[*map(_together, *both)] for both in zip(found, now, strict=True)]
        assert found is not None
        yield tuple(Replays(tuple(users), tuple(replays)) for replays in found)


def _pass_s(linears: Linears, replays: Sequence[Replay]) -> float:
    """Seconds of each call once."""
    calls = map(len, linears.modules.values())
    return sum(count * replay.whole.median_s for count, replay in zip(calls, replays, strict=True))


def _together(one: Replay, other: Replay) -> Replay:
    """The samples of two turns."""
    return replace(
        one,
        seconds=one.seconds + other.seconds,
        conversion_seconds=one.conversion_seconds + other.conversion_seconds,
    )


def _alike(
    subject: Subject, linears: Linears, keys: Sequence[CellKey], ceilings: Ceilings
) -> dict[tuple[int, ...], list[CellKey]]:
    """Keys by what their linears are given: rows, sequences, and last the bytes that are touched between them."""
    shapes: dict[tuple[int, ...], list[CellKey]] = {}
    for key in keys:
        rows = rows_of(linears, Step.of(key), subject.path_of(key))
        shape = (*rows.values(), key.cell.batch_size, _between_bytes(subject, key, ceilings))
        shapes.setdefault(shape, []).append(key)
    return shapes


def _between_bytes(subject: Subject, key: CellKey, ceilings: Ceilings) -> int:
    """Bytes of the KV cache, old and copied, that a decode step on a CPU touches between its linears, to the nearest
    `_TOLD_APART` of the model's weights: they push out of a cache what it would keep of those weights from step to
    step. No more than what leaves none of them there."""
    if subject.machine.captures:
        return 0
    least = _TOLD_APART * model_storage_bytes(subject.loaded.module)
    return int(min(round(subject.touched_cache_bytes(key) / least) * least, ceilings.past_caches_bytes))


def rows_of(linears: Linears, step: Step, path: ExecutionPath) -> dict[LinearKey, int]:
    """Rows that each linear is really given in a step of plain numbers."""
    return {key: int(op.executed(step, path)) for key, op in linears.operators.items()}


def replay_single_calls(subject: Subject, key: CellKey, ceilings: Ceilings, budget_s: float) -> Iterator[Replay]:
    """Attention and experts of a cell's step, called again as that step calls them.

    A step whose cache only a prefill can fill is not replayed.
    """
    machine, step, page_fault_s = subject.machine, Step.of(key), ceilings.page_fault_s
    modules = callable_modules(subject.loaded.module, subject.work, machine.available_bytes(), step)
    try:
        ready = step_of(subject, key)
    except RequestError:
        return
    calls = caught_calls(modules, ready) if modules else {}
    times = replay_calls(
        calls, machine, budget_s=budget_s, cold_bytes=cold_bytes_of(subject), page_fault_s=page_fault_s
    )
    for operator, seconds in times.items():
        yield Replay(subject.names[operator], seconds, without_faults=page_fault_s > 0)
    # On a CPU those of a decode step are next to nothing beside their dispatch.
    eager = key.phase in subject.engines[key.cell.engine].eager_phases
    if eager and (machine.captures or key.phase == "prefill"):
        with answered(subject.loaded.module, modules):
            if seconds := replay_small(subject, key, page_fault_s, budget_s):
                yield Replay(REST, seconds, without_faults=page_fault_s > 0)


def replay_small(subject: Subject, key: CellKey, page_fault_s: float, budget_s: float) -> tuple[float, ...]:
    """A step whose linears, attention and experts are answered: captured, or less the same prefill of one token, which
    is its dispatch (CPU)."""
    machine, small = subject.machine, step_of(subject, key)
    if machine.captures:
        calls, cold_bytes = {REST: [small]}, cold_bytes_of(subject)
        return replay_calls(calls, machine, budget_s=budget_s, cold_bytes=cold_bytes).get(REST, ())
    one = step_of(subject, CellKey(key.phase, replace(key.cell, batch_size=1, prompt_len=1)))
    times = replay_calls({REST: [small], "one token": [one]}, machine, budget_s=budget_s, page_fault_s=page_fault_s)
    dispatch_s = timing_of(times["one token"]).median_s
    return tuple(max(0.0, seconds - dispatch_s) for seconds in times[REST])


def cold_bytes_of(subject: Subject) -> int:
    """Bytes that push out of the last-level cache what a step would not find there; 0 where it holds the model."""
    cache_bytes = subject.machine.info.last_level_cache_bytes
    return 2 * cache_bytes if model_storage_bytes(subject.loaded.module) > cache_bytes else 0


def _linears_alone(
    subject: Subject, linears: Linears, key: CellKey, ceilings: Ceilings, budget_s: float
) -> Iterator[Replay]:
    """Every linear over the rows that a cell's step gives it."""
    machine, request = subject.machine, subject.request
    rows = rows_of(linears, Step.of(key), subject.path_of(key))
    last = key.cell.batch_size
    sliced = [name for name, op in linears.operators.items() if op.rows == "last" and rows[name] == last != key.tokens]
    converting = conversions(linears, rows, request)
    conversions_s = budget_s * _CONVERSIONS_SHARE if converting else 0.0
    cold_bytes, page_fault_s = cold_bytes_of(subject), ceilings.page_fault_s
    times = replay_linears(
        linears.modules,
        rows,
        machine,
        dtype=request.dtype,
        budget_s=budget_s - conversions_s,
        sliced=sliced,
        cold_bytes=cold_bytes,
        between_bytes=_between_bytes(subject, key, ceilings),
        page_fault_s=page_fault_s,
    )
    converted = replay_calls(
        converting, machine, budget_s=conversions_s, cold_bytes=cold_bytes, page_fault_s=page_fault_s
    )
    for name, seconds in times.items():
        operator = subject.names[linears.operators[name]]
        yield Replay(operator, seconds, converted.get(name, ()), without_faults=page_fault_s > 0)


def _run_prefills(subject: Subject, key: CellKey, seconds: float) -> None:
    """Run a cell's prefill for some time: a card at its power cap clocks lower under load than after a pause."""
    machine, run = subject.machine, step_of(subject, key)
    end_s = machine.now_s() + seconds
    with torch.inference_mode():
        for _ in range(_MOST_PREFILLS):
            if machine.now_s() >= end_s:
                break
            run()
            machine.clock.synchronize()


def conversions(
    linears: Linears, rows: Mapping[LinearKey, int], request: ModelRequest
) -> dict[LinearKey, list[Callable[[], object]]]:
    """What each linear runs to convert between formats, one call a layer; those that convert nothing are left out."""
    found: dict[LinearKey, list[Callable[[], object]]] = {}
    for key, modules in linears.modules.items():
        if calls := conversion_calls(modules, rows[key], request.dtype):
            found[key] = calls
    return found


def keys_between(keys: Collection[CellKey]) -> tuple[CellKey, ...]:
    """Steps that fill the gaps between the rows (tokens) of `keys`: each number doubled until it comes near the next.

    Fewer rows than any prompt has are a decode step of so many sequences, more are one prompt; each engine gets its
    own.
    """
    prompts = [key.tokens for key in keys if key.phase == "prefill"]
    shortest = min(prompts, default=math.inf)
    least: dict[str, Cell] = {}
    for key in keys:
        least[key.cell.engine] = min(key.cell, least.get(key.cell.engine, key.cell))
    found = []
    for rows in _doubled(sorted({key.tokens for key in keys})):
        for cell in least.values():
            if rows < shortest:
                found.append(CellKey("decode", replace(cell, batch_size=rows)))
            else:
                found.append(CellKey("prefill", replace(cell, batch_size=1, prompt_len=rows, context_len=0)))
    return tuple(found)


def _doubled(ascending: list[int]) -> Iterator[int]:
    for below, above in pairwise(ascending):
        rows = 2 * below
        while rows * math.sqrt(2) <= above:
            yield rows
            rows *= 2
