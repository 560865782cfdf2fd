"""A plain loop compared with ours in this process; a shape twice; the breakdown; forecasts by batch."""

import statistics
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from profiler.engines.transformers import EagerEngine
from profiler.errors import RequestError
from profiler.facts.operators import REST
from profiler.facts.repetitions import Gap, Repetition
from profiler.forecast.command import forecast_run
from profiler.forecast.options import ForecastRequest
from profiler.grid.cells import Cell
from profiler.loading.prompts import Prompts
from profiler.measure.sweep import RepetitionContext, repetition, warm_up
from profiler.store.folder import Run

from .bench import Attempt, Bench, Check, NotRunError, facts_of, main_run, within

_INTERLEAVED = 10
_PROMPT, _NEW_TOKENS = 64, 24
_FRESH_PROMPT = 160
"""A length that no other check uses: kernels, plans and memory of its shapes are new."""


def attempts(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("ours / a plain loop", _plain_loop, cuda=False)
    yield Attempt("a shape twice in a row", _new_shape)
    yield Attempt("the time breakdown of the main run", _breakdown, least_s=60.0, cuda=False)
    yield Attempt("forecasts grow with the batch", _forecasts, least_s=60.0, cuda=False)


def _eager(bench: Bench) -> tuple[Any, EagerEngine, RepetitionContext]:
    model = bench.load(bench.small)
    return model, EagerEngine(model, bench.machine), RepetitionContext(bench.machine, Prompts(model.config.vocab_size))


def _plain_loop(bench: Bench) -> Iterator[Check]:
    (model, engine, _), cell = bench.once(_eager), Cell(1, _PROMPT, _NEW_TOKENS)
    vocab = model.config.vocab_size
    warm_up(engine, cell, bench.machine, prompts=Prompts(vocab), budget_s=3.0)
    ids = Prompts(vocab).of(cell).to(bench.device)
    ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
    for turn in range(_INTERLEAVED):
        repetition = _repetition(bench, cell, turn)
        prefills_s, steps_s = _loop(bench, model, ids)
        ratios["prefill"].append(statistics.median(repetition.prefills_s) / statistics.median(prefills_s))
        ratios["decode"].append(statistics.median(repetition.decode_s[1:]) / statistics.median(steps_s[1:]))
    for phase, found in ratios.items():
        yield within(f"{phase}: ours / a plain loop", statistics.median(found), 0.02 if bench.cuda else 0.5)


def _repetition(bench: Bench, cell: Cell, turn: int) -> Repetition:
    _, engine, at = bench.once(_eager)
    timed = repetition(engine, cell, turn, at)
    if isinstance(timed, Gap):
        raise RuntimeError(timed.reason)
    return timed


def _loop(bench: Bench, model: Any, ids: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return the seconds of three prefills and of the decode steps after the last, with only our marks."""
    clock = bench.machine.clock
    prefills_s: list[float] = []
    with torch.inference_mode():
        for _ in range(3):
            # Each is timed separately, like ours: otherwise the next one's launches would hide the last kernels.
            clock.synchronize()
            marks = [clock.mark()]
            output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
            token = output.logits[:, -1:].argmax(-1)
            marks.append(clock.mark())
            clock.synchronize()
            prefills_s += clock.seconds(marks)
        marks = [clock.mark()]
        for _ in range(_NEW_TOKENS - 1):
            output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
            token = output.logits[:, -1:].argmax(-1)
            marks.append(clock.mark())
        clock.synchronize()
    return prefills_s, clock.seconds(marks)


def _new_shape(bench: Bench) -> Iterator[Check]:
    """A library that plans for each new length (cuDNN's attention) pays in the first loop; a repetition must not."""
    cell = Cell(1, _FRESH_PROMPT, _NEW_TOKENS)
    first_s, second_s = (statistics.median(_repetition(bench, cell, turn).decode_s[1:]) for turn in range(2))
    yield within("a repetition of a new shape: first / second", first_s / second_s, 0.05)


def _breakdown(bench: Bench) -> Iterator[Check]:
    run = bench.once(main_run)
    cells = run.cells[run.cells["status"] == "ok"]
    yield _unexplained(bench, run)
    decode = cells[cells["phase"] == "decode"]
    joules = decode["joules_per_token"].dropna()
    passed = bool((joules > 0).all()) if bench.cuda and len(joules) else None
    why = "" if passed is not None else "no energy counter, or no repetition long enough for it"
    yield Check("joules a token", passed, joules.round(4).tolist(), "> 0", why)
    cost = (run.document.engine.instrument_s_per_step or 0.0) / decode["latency_s"].min()
    yield Check("instrument / fastest step", cost < 0.005, cost, "< 0.5 %")


def _unexplained(bench: Bench, run: Run) -> Check:
    """Judge the rest of steps of which all kernels were replayed.

    Without a replay of its small kernels, a step's redundant work is its counted bytes at the memory's ceiling. That is
    an upper bound: on an L4, 48 MiB of L2 pass intermediates of 15 MiB from one kernel to the next.
    """
    facts, cells = facts_of(run), run.cells.set_index(["phase", "batch_size", "prompt_len"])
    shares = (cells["unexplained_s"] / cells["latency_s"])[cells["status"] == "ok"]
    replayed = [
        (key.phase, key.cell.batch_size, key.cell.prompt_len)
        for key in facts.measured
        if REST in facts.replays.get(key, {})
    ]
    name = "cells with under 15 % unexplained"
    if not replayed:
        why = "the run's time ended before it replayed the small kernels of a step"
        return Check(name, None, shares.tolist(), why=why)
    share = float((shares.loc[replayed].abs() < 0.15).mean())
    value = {"share": share, "replayed": replayed, "unexplained": shares.tolist()}
    return bench.on_a_card(name, share >= 0.8, value, ">= 0.8")


def _forecasts(bench: Bench) -> Iterator[Check]:
    """No step of more sequences may be forecast as faster, whatever disturbed the overhead model of a batch without a
    cell."""
    try:
        cells = forecast_run(bench.once(main_run).folder, ForecastRequest(batch_sizes="1,2,4,8,16")).cells
    except RequestError as error:
        raise NotRunError(str(error)) from error
    ends_s: dict[str, list[tuple[float, float]]] = {}
    for cell in sorted(cells, key=lambda cell: cell.batch_size):
        ends_s.setdefault(f"{cell.phase} {cell.prompt_len}", []).append((cell.low_s, cell.high_s))
    grow = all(after[1] >= before[0] for of_shape in ends_s.values() for before, after in pairwise(of_shape))
    yield Check("forecasts grow with the batch", grow, ends_s, "no interval is below that of fewer sequences")
