"""What only some runs have: unequal prompts, ranks and forecasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from profiler.counting.floor import TIGHT
from profiler.judge.padding import RaggedStep
from profiler.predict.result import BETWEEN_CELLS, Answer, ForecastCell, ForecastError
from profiler.report.blocks import FULL, HTML, Lines, Picture, Section, TextTable, evenly, text_table
from profiler.stats import CLAIM_VISITS
from profiler.store.folder import Run
from profiler.store.forecasts import read_forecast
from profiler.units import duration, percent, scaled, signed_duration, significant


def ragged(run: Run) -> Section:
    """The time that padding, its mask and waiting take at each batch size."""
    times_s = {result.key: result.latency_s for result in run.measured}
    steps = [step for step in run.document.ragged if step.batch_size > 1]
    lines = [line for step in steps for line in _ragged_step_lines(step, times_s[step.key])]
    note = "measured with padding and a mask, and the same shape without"
    return Section("Prompts of unequal lengths", [Lines(lines)], note)


def _ragged_step_lines(step: RaggedStep, latency_s: float) -> Iterator[str]:
    is_prefill, lens = step.phase == "prefill", step.prompt_lens
    word = "prefill" if is_prefill else "decode step"
    shape = f"{len(lens)} prompts of {min(lens)} to {max(lens)} tokens"
    lost = f"padding takes {duration(step.padding_s)} of the {duration(latency_s)} {word}"
    if is_prefill:
        useful = f"{percent(step.useful_flops / step.executed_flops)} of its FLOPs are the prompts' own"
        yield f"{shape}: {percent(step.padding)} of the positions are padding; {lost}; {useful}; {_mask(step)}"
    else:
        waiting = "all sequences write the same number of tokens, so none waits for another"
        if step.waiting:
            share = percent(step.waiting)
            waiting = f"sequences that have ended wait {share} of the time, {duration(step.waiting_s)} of each step"
        yield f"{shape}: {lost}, which reads it again; {_mask(step)}; {waiting}"


def _mask(step: RaggedStep) -> str:
    if step.mask_s is None or step.mask_low_s is None or step.mask_high_s is None:
        return "the cost of its mask is not known"
    text = (
        f"its mask {'adds' if step.mask_s >= 0 else 'saves'} {duration(abs(step.mask_s))}"
        f" ({signed_duration(step.mask_low_s)} to {signed_duration(step.mask_high_s)}) compared with that shape without"
        " one"
    )
    if step.mask_is_claim:
        return text
    return f"{text}, {'each visited once' if step.visits < CLAIM_VISITS else 'no more than noise'}"


_MOST_EXPERT_ROWS = 8
_FEWER_EXPERTS = 0.9
"""Below this share of the expected experts, the counted bytes of weights are clearly too high."""


def experts(run: Run) -> Section | None:
    """The experts that real prompts use, next to the number on which the counts and roofs rest."""
    steps, prompts = run.document.experts_touched, run.document.grid.prompts
    if not prompts or not (steps or run.model.experts):
        return None
    title, note = "Experts that the prompts use", f"measured with the prompts of {prompts}"
    if not steps:
        hidden = "The experts that the prompts use are not known: the code does not show what the router chose."
        return Section(title, [Lines([hidden], "paragraph")])
    shares = {step: step.touched / step.expected for step in steps}
    rows = [
        [step.key.name, f"{step.touched:.1f}", f"{step.expected:.1f}", str(step.experts), percent(shares[step])]
        for step in evenly(steps, _MOST_EXPERT_ROWS)
    ]
    caption = "distinct experts of a layer in one step; expected: by the counts, if each were chosen equally often"
    table = text_table(("step", "experts used", "expected", "of", "used / expected"), rows, caption=caption)
    fewest = min(shares, key=lambda step: shares[step])
    of_expected = f"{fewest.key.name} uses {percent(shares[fewest])} of the expected experts"
    too_high = f"{of_expected}: its counted bytes, floor and roof share are too high"
    return Section(title, [table, Lines([too_high] if shares[fewest] < _FEWER_EXPERTS else [], "paragraph")], note)


def ranks(run: Run) -> Section | None:
    """The number of ranks, their link, and for each step the ranks' times, the link's time and their sum."""
    link = run.document.ceilings.collective
    if run.document.ranks < 2 or link is None:
        return None
    head = (
        f"{run.document.ranks} ranks, each with {scaled(run.model.storage_bytes, 'B')} of weights, by {link.name}:"
        f" {duration(link.alpha_s)} per message and {scaled(link.bus_bytes_per_s, 'B/s')} (busbw)"
    )
    if link.points:
        first, last = link.points[0], link.points[-1]
        head += (
            f"; an all-reduce of {first.nbytes >> 10} KiB takes {duration(first.seconds)}, one of"
            f" {last.nbytes >> 20} MiB {duration(last.seconds)} (algbw {scaled(last.alg_bytes_per_s, 'B/s')}, busbw"
            f" {scaled(last.bus_bytes_per_s, 'B/s')})"
        )
    lines = [head]
    for step in run.document.rank_steps:
        times = ", ".join(duration(seconds) for seconds in step.own_s)
        hides = f", which hides {duration(step.hidden_s)} of the host's dispatch" if step.hidden_s else ""
        lines.append(
            f"{step.key.name}: the ranks' own shares take {times}, {duration(step.last_s)} waiting for the last at each"
            f" exchange, the link {duration(step.exchanged_s)}{hides}:"
            f" {duration(step.predicted_s)} predicted, {duration(step.measured_s)} measured"
        )
    return Section("Ranks", [Lines(lines)], "measured on each rank", FULL)


def forecast(run: Run) -> Section | None:
    forecast = read_forecast(run.folder)
    if forecast is None:
        return None
    alt = "Forecast time against the batch with the band that holds nine in ten, and measured cells"
    pictures = [Picture("forecast", alt, (run,))] if run.measured else []
    table, assumptions = forecast_table(forecast.cells)
    blocks = [Lines(answer_sentences(forecast), "paragraph"), *pictures, table, Lines(assumptions)]
    return Section("What would happen", blocks, "forecast from the measured cells; bands hold nine in ten", HTML)


FORECAST_COLUMNS = ("cell", "time", "nine in ten", "tokens/s", "waits for", "basis")


def error_sentence(error: ForecastError) -> str:
    """Return `median 3.1 %, nine in ten within 8 %, over 32 cells that it had not seen`, or why it is unknown."""
    if not error.cells:
        return f"not known: {error.how}"
    if error.median is None or error.p90 is None:
        return f"not known: {error.cells} cells are too few to cross-validate, so the intervals are wide"
    return (
        f"median {error_share(error.median)}, nine in ten within {error_share(error.p90)}, over {error.cells} cells"
        f" that it had not seen ({error.how})"
    )


def error_share(share: float) -> str:
    """Return a share of an error: `3.1 %`, or `12 %` from 10 % on."""
    return f"{100 * share:.1f} %" if share < 0.0995 else percent(share)


def answer_sentences(answer: Answer) -> list[str]:
    """Return the head of a forecast: model, device, method, and the error of such forecasts."""
    lines = [
        f"Forecast: {answer.model} ({answer.precision}) on {answer.on}, {answer.how}.",
        f"Error: {error_sentence(answer.error)}.",
    ]
    if answer.beyond is not None and answer.beyond.cells:
        lines.append(f"Beyond what was measured: {error_sentence(answer.beyond)}.")
    return [*lines, *answer.notes]


def waits_for(regime: str, tight: bool) -> str:
    """Return the limit of a forecast step as the table shows it."""
    return regime.removesuffix("-bound") + (" (tight)" if tight else "")


def forecast_table(cells: Sequence[ForecastCell]) -> tuple[TextTable, list[str]]:
    """Return a row per cell, and notes: what `tight` means, and each assumption by the number in the last column."""
    assumptions: list[str] = []
    rows = []
    for cell in cells:
        marks = []
        for text in [] if cell.basis == BETWEEN_CELLS else cell.basis.split("; "):
            if text not in assumptions:
                assumptions.append(text)
            marks.append(f"[{assumptions.index(text) + 1}]")
        texts = ["no room", "-", "-", "memory full"]
        if cell.fits:
            texts = [
                duration(cell.latency_s),
                f"{duration(cell.low_s)} .. {duration(cell.high_s)}",
                significant(cell.tokens_per_s),
                waits_for(cell.regime, cell.tight),
            ]
        rows.append((cell.name, *texts, " ".join(marks)))
    table = text_table(FORECAST_COLUMNS, rows, wrapped=("cell", "waits for", "basis"))
    tight = [f"{TIGHT}."] if any(cell.tight for cell in cells) else []
    return table, [*tight, *(f"[{number}] {text}" for number, text in enumerate(assumptions, 1))]
