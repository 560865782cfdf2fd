"""Sections that only some runs have: cold starts, padded batches, the overhead of generate."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

from profiler.facts.measurements import FirstCalls, FreshStart
from profiler.judge.engine_differences import PART_NAMES, GenerateOverhead
from profiler.judge.padding import RaggedStep
from profiler.stats import CLAIM_VISITS
from profiler.store.folder import Run
from profiler.units import duration, percent, scaled, signed_duration

_LINKS = {
    "disk": "its weights from the disk",
    "page cache": "its weights from the system's cache of the disk",
    "drawn": "its random weights drawn",
    "cached": "its weights from where the hub's are kept",
}


def cold_lines(run: Run) -> list[str]:
    """Return the cost of a fresh process, of idle time, and the number of requests after which compiling pays off."""
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
    records = run.document.after_silence
    if not records:
        return
    times = ", ".join(
        f"{item.silence_s:g} s: {duration(statistics.median(steps[0] for steps in item.steps_s))}"
        f" (n={len(item.steps_s)})"
        for item in records
    )
    yield f"the first step at {records[0].cell.name} after a silence of {times}"


def _break_even_lines(run: Run) -> Iterator[str]:
    grid = run.document.asked
    for start in run.document.fresh_starts[:1]:
        first, *others = start.engines
        for name in others:
            shape = f"{grid.cells[0].depth} + {grid.new_tokens} tokens"
            yield _break_even_line(start, first, name, shape, _saves_s(run, name))


def _saves_s(run: Run, engine: str) -> tuple[float, float]:
    """Within what an engine saves of a request lies, by its prefill and its steps in the visits; (0, 0): not known.

    A fresh process measures only one call.
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


def break_even(own: FirstCalls, prepared: FirstCalls) -> float | None:
    """Return the number of requests per process after which an engine has saved its additional start-up time.

    (preparation + first request - a later one, both less the other engine's) / what a later request saves; None where
    a later request saves nothing.
    """
    saves_s = own.second_s - prepared.second_s
    if saves_s <= 0:
        return None
    return max(0.0, (prepared.once_s - own.once_s) / saves_s)


def ragged_lines(run: Run) -> list[str]:
    """What padding, its mask and waiting take of every batch size's steps, and what other ways to batch save."""
    times_s = {result.key: result.latency_s for result in run.measured}
    steps = [step for step in run.document.ragged if step.batch_size > 1]
    return [line for step in steps for line in _lines(step, times_s[step.key])]


def _lines(step: RaggedStep, latency_s: float) -> Iterator[str]:
    word = "prefill" if step.phase == "prefill" else "decode step"
    lens = step.prompt_lens
    shape = f"{len(lens)} prompts of {min(lens)} to {max(lens)} tokens"
    useful = f"{percent(step.useful_flops / step.executed_flops)} of its FLOPs are the prompts' own"
    lost = f"padding takes {duration(step.padding_s)} of the {duration(latency_s)} {word}"
    if step.phase == "prefill":
        yield f"{shape}: {percent(step.padding)} of the positions are padding; {lost}; {useful}; {_mask_words(step)}"
    else:
        yield f"{shape}: {lost}, where it is read again; {_mask_words(step)}; {_waiting_words(step)}"
    ways = [f"{lever.change} {_saves(lever.saves_s)} ({lever.basis}: {lever.because})" for lever in step.ways]
    if ways:
        yield f"of {'a' if step.phase == 'prefill' else 'that'} {word}: {'; '.join(ways)}"


def _saves(seconds: float) -> str:
    return f"{'saves' if seconds >= 0 else 'costs'} {duration(abs(seconds))}"


def _mask_words(step: RaggedStep) -> str:
    if step.mask_s is None or step.mask_low_s is None or step.mask_high_s is None:
        return "what its mask adds is not known"
    words = (
        f"its mask {'adds' if step.mask_s >= 0 else 'saves'} {duration(abs(step.mask_s))}"
        f" ({signed_duration(step.mask_low_s)} to {signed_duration(step.mask_high_s)}) against that shape without one"
    )
    if step.mask_is_claim:
        return words
    return f"{words}, {'each visited once' if step.visits < CLAIM_VISITS else 'no more than noise'}"


def _waiting_words(step: RaggedStep) -> str:
    if not step.waiting:
        return "all write as many tokens, so that none waits for another"
    return f"sequences that have ended wait {percent(step.waiting)} of the time, {duration(step.waiting_s)} of a step"


# At most this many cells per phase have their generate overhead printed, from the smallest cell to the largest.
_MOST_CELLS = 3
_WORTH_A_WORD = 0.01
"""Share of the overhead of generate below which a part is only in run.json."""


def generate_lines(run: Run) -> list[str]:
    """Lines on the overhead of generate in some cells, with its interval and parts; the others are in run.json."""
    lines = []
    for phase in ("decode", "prefill"):
        taxes = sorted(
            (tax for tax in run.document.generate if tax.phase == phase),
            key=lambda tax: (tax.batch_size * tax.key.cell.depth, tax.batch_size),
        )
        few = min(_MOST_CELLS, len(taxes))
        chosen = [taxes[number * (len(taxes) - 1) // max(1, few - 1)] for number in range(few)]
        lines += [_line(tax, run.document.software.get("transformers", "")) for tax in chosen]
    return lines


def _line(tax: GenerateOverhead, installed: str) -> str:
    step = "step" if tax.phase == "decode" else "prefill"
    version = tax.transformers or installed
    words = (
        f"transformers {version}'s generate adds {duration(tax.tax_s)}"
        f" ({duration(tax.low_s)} to {duration(tax.high_s)}) to our {step} of {duration(tax.own_s)}"
        f" at {tax.key.cell.batch_size} x {tax.key.cell.depth}, {percent(tax.tax_s / tax.own_s)}"
    )
    if not tax.is_claim:
        once = tax.visits < CLAIM_VISITS
        return f"{words}: {'each was visited once, which is no claim' if once else 'no more than noise'}"
    return f"{words}{': ' if tax.parts_s else ''}{'; '.join(_parts(tax))}"


def _parts(tax: GenerateOverhead) -> Iterator[str]:
    if tax.parts_s:
        ranked = sorted(tax.parts_s.items(), key=lambda item: -item[1])
        parts = [item for item in ranked if abs(item[1]) >= _WORTH_A_WORD * abs(tax.tax_s)]
        yield ", ".join(
            f"{PART_NAMES[name]} {duration(part_s)} ({percent(part_s / tax.tax_s)})" for name, part_s in parts
        )
    if tax.reads_a_token is not None:
        yield f"the host reads {tax.reads_a_token:g} value{'' if tax.reads_a_token == 1 else 's'} a token"
    if tax.streamer_s is not None:
        yield f"a streamer would add {duration(tax.streamer_s)}"
