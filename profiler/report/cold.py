"""A fresh process and a step after silence, in sentences."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

from profiler.diagnosis.cold import break_even
from profiler.diagnosis.facts import FreshStart
from profiler.record.run import Run
from profiler.timing.sampling import CLAIM_VISITS
from profiler.units import duration, scaled

_LINKS = {
    "disk": "its weights from the disk",
    "page cache": "its weights from the system's cache of the disk",
    "drawn": "its random weights drawn",
    "cached": "its weights from where the hub's are kept",
}


def cold_lines(run: Run) -> list[str]:
    """What a fresh process takes, what silence costs, and from how many requests on compiling pays."""
    return [*_start_lines(run), *_silence_lines(run), *_break_even_lines(run)]


def _start_lines(run: Run) -> Iterator[str]:
    for start in run.document.fresh_starts:
        rate = scaled(start.load_bytes / start.load_s, "B/s")
        calls = "; ".join(
            f"{name}: {_prepared(calls.preparation_s)}the first answer after {duration(calls.first_s)}, the next after"
            f" {duration(calls.second_s)}"
            for name, calls in start.engines.items()
        )
        yield (
            f"a fresh process: imports {duration(start.launch_s)}, {_LINKS[start.link]} {duration(start.load_s)}"
            f" ({rate}); {calls}"
        )


def _prepared(preparation_s: float) -> str:
    return f"prepared in {duration(preparation_s)}, " if preparation_s >= 0.01 else ""


def _silence_lines(run: Run) -> Iterator[str]:
    found = run.document.after_silence
    if not found:
        return
    told = ", ".join(
        f"{item.silence_s:g} s: {duration(statistics.median(steps[0] for steps in item.steps_s))}"
        f" (n={len(item.steps_s)})"
        for item in found
    )
    yield f"the first step at {found[0].cell.name} after a silence of {told}"


def _break_even_lines(run: Run) -> Iterator[str]:
    grid = run.document.asked
    for start in run.document.fresh_starts[:1]:
        first, *others = start.engines
        for name in others:
            shape = f"{grid.cells[0].depth} + {grid.new_tokens} tokens"
            yield _break_even_line(start, first, name, shape, _saves_s(run, name))


def _saves_s(run: Run, engine: str) -> tuple[float, float]:
    """Within what an engine saves of a request lies, by its prefill and its steps in the visits; (0, 0): not known.

    A fresh process tells of one call alone.
    """
    cell = replace(run.document.asked.cells[0], engine=engine)
    of_cell = [item for item in run.document.engine.differences if item.key.cell == cell]
    if any(item.visits < CLAIM_VISITS for item in of_cell):
        return 0.0, 0.0
    times = {"prefill": 1, "decode": cell.decode_steps}
    return sum(times[item.phase] * item.low_s for item in of_cell), sum(
        times[item.phase] * item.high_s for item in of_cell
    )


def _break_even_line(start: FreshStart, first: str, name: str, shape: str, saves_s: tuple[float, float]) -> str:
    calls, own = start.engines[name], start.engines[first]
    once_s = calls.preparation_s + calls.first_s - calls.second_s
    seen_s = own.second_s - calls.second_s
    if not all(seen_s * bound_s > 0 for bound_s in saves_s):
        return (
            f"{name} takes {duration(once_s)} once; from how many requests of {shape} it pays cannot be told: its"
            f" answers differ from {first}'s by no more than noise here"
        )
    requests = break_even(own, calls)
    if requests is None:
        return f"{name} saves nothing a request of {shape} against {first}: it loses at any rate"
    return (
        f"below {requests:.0f} requests of {shape} an hour the engine {name} loses in a process that lives for one: it"
        f" takes {duration(once_s)} once and saves {duration(own.second_s - calls.second_s)} a request against {first}"
    )
