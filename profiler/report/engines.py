"""How engines differ, what `generate` adds and drafts give; what padding, experts and ranks take."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

from profiler.facts.measurements import Drafting
from profiler.judge.cells import EngineDifference
from profiler.judge.engine_differences import PART_NAMES, GenerateOverhead, where_it_lies
from profiler.judge.padding import RaggedStep
from profiler.report.blocks import FULL, Block, Lines, Picture, Section, TextTable, evenly, text_table
from profiler.stats import CLAIM_VISITS
from profiler.store.folder import Run
from profiler.units import duration, percent, saving, scaled, several, signed_duration, significant


def engines(run: Run) -> Section:
    """What engines save compared with the first, what `generate` adds, and what drafts give."""
    blocks: list[Block] = [_saved(run), Lines([*no_claim_lines(run), *generate_lines(run)])]
    if waterfalls(run):
        blocks.insert(0, Picture("waterfall", "From the first engine's time to another's, term by term", (run,)))
    drafts = Lines(list(drafting_lines(run.document.drafting)) if run.document.drafting else [])
    note = f"measured in turns, compared with {run.document.engine.names[0]}, with our own loop, or without drafts"
    return Section("Engines, generate and drafts", [*blocks, drafts], note, FULL)


def _saved(run: Run) -> TextTable:
    """Return cell, engine, time saved against the first engine, its interval and terms, for each claim."""
    rows = []
    for item in engine_claims(run):
        ends_s = sorted((abs(item.low_s), abs(item.high_s)))
        cell = replace(item.key, cell=replace(item.key.cell, engine=item.against)).name
        terms = ", ".join(where_it_lies(item))
        rows.append([cell, item.engine, saving(item.saves_s), " to ".join(map(duration, ends_s)), terms])
    headings = ("cell", "engine", "per step", "interval", "in which terms")
    return text_table(headings, rows, texts=headings[:4], wrapped=headings[4:])


def engine_claims(run: Run) -> list[EngineDifference]:
    """Return the differences between engines that exceed noise."""
    return [item for item in run.document.engine.differences if item.is_claim]


def waterfalls(run: Run) -> list[EngineDifference]:
    """Return the engine differences that the time breakdowns of both engines explain."""
    return [item for item in engine_claims(run) if item.terms]


def no_claim_lines(run: Run) -> list[str]:
    """Return the number of cells in which engines differ by no more than noise, and of cells with too few visits."""
    differences = run.document.engine.differences
    once = sum(item.visits < CLAIM_VISITS for item in differences)
    noise = len(differences) - len(engine_claims(run)) - once
    lines = []
    if noise:
        lines.append(f"in {several(noise, 'cell', 'cells')} engines differ by no more than noise")
    if once:
        cells = several(once, "cell has", "cells have")
        lines.append(f"{cells} only one visit of an engine: no difference is claimed; a larger --budget gives more")
    return lines


# At most this many cells per phase have their generate overhead printed, from the smallest cell to the largest.
_MOST_CELLS = 3
# Parts below this share of the overhead of generate are only in run.json.
_LEAST_SHARE = 0.01


def generate_lines(run: Run) -> list[str]:
    """Return the overhead of generate in some cells, with its interval and parts; the others are in run.json."""
    lines = []
    for phase in ("decode", "prefill"):
        overheads = sorted(
            (item for item in run.document.generate if item.phase == phase),
            key=lambda item: (item.batch_size * item.key.cell.depth, item.batch_size),
        )
        lines += [_generate_line(item, run) for item in evenly(overheads, _MOST_CELLS)]
    return lines


def _generate_line(overhead: GenerateOverhead, run: Run) -> str:
    step, tax_s = "step" if overhead.phase == "decode" else "prefill", overhead.tax_s
    version = overhead.transformers or run.document.software.get("transformers", "")
    text = (
        f"transformers {version}'s generate adds {duration(tax_s)}"
        f" ({duration(overhead.low_s)} to {duration(overhead.high_s)}) to our {step} of {duration(overhead.own_s)}"
        f" at {overhead.key.cell.batch_size} x {overhead.key.cell.depth}, {percent(tax_s / overhead.own_s)}"
    )
    if not overhead.is_claim:
        once = overhead.visits < CLAIM_VISITS
        return f"{text}: {'each was visited once, too few for a claim' if once else 'no more than noise'}"
    ranked = sorted((overhead.parts_s or {}).items(), key=lambda item: -item[1])
    shown = [(PART_NAMES[name], part_s) for name, part_s in ranked if abs(part_s) >= _LEAST_SHARE * abs(tax_s)]
    parts = [", ".join(f"{name} {duration(part_s)} ({percent(part_s / tax_s)})" for name, part_s in shown)]
    if overhead.reads_a_token is not None:
        plural = "" if overhead.reads_a_token == 1 else "s"
        parts.append(f"the host reads {overhead.reads_a_token:g} value{plural} per token")
    if overhead.streamer_s is not None:
        parts.append(f"a streamer would add {duration(overhead.streamer_s)}")
    return ": ".join(filter(None, (text, "; ".join(filter(None, parts)))))


def drafting_lines(found: Drafting) -> Iterator[str]:
    """Yield what drafts cost and give, whether they pay, and on which text."""
    if not found.steps:
        length = several(found.new_tokens, "token", "tokens")
        yield f"one step with drafts of {found.draft} gave the answer of {length}: use more --new-tokens to compare"
        return
    step_s, plain_s = statistics.median(found.assisted_s) / found.steps, statistics.median(found.plain_s)
    plain_step_s, speedup = plain_s / (found.new_tokens - 1), statistics.median(found.speedups)
    yield (
        f"drafts of {found.draft} at batch 1: {significant(statistics.mean(found.drafted[1:]), 2)} per step,"
        f" {significant(found.tokens_per_step - 1, 2)} accepted; so a step gives {significant(found.tokens_per_step)}"
        f" tokens in {duration(step_s)} ({duration(statistics.median(found.drafting_s) / found.steps)} of it drafting),"
        f" without drafts one in {duration(plain_step_s)}"
    )
    low, high = min(found.speedups), max(found.speedups)
    verdict = "no more than noise" if found.pays is None else f"drafts {'pay' if found.pays else 'do not pay'} here"
    yield (
        f"{significant(found.tokens_per_step / step_s)} tokens/s with drafts, {significant(1 / plain_step_s)} without:"
        f" {significant(speedup)}x ({significant(low)} to {significant(high)}); {verdict}"
    )
    same = "the same as" if found.same_tokens == found.new_tokens else f"the same {found.same_tokens} tokens as"
    yield (
        f"it continued a built-in text of {found.prompt_len} tokens by {found.new_tokens}, {same} without drafts; your"
        " text may accept more or fewer drafts"
    )


def conditions(run: Run) -> Section:
    """What padding takes at each batch size, which experts real prompts use, and what the ranks exchange."""
    times_s = {result.key: result.latency_s for result in run.measured}
    steps = [step for step in run.document.ragged if step.batch_size > 1]
    padding = [line for step in steps for line in _ragged_step_lines(step, times_s[step.key])]
    note = "measured: padded steps and the same shape without a mask, routed experts, and each rank's own share"
    ranks = Lines(_ranks_lines(run), media=FULL)
    experts = [line for line in [_experts_line(run)] if line]
    return Section("Padding, experts and ranks", [Lines([*padding, *experts]), ranks], note)


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


_FEWER_EXPERTS = 0.9
"""Below this share of the expected experts, the counted bytes of weights are clearly too high."""


def _experts_line(run: Run) -> str | None:
    """Return how many experts real prompts use in the step with the fewest, next to the number that the counts expect.

    None for a dense model, and for prompts of random tokens.
    """
    steps, prompts = run.document.experts_touched, run.document.grid.prompts
    if not prompts or not (steps or run.model.experts):
        return None
    if not steps:
        return "The experts that the prompts use are not known: the code does not show what the router chose."
    fewest = min(steps, key=lambda step: step.touched / step.expected)
    share = fewest.touched / fewest.expected
    text = (
        f"{fewest.key.name} uses {fewest.touched:.1f} of {fewest.experts} experts of a layer, {percent(share)} of those"
        f" that the counts expect ({fewest.expected:.1f}, if each were chosen equally often)"
    )
    return text + (": its counted bytes, floor and roof share are too high" if share < _FEWER_EXPERTS else "")


def _ranks_lines(run: Run) -> list[str]:
    """Return the ranks and their link, and for each step the ranks' times, the link's time and their sum."""
    link = run.document.ceilings.collective
    if run.document.ranks < 2 or link is None:
        return []
    lines = [
        f"{run.document.ranks} ranks, each with {scaled(run.model.storage_bytes, 'B')} of weights, by {link.name}:"
        f" {duration(link.alpha_s)} per message and {scaled(link.bus_bytes_per_s, 'B/s')} (busbw)"
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
