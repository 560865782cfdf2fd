"""The answer of a run in sentences: the limits of prefill and decode, and the best changes."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from profiler.effort import STANDARD
from profiler.facts.change_ids import ChangeId
from profiler.facts.measurements import NotTried, Trial
from profiler.judge.advice import Advice, advice_for
from profiler.judge.breakdown import TERM_NAMES, TERMS, WHY_TOO_FAST
from profiler.judge.cell_stages import Judged
from profiler.judge.changes import Setting, not_tried, saves_clearly
from profiler.judge.engine_differences import causes_of
from profiler.judge.regimes import PACED_SHARE, Flag
from profiler.judge.savings import ChangeEffect, EngineDifference
from profiler.judge.scaling import best_of
from profiler.loading.changes import WITHOUT_CUDNN
from profiler.units import duration, percent, scaled, several, significant

# An answer has at most this many sentences on changes, of which so many advise one.
_MOST_CHANGES, _MOST_ADVISED = 5, 2
# A cost that is paid once is named from here on.
_NAMED_ONCE_S = 1.0
# Terms below this share of a step are not named.
_LEAST_STEP_SHARE = 0.1
# Within a model, the best streams and matmuls of GPUs reach 0.8 to 0.95 of their ceilings.
_NEAR_CEILING = 0.8


@dataclass(frozen=True)
class Answer:
    """What a run says first."""

    sentences: tuple[str, ...] = ()
    """The most useful first; empty if nothing was measured."""
    advised: tuple[Advice, ...] = ()
    """The changes that the sentences advise, in their order."""
    not_tried: tuple[ChangeEffect, ...] = ()
    """The computed savings that they name."""


def answer_of(
    cells: Sequence[Judged],
    setting: Setting,
    differences: Sequence[EngineDifference] = (),
    busy: Sequence[str] = (),
    cut: Sequence[NotTried] = (),
) -> Answer:
    """Summarise a run: the limits of prefill and decode, then at most five sentences on changes.

    They describe the first engine. Further engines are compared with it, and each has a sentence. `busy` are sentences
    about a busy machine: they come first, and then no saving is named. Cells that are not usable are in no sentence.
    `cut` are changes for whose trials there was no time.
    """
    sentences = list(busy) if cells else []
    cells = [cell for cell in cells if cell.key.cell.engine == cells[0].key.cell.engine]
    phases, every = {cell.key.phase for cell in cells}, cells
    cells = [cell for cell in cells if cell.timed.noise.grade != "unusable"]
    decodes, prefills = _decodes(cells), _prefills(cells)
    if decodes:
        sentences.append(_decode_sentence(decodes, setting))
    if prefills:
        sentences.append(_prefill_sentence(prefills, setting))
    for phase in sorted(phases - {cell.key.phase for cell in cells}):
        sentences.append(f"No time of a {phase} is known to within a tenth: measure again on a quieter machine.")
    if busy or not cells:
        return Answer(tuple(sentences))
    # A trial takes turns, so it shows a difference even where the time itself is too noisy for a sentence.
    tried = [cell for cell in every if cell.tried]
    advised = advice_for([*_decodes(tried)[:1], *_prefills(tried)[-1:]], every)[:_MOST_ADVISED]
    changes = [
        *_first_use_sentences(decodes),
        *(change_sentence(item, "By itself" if number else "What to change") for number, item in enumerate(advised)),
        *_measured_without_a_line(decodes),
        *_batch_sentences(decodes),
    ]
    without_time = _cut_sentences(cut)
    changes = [*changes[: _MOST_CHANGES - len(without_time)], *without_time]
    taken = {item.trial.line for cell in every for item in cell.tried}  # also if at another cell
    untried = _not_tried(decodes, prefills, advised, taken)[: _MOST_CHANGES - len(changes)]
    changes += [_not_tried_sentence(cell, effect, cut) for cell, effect in untried]
    if not changes:
        changes = [_no_change(decodes[0] if decodes else prefills[0])]
    engines = _engine_sentences(decodes[0], differences) if decodes else []
    return Answer((*sentences, *changes, *engines), tuple(advised), tuple(effect for _, effect in untried))


def _decodes(cells: Sequence[Judged]) -> list[Judged]:
    return sorted(
        (cell for cell in cells if cell.key.phase == "decode"),
        key=lambda each: (each.key.cell.batch_size, each.key.cell.depth),
    )


def _prefills(cells: Sequence[Judged]) -> list[Judged]:
    return sorted((cell for cell in cells if cell.key.phase == "prefill"), key=lambda each: each.key.tokens)


def change_sentence(advice: Advice, beginning: str) -> str:
    """Return a sentence on a change that was executed: the line, and what it does to step, prefill and tokens."""
    words = advice.clear_effects("step")
    words += [
        f"no clear change of the {name}"
        for name, effect in (("step", advice.step), ("prefill", advice.prefill))
        if effect and not effect.is_clear
    ]
    pays, until = advice.pays_from_tokens, advice.pays_up_to_tokens
    parts = [
        f"{beginning}: {advice.line}: {', '.join(words)} at {advice.batch_size} x {advice.prompt_len}"
        f" (tried{_on_few_layers(advice)})",
        f"it pays from {several(pays, 'new token', 'new tokens')} per prompt on" if pays is not None else "",
        f"it pays up to {several(until, 'new token', 'new tokens')} per prompt" if until is not None else "",
        f"it takes {duration(advice.once_s)} once" if advice.once_s >= _NAMED_ONCE_S else "",
        _tokens(advice),
    ]
    return f"{'; '.join(filter(None, parts))}."


def _on_few_layers(tried: Advice | Trial) -> str:
    return f", on {tried.layers} of {tried.of_layers} layers" if tried.layers < tried.of_layers else ""


def _tokens(advice: Advice) -> str:
    if not advice.tokens:
        return "tokens were not compared" if advice.change is ChangeId.FORMAT else ""
    if advice.same_tokens == advice.tokens:
        return "the same tokens"
    return f"{advice.tokens - advice.same_tokens} of {advice.tokens} tokens differ"


def _measured_without_a_line(decodes: Sequence[Judged]) -> list[str]:
    """What trials found that executed no line, as runs before 0.5.0 did, or for which there is none."""
    if not (decodes and decodes[0].tried):
        return []
    item = min(decodes[0].tried, key=lambda item: item.ratio)
    if item.trial.line or item.change is None or not saves_clearly(decodes[0], item):
        return []
    before, after = map(duration, item.steps_s(decodes[0].terms.latency_s))
    return [
        f"Tried, but no line to copy: with {item.trial.form} the {before} step takes {after}"
        f"{_on_few_layers(item.trial)}."
    ]


def _not_tried(
    decodes: Sequence[Judged], prefills: Sequence[Judged], advised: Sequence[Advice], taken: set[str]
) -> list[tuple[Judged, ChangeEffect]]:
    """The largest computed saving of the smallest step and of the largest prefill; of the largest step its window.

    `taken` are lines that need no such sentence, as they were tried.
    """
    found: list[tuple[Judged, ChangeEffect]] = []
    saves_s = max((item.step.saves_s for item in advised if item.step is not None), default=0.0)
    for cell in (*decodes[:1], *prefills[-1:], *decodes[1:][-1:]):
        for effect in not_tried(cell)[:1]:
            is_known = effect.how in taken or (cell in decodes[:1] and effect.saves_s <= saves_s)
            if not is_known and (cell not in decodes[1:] or effect.id is ChangeId.UNWINDOWED):
                taken.add(effect.how)
                found.append((cell, effect))
    return found


def _not_tried_sentence(cell: Judged, effect: ChangeEffect, cut: Sequence[NotTried]) -> str:
    step = "step" if cell.key.phase == "decode" else "prefill"
    once = ""
    if effect.preparing_s:
        is_said = any(item.line == effect.how for item in cut)
        budget = "" if is_said else f", for which --budget {budget_for(effect.preparing_s)} has time"
        once = f" It compiles for about {effect.preparing_s:.0f} s once{budget}."
    return (
        f"Not tried: {effect.how}. Of the {duration(cell.terms.latency_s)} {step} of {cell.key.cell.name} it would save"
        f" {effect.amount} (computed: {effect.because}).{once}"
    )


def _cut_sentences(cut: Sequence[NotTried]) -> list[str]:
    if not cut:
        return []
    ranked = sorted(cut, key=lambda item: item.needs_s)
    *most, longest = itertools.accumulate(item.needs_s for item in ranked)
    budgets = f"--budget {budget_for(longest)} has time for that"
    if most and budget_for(most[-1]) < budget_for(longest) / 1.5:
        all_but = f"all but {ranked[-1].form}"
        budgets = f"--budget {budget_for(most[-1])} has time for {all_but}, {budget_for(longest)} for it"
    return [f"No time was left to try {', '.join(item.form for item in ranked)}: {budgets}."]


def budget_for(trials_s: float) -> int:
    """Return a budget in seconds, in whole half minutes, whose share for trials has time for `trials_s` more.

    That is more than the share of a minute, which the other trials take.
    """
    return 60 + 30 * math.ceil(trials_s / STANDARD.shares["trials"] / 30)


def _engine_sentences(first: Judged, differences: Sequence[EngineDifference]) -> list[str]:
    engine, step_s = first.key.cell.engine, first.terms.latency_s
    return [
        f"The engine {item.engine} {'saves' if item.saves_s >= 0 else 'adds'} {duration(abs(item.saves_s))}"
        f" {'of' if item.saves_s >= 0 else 'to'} the {duration(step_s)} step of"
        f" {engine}{f': {causes}' if (causes := causes_of(item)) else ''}."
        for item in differences
        if item.is_claim and item.key.on(engine) == first.key
    ]


def _because(cell: Judged, setting: Setting) -> str:
    regime, s = cell.verdict.regime, cell.terms
    if regime == "memory-bound":
        return _memory_bound(cell, setting)
    if regime == "compute-bound":
        return (
            f"compute-bound{_throttled(cell)}: {duration(s.latency_s)} per step, at"
            f" {percent(cell.timed.flops_per_s / cell.ceiling_flops_per_s)}"
            f" of the {_compute_ceiling(cell, setting)}"
        )
    if regime == "overhead-bound":
        return f"overhead-bound: of {duration(s.latency_s)}, {_overhead(cell, setting)}"
    if regime == "slow-kernels":
        lost_s = s.kernel_s + s.dequantise_s
        how = f", {duration(s.dequantise_s)} of it dequantising" if s.dequantise_s >= 0.1 * lost_s else ""
        longest = "".join(
            f"; the longest is {kernel.name}, {duration(kernel.seconds)} in {several(kernel.calls, 'call', 'calls')}"
            for kernel in cell.longest[:1]
        )
        return (
            f"limited by slow kernels: of {duration(s.latency_s)}, the library's kernels lose {duration(lost_s)}"
            f" against their ceilings{how}{longest}"
        )
    if regime == "link-bound":
        crossing, to = ("the ranks' results", "the link") if cell.timed.is_on_ranks else ("weights", "to the device")
        return f"link-bound: of {duration(s.latency_s)}, {crossing} take {duration(s.link_s)} to cross {to}"
    return _no_single_limit(cell)


def _memory_bound(cell: Judged, setting: Setting) -> str:
    s, ceiling_per_s = cell.terms, cell.ceilings.memory_bytes_per_s
    kv = " (mostly KV cache)" if Flag.KV_BOUND in cell.verdict.flags else ""
    cached = " from its caches" if Flag.CACHE_RESIDENT in cell.verdict.flags else ""
    others = ("overhead_s", "generate_s", "dequantise_s", "kernel_s", "redundant_s", "padding_s")
    term = max(others, key=lambda name: getattr(s, name))
    name = "generate itself" if term == "generate_s" else TERM_NAMES[term]
    is_named = getattr(s, term) >= _LEAST_STEP_SHARE * s.latency_s
    other = f", {duration(getattr(s, term))} of it {name}" if is_named else ""
    return (
        f"memory-bound{kv}: {duration(s.latency_s)} per step, at {percent(cell.timed.bytes_per_s / ceiling_per_s)} of"
        f" the {scaled(ceiling_per_s, 'B/s')} {_source(setting)}{cached}{other}"
    )


def _no_single_limit(cell: Judged) -> str:
    regime, s = cell.verdict.regime, cell.terms
    if -s.unexplained_s > s.latency_s:
        return (
            f"{regime}: its parts took {duration(s.latency_s - s.unexplained_s)} when each was measured by itself, and"
            f" the whole step only {duration(s.latency_s)}; the machine's speed changed in between"
        )
    is_far = regime == "inconclusive" and Flag.INEFFICIENT_KERNELS in cell.verdict.flags
    where = ", far from every ceiling" if is_far else ""
    paced = ""
    if regime == "mixed" and cell.host_pace_s >= PACED_SHARE * s.latency_s:
        paced = f"; its host takes {duration(cell.host_pace_s)} to launch it, so both set its pace"
    # Parts that add up to more than the step leave a negative rest, which is named like any other term.
    ranked = sorted(TERMS, key=lambda term: -abs(getattr(s, term)))[:3]
    terms = ", ".join(f"{TERMS[term].clause} {duration(getattr(s, term))}" for term in ranked)
    return f"{regime}{where}: of {duration(s.latency_s)}, {terms}{paced}"


def _source(setting: Setting) -> str:
    return "measured here" if setting.measured else "expected"


def _compute_ceiling(cell: Judged, setting: Setting) -> str:
    per_s = cell.ceiling_flops_per_s
    ceiling, at_clock = scaled(per_s / cell.timed.clock_share, "FLOP/s"), scaled(per_s, "FLOP/s")
    ends = " to ".join(dict.fromkeys(scaled(end, "FLOP/s") for end in setting.sustained_flops_per_s))
    sustained = f"{ends} under load" if " to " in ends else f"{ceiling} {_source(setting)}"
    return sustained if ceiling == at_clock else f"{at_clock} at its clock ({sustained})"


def _overhead(cell: Judged, setting: Setting) -> str:
    s = cell.terms
    graph_saves_s = s.latency_s - (cell.measurement.graph_step_s or s.latency_s)
    if s.generate_s > max(s.overhead_s, s.engine_s):
        return f"generate itself takes {duration(s.generate_s)}"
    if s.engine_s > s.overhead_s:
        return f"the engine takes {duration(s.engine_s)}, while the device idles"
    if setting.here.on_gpu:  # the rest of overhead overlaps with the GPU's work
        pace_s, overhead = cell.host_pace_s, cell.ceilings.overhead
        least_s = min(overhead.least_s, overhead.step_s) if overhead else 0.0
        ends_s = least_s or pace_s, max(pace_s, cell.timed.undisturbed_s)
        host = " to ".join(dict.fromkeys(map(duration, ends_s)))
        graph = f"; the same work as one graph saves {duration(graph_saves_s)}" if graph_saves_s > s.overhead_s else ""
        return f"the host needs {host}, in which the GPU works {duration(s.busy_s)}{graph}"
    if s.overhead_s > s.latency_s:  # measured minutes apart
        return f"overhead takes all ({duration(s.overhead_s)} when measured by itself)"
    return f"overhead takes {duration(s.overhead_s)}"


def _throttled(cell: Judged) -> str:
    is_throttled = Flag.THROTTLED in cell.verdict.flags
    return f", throttled at {percent(cell.timed.clock_share)} of its clock" if is_throttled else ""


def _decode_sentence(decodes: Sequence[Judged], setting: Setting) -> str:
    first = decodes[0]
    series = [cell for cell in decodes if cell.key.cell.depth == first.key.cell.depth]
    regime, change = series[-1].verdict.regime, ""
    if regime != first.verdict.regime:
        since = list(itertools.takewhile(lambda cell: cell.verdict.regime == regime, reversed(series)))[-1]
        change = f"; from batch {since.key.cell.batch_size} on it is {_because(since, setting)}"
    return f"Decode at batch {first.key.cell.batch_size} is {_because(first, setting)}{change}."


def _prefill_sentence(prefills: Sequence[Judged], setting: Setting) -> str:
    best = max(prefills, key=lambda cell: cell.timed.flops_per_s)
    others = [cell.key.tokens for cell in prefills if cell.verdict.regime != "compute-bound"]
    bound = [cell for cell in prefills if cell.key.tokens > max(others, default=0)]
    if Flag.ABOVE_CEILING in best.verdict.flags:
        return (
            f"Prefill at batch {best.key.cell.name} is faster than a measured ceiling allows"
            f" ({significant(best.timed.tokens_per_s)} tokens/s): {WHY_TOO_FAST}."
        )
    if bound:
        since = f" from {min(cell.key.tokens for cell in bound)} tokens" if others else ""
        return (
            f"Prefill is compute-bound{_throttled(best)}{since}: up to"
            f" {percent(best.timed.flops_per_s / best.ceiling_flops_per_s)} of the {_compute_ceiling(best, setting)},"
            f" {significant(best.timed.tokens_per_s)} tokens/s at batch {best.key.cell.name}."
        )
    return f"Prefill at batch {best.key.cell.name} is {_because(best, setting)}."


def _no_change(cell: Judged) -> str:
    if Flag.ABOVE_CEILING in cell.verdict.flags:
        return (
            f"No advice: the step is faster than a measured ceiling allows, so {WHY_TOO_FAST}."
            " Measure again with --fresh."
        )
    s, tried = cell.terms, [item.trial.form for item in cell.tried if item.trial.line]
    at = f"this step is at {percent(s.attained)} of its roofline"
    if s.attained >= _NEAR_CEILING:
        return f"Nothing to gain but a faster device: {at}, and no change saves 5 % of it."
    share = s.unexplained_s / s.latency_s
    unknown = f", and {percent(share)} of it is unexplained" if share > _LEAST_STEP_SHARE else ""
    of_tried = f" Tried: {', '.join(tried)}." if tried else ""
    return f"No change is known that saves 5 %: {at}{unknown}.{of_tried}"


def _batch_sentences(decodes: Sequence[Judged]) -> list[str]:
    if not decodes:
        return []
    first = decodes[0]
    alike = [cell for cell in decodes if cell.key.cell.depth == first.key.cell.depth]
    series = alike if len(alike) > 1 else [first, *(cell for cell in decodes if cell.key.cell.batch_size > 1)]
    best = series[best_of([cell.timed.tokens_per_s for cell in series])]
    is_larger = best.key.cell.batch_size > first.key.cell.batch_size
    if not is_larger or best.timed.tokens_per_s <= 1.1 * first.timed.tokens_per_s:
        return []
    longer = best.terms.latency_s / first.terms.latency_s - 1
    where = f"the step {percent(longer)} longer" if longer > 0 else "the step takes no longer"
    if best not in alike:
        where = f"at {best.key.cell.name} and {first.key.cell.name}"
    return [
        f"{best.key.cell.batch_size} sequences a step: {significant(best.timed.tokens_per_s)} instead of"
        f" {significant(first.timed.tokens_per_s)} tokens/s, {where}."
    ]


def _first_use_sentences(decodes: Sequence[Judged]) -> list[str]:
    for first_s, later_s in ((cell.timed.first_use_s, cell.terms.latency_s) for cell in decodes):
        if first_s is None:
            continue
        lines = (item for each in decodes for item in each.tried if item.trial.line)
        is_tried = any(item.change is ChangeId.WITHOUT_CUDNN for item in lines)
        switch = "" if is_tried else f" Not tried: {WITHOUT_CUDNN.line} would save about {duration(first_s - later_s)}."
        return [
            f"The first time at each KV length a step takes {duration(first_s)}, not {duration(later_s)}: cuDNN builds"
            f" a plan per length, batch size and process.{switch}"
        ]
    return []
