"""How engines differ, what `generate` adds, and what drafts give."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

from profiler.facts.measurements import Drafting
from profiler.judge.cells import EngineDifference
from profiler.judge.engine_differences import PART_NAMES, GenerateOverhead, where_it_lies
from profiler.report.blocks import FULL, Block, Lines, Picture, Section, evenly, text_table
from profiler.stats import CLAIM_VISITS
from profiler.store.folder import Run
from profiler.units import duration, percent, saving, several, significant


def engines(run: Run) -> Section:
    """Cell, engine, time saved against the first engine, its interval and terms, for each claim."""
    blocks: list[Block] = []
    if waterfalls(run):
        blocks.append(Picture("engines", "From the first engine's time to another's, term by term", (run,)))
    rows = []
    for item in engine_claims(run):
        ends_s = sorted((abs(item.low_s), abs(item.high_s)))
        cell = replace(item.key, cell=replace(item.key.cell, engine=item.against)).name
        terms = ", ".join(where_it_lies(item))
        rows.append([cell, item.engine, saving(item.saves_s), " to ".join(map(duration, ends_s)), terms])
    headings = ("cell", "engine", "per step", "interval", "in which terms")
    table = text_table(headings, rows, texts=headings[:4], wrapped=headings[4:])
    note = f"measured in turns: the time that each saves compared with {run.document.engine.names[0]}"
    return Section("Engines", [*blocks, table, Lines(no_claim_lines(run))], note, FULL)


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


def generate(run: Run) -> Section:
    """The overhead of generate in some cells, with its interval and parts; the others are in run.json."""
    lines = []
    for phase in ("decode", "prefill"):
        overheads = sorted(
            (item for item in run.document.generate if item.phase == phase),
            key=lambda item: (item.batch_size * item.key.cell.depth, item.batch_size),
        )
        lines += [_generate_line(item, run) for item in evenly(overheads, _MOST_CELLS)]
    note = "measured in turns with our own loop; its parts are timed in transformers' own functions"
    return Section("The overhead of generate", [Lines(lines)], note, FULL)


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


def drafting(run: Run) -> Section | None:
    found = run.document.drafting
    if found is None:
        return None
    blocks: list[Block] = [Lines(list(_drafting_lines(found)))]
    if found.steps and found.floors:
        rows = [
            [
                str(floor.batch),
                duration(floor.one_token_s),
                duration(floor.verifying_s),
                duration(floor.drafting_s) if floor.drafting_s else "-",
                f"{significant(floor.speedup(found.tokens_per_step))}x",
            ]
            for floor in found.floors
        ]
        headings = ("batch", "one token", f"verifying {found.floors[0].drafted} drafts", "drafting", "at these roofs")
        caption = "Computed: the least times by this run's roofs, with the measured tokens per step."
        blocks.append(text_table(headings, rows, caption=caption))
    note = "transformers' assisted generation, measured at batch 1 (it takes no more), in turn with plain generation"
    return Section("Speculative decoding", blocks, note)


def _drafting_lines(found: Drafting) -> Iterator[str]:
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
