"""Savings of an engine over the run's first engine, the overhead of `generate` over the profiler's loop, and what
unequal prompts cost."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from profiler.facts.change_ids import ChangeId
from profiler.facts.measurements import GenerateSteps
from profiler.facts.repetitions import phase_samples
from profiler.facts.run_facts import Facts
from profiler.grid.cells import DEFAULT_ENGINE, CellKey, KeyedRecord
from profiler.grid.ragged import padding_share, waiting
from profiler.judge.breakdown import TERM_NAMES, TERMS, TimeBreakdown
from profiler.judge.cell_stages import Judged, RaggedStep
from profiler.judge.difference import longer_s
from profiler.judge.savings import EngineDifference
from profiler.stats import Estimate
from profiler.units import signed_duration

# Terms below this share of the difference between two engines are not named.
_LEAST_TERM_SHARE = 0.05


def engine_differences(
    facts: Facts, steady: Mapping[CellKey, Estimate], judged: Mapping[CellKey, Judged]
) -> Iterator[EngineDifference]:
    """The saving of each further engine over the first in each cell, with its interval.

    `steady` are the times without the machine's drift, which changes engines alike that are timed in turn.
    """
    if facts.grid.ragged is not None:
        return  # without its mask a padded batch is another task, not another engine
    first, *others = facts.grid.engines
    for key in facts.grid.keys:
        base = key.on(first)
        if key.cell.engine not in others or not (key in steady and base in steady):
            continue
        longer = longer_s(steady[base], steady[key])
        terms: dict[str, float] = {}
        causes: dict[str, float] = {}
        if judged:
            cells = judged[base], judged[key]
            causes = _gained(*(cell.redundant_s for cell in cells))
            if all(cell.terms.adds_up for cell in cells):
                terms = _gained(*({term: getattr(cell.terms, term) for term in TERMS} for cell in cells))
        yield EngineDifference(
            **key.columns,
            against=first,
            saves_s=-longer.median_s,
            low_s=-longer.high_s,
            high_s=-longer.low_s,
            terms=terms,
            causes=causes,
            repetitions=min(len(phase_samples(key.phase, facts.repetitions[each.cell])) for each in (base, key)),
        )


def _gained(before: Mapping[Any, float], after: Mapping[Any, float]) -> dict[str, float]:
    gained_s = {str(name): after.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **after}}
    return {name: seconds for name, seconds in gained_s.items() if seconds}


PART_NAMES = {
    "read": "reading on the host whether all are done",
    "stopping": "stopping criteria",
    "processors": "logits processors",
    "inputs": "input preparation",
    "cache": "cache growth",
    "forward": "mask and positions in the forward",
    "rest": "the rest: casts, copies, Python",
}
"""The parts of the overhead of `generate` per decode step.

`cache` and `forward` are differences to the profiler's loop, which has both parts too."""


@dataclass(frozen=True)
class GenerateOverhead(KeyedRecord):
    """The overhead of `generate` per step, with its 95 % interval."""

    transformers: str
    tax_s: float
    low_s: float
    high_s: float
    own_s: float
    """Seconds per step of the profiler's loop."""
    repetitions: int
    """Repetitions of the loop with fewer. A single repetition does not show how much repetitions of one cell differ."""
    parts_s: Mapping[str, float]
    """Seconds by PART_NAMES, which add up to the overhead; empty for a prefill, or if they were not measured."""
    reads_a_token: float | None = None
    """Values per step that the host reads from the device, and waits for."""
    streamer_s: float | None = None
    """Seconds per step that a minimal streamer would add; not part of the overhead, which is without a streamer."""


def generate_adds_s(facts: Facts, key: CellKey, steady: Mapping[CellKey, Estimate]) -> Estimate | None:
    """Seconds per step of `generate` minus those of the profiler's loop, timed in turn; None for other engines."""
    own = steady.get(key.on(DEFAULT_ENGINE))
    return longer_s(own, steady[key]) if own and key.cell.engine in facts.generate_engines else None


def generate_overheads(facts: Facts, steady: Mapping[CellKey, Estimate]) -> Iterator[GenerateOverhead]:
    for key in steady:
        added = generate_adds_s(facts, key, steady)
        if added is None:
            continue
        steps = facts.generate_steps.get(key.cell) if key.phase == "decode" else None
        own, streamer_s = key.on(DEFAULT_ENGINE), None
        if steps is not None:
            streamer_s = max(0.0, statistics.median(steps.streamed_s) - statistics.median(steps.parts_s["read"]))
        yield GenerateOverhead(
            **key.columns,
            transformers=steps.transformers if steps else "",
            tax_s=added.median_s,
            low_s=added.low_s,
            high_s=added.high_s,
            own_s=steady[own].median_s,
            repetitions=min(len(facts.repetitions[each.cell]) for each in (own, key)),
            parts_s=parts_of(steps, added.median_s) if steps else {},
            reads_a_token=steps.reads_a_token if steps else None,
            streamer_s=streamer_s,
        )


def parts_of(steps: GenerateSteps, added_s: float) -> dict[str, float]:
    """Seconds of each part of an overhead, by PART_NAMES; parts of both loops are differences."""
    generate_s = {name: statistics.median(values) for name, values in steps.parts_s.items()}
    own_s = {name: statistics.median(values) for name, values in steps.own_s.items()}
    parts = {name: generate_s[name] for name in PART_NAMES if name in generate_s}
    parts["cache"] = generate_s["cache"] - own_s["cache"]
    # The forward includes the growth of the cache.
    parts["forward"] = generate_s["forward"] - own_s["forward"] - parts["cache"]
    return {**parts, "rest": added_s - sum(parts.values())}


def ragged_step(
    facts: Facts, key: CellKey, parts: TimeBreakdown, steady: Mapping[CellKey, Estimate]
) -> RaggedStep | None:
    """The costs of unequal prompt lengths in a measured step; None if all lengths are equal.

    `steady` are the times without the machine's drift, which changes a step with a mask and one without alike.
    """
    batch = facts.grid.requests_of(key.cell)
    if batch is None:
        return None
    plain_key = key.on(DEFAULT_ENGINE)
    mask = longer_s(steady[plain_key], steady[key]) if plain_key in steady else None
    waits = waiting(batch) if key.phase == "decode" else 0.0
    operators = facts.operators[key]
    return RaggedStep(
        **key.columns,
        prompt_lens=tuple(request.prompt_len for request in batch),
        padding=padding_share(batch),
        padding_s=parts.padding_s,
        useful_flops=float(sum(item.flops for item in operators)),
        executed_flops=float(sum(item.executed_flops for item in operators)),
        waiting=waits,
        waiting_s=waits * parts.latency_s,
        mask_s=mask.median_s if mask else None,
        mask_low_s=mask.low_s if mask else None,
        mask_high_s=mask.high_s if mask else None,
        repetitions=min(len(facts.repetitions.get(plain_key.cell, ())), len(facts.repetitions[key.cell])),
    )


_CHANGES = {"graph": ChangeId.GRAPH, "compile": ChangeId.COMPILED_STEP, "static": ChangeId.STATIC_CACHE}


def change_of_engine(item: EngineDifference) -> ChangeId | None:
    """The change that an engine makes to a decode step of the run's first one; None for other engines."""
    return _CHANGES.get(item.engine) if item.phase == "decode" else None


def causes_of(item: EngineDifference) -> str:
    """The terms that make the difference between two engines, as a list in words; empty if all are small."""
    if not item.terms:
        return "the cause is unknown, because their time breakdowns do not add up"
    return ", ".join(where_it_lies(item))


def where_it_lies(item: EngineDifference) -> list[str]:
    """The terms that make the difference between two engines, in words, the largest first; small ones are left out."""
    least_s = _LEAST_TERM_SHARE * max(map(abs, (item.saves_s, *item.terms.values())))
    ranked = sorted(item.terms.items(), key=lambda pair: -abs(pair[1]))
    return [f"{_term_words(name, item)} {signed_duration(gain)}" for name, gain in ranked if abs(gain) >= least_s]


def _term_words(term: str, item: EngineDifference) -> str:
    if term == "engine_s":
        return "the engine's own (scheduler, sampler, launches, its kernels' losses)"
    cause = max(item.causes, key=lambda name: abs(item.causes[name]), default="")
    if term == "redundant_s" and cause and abs(item.causes[cause]) > abs(item.terms[term]) / 2:
        return cause
    return TERM_NAMES[term]
