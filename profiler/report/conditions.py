"""What only some runs have: unequal prompts, ranks and forecasts."""

from __future__ import annotations

from collections.abc import Iterator

from profiler.data.links import Link
from profiler.judge.padding import RaggedStep
from profiler.report.blocks import HTML, Lines, Picture, Section, text_table
from profiler.report.forecast import answer_sentences, forecast_table
from profiler.report.selection import evenly
from profiler.stats import CLAIM_VISITS
from profiler.store.folder import Run
from profiler.store.forecasts import read_forecast
from profiler.units import duration, percent, saving, scaled, signed_duration


def ragged(run: Run) -> Section | None:
    lines = ragged_lines(run)
    note = "measured with padding and a mask, and the same shape without; other ways to batch are tried or computed"
    return Section("Prompts of unequal lengths", [Lines(lines)], note) if lines else None


def ragged_lines(run: Run) -> list[str]:
    """Return the time that padding, its mask and waiting take at each batch size, and what other ways to batch save."""
    times_s = {result.key: result.latency_s for result in run.measured}
    steps = [step for step in run.document.ragged if step.batch_size > 1]
    return [line for step in steps for line in _ragged_step_lines(step, times_s[step.key])]


def _ragged_step_lines(step: RaggedStep, latency_s: float) -> Iterator[str]:
    word = "prefill" if step.phase == "prefill" else "decode step"
    lens = step.prompt_lens
    shape = f"{len(lens)} prompts of {min(lens)} to {max(lens)} tokens"
    useful = f"{percent(step.useful_flops / step.executed_flops)} of its FLOPs are the prompts' own"
    lost = f"padding takes {duration(step.padding_s)} of the {duration(latency_s)} {word}"
    if step.phase == "prefill":
        yield f"{shape}: {percent(step.padding)} of the positions are padding; {lost}; {useful}; {_mask(step)}"
    else:
        yield f"{shape}: {lost}, which reads it again; {_mask(step)}; {_waiting(step)}"
    ways = [f"{lever.change} {saving(lever.saves_s)} ({lever.basis}: {lever.because})" for lever in step.ways]
    if ways:
        yield f"of {'a' if step.phase == 'prefill' else 'that'} {word}: {'; '.join(ways)}"


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


def _waiting(step: RaggedStep) -> str:
    if not step.waiting:
        return "all sequences write the same number of tokens, so none waits for another"
    return (
        f"sequences that have ended wait {percent(step.waiting)} of the time, {duration(step.waiting_s)} of each step"
    )


_MOST_EXPERT_ROWS = 8
_FEWER_EXPERTS = 0.9
"""Below this share of the expected experts, the counted bytes of weights are clearly too high."""


def experts(run: Run) -> Section | None:
    """The experts that real prompts use, next to the number on which the counts and roofs rest."""
    steps = evenly(run.document.experts_touched, _MOST_EXPERT_ROWS)
    rows = [
        [
            step.key.name,
            f"{step.touched:.1f}",
            f"{step.expected:.1f}",
            str(step.experts),
            percent(step.touched / step.expected),
        ]
        for step in steps
    ]
    caption = "distinct experts of a layer in one step; expected: by the counts, if each were chosen equally often"
    table = text_table(("step", "experts used", "expected", "of", "used / expected"), rows, caption=caption)
    if not run.document.grid.prompts or not (rows or run.model.experts):
        return None
    if not rows:
        hidden = "The experts that the prompts use are not known: the code does not show what the router chose."
        return Section("Experts that the prompts use", [Lines([hidden], "paragraph")])
    fewest = min(run.document.experts_touched, key=lambda step: step.touched / step.expected)
    share = fewest.touched / fewest.expected
    of_expected = f"{fewest.key.name} uses {percent(share)} of the expected experts"
    too_high = f"{of_expected}: its counted bytes, floor and roof share are too high"
    lines = [Lines([too_high], "paragraph")] if share < _FEWER_EXPERTS else []
    note = f"measured with the prompts of {run.document.grid.prompts}"
    return Section("Experts that the prompts use", [table, *lines], note)


def ranks(run: Run) -> Section | None:
    lines = rank_lines(run)
    return Section("Ranks", [Lines(lines)], "measured on each rank") if lines else None


def rank_lines(run: Run) -> list[str]:
    """Return the number of ranks, their link, and for each step the ranks' times, the link's time and their sum."""
    link = run.document.ceilings.collective
    if run.document.ranks < 2 or link is None:
        return []
    lines = [
        f"{run.document.ranks} ranks, each with {scaled(run.model.storage_bytes, 'B')} of weights, by {link.name}:"
        f" {duration(link.alpha_s)} per message and {scaled(link.bus_bytes_per_s, 'B/s')} (busbw)"
        + (f"; {_sweep(link)}" if link.points else "")
    ]
    for step in run.document.rank_steps:
        times = ", ".join(duration(seconds) for seconds in step.own_s)
        hides = f", which hides {duration(step.hidden_s)} of the host's dispatch" if step.hidden_s else ""
        lines.append(
            f"{step.key.name}: the ranks' own shares take {times}, {duration(step.last_s)} waiting for the last at each"
            f" exchange, the link {duration(step.exchanged_s)}{hides}:"
            f" {duration(step.predicted_s)} predicted, {duration(step.measured_s)} measured"
        )
    return lines


def _sweep(link: Link) -> str:
    """Return the smallest and the largest size of a sweep of all-reduces."""
    first, last = link.points[0], link.points[-1]
    return (
        f"an all-reduce of {first.nbytes >> 10} KiB takes {duration(first.seconds)}, one of {last.nbytes >> 20} MiB"
        f" {duration(last.seconds)} (algbw {scaled(last.alg_bytes_per_s, 'B/s')}, busbw"
        f" {scaled(last.bus_bytes_per_s, 'B/s')})"
    )


def forecast(run: Run) -> Section | None:
    forecast = read_forecast(run.folder)
    if forecast is None:
        return None
    alt = "Forecast time against the batch with the band that holds nine in ten, and measured cells"
    pictures = [Picture("forecast", alt, (run,))] if run.measured else []
    table, assumptions = forecast_table(forecast.cells)
    blocks = [Lines(answer_sentences(forecast), "paragraph"), *pictures, table, Lines(assumptions)]
    return Section("What would happen", blocks, "forecast from the measured cells; bands hold nine in ten", HTML)
