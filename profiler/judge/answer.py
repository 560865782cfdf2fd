"""The answer of a run in sentences: the limits of prefill and decode, and the best changes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from profiler.facts.measurements import WITHOUT_CUDNN
from profiler.facts.operators import COLLECTIVE
from profiler.judge.breakdown import TERM_NAMES, TERMS, WHY_TOO_FAST, TimeBreakdown
from profiler.judge.cells import EngineDifference, JudgedCell, Lever
from profiler.judge.engine_differences import causes_of, engine_change
from profiler.judge.how_to import UNWINDOWED, how_to
from profiler.judge.levers import Setting, best_lever, next_tried
from profiler.judge.regimes import PACED_SHARE, Flag
from profiler.judge.scaling import best_of
from profiler.units import duration, percent, saving, scaled, several, significant

# Changes that save less than this share of a cell other than the first are not named.
_LEAST_SAVING = 0.1
# Terms below this share of a step are not named.
_LEAST_STEP_SHARE = 0.1
# Within a model, the best streams and matrix products of GPUs reach 0.8 to 0.95 of their roofs.
_NEAR_ROOF = 0.8


def answer(
    cells: Sequence[JudgedCell],
    setting: Setting,
    differences: Sequence[EngineDifference] = (),
    busy: Sequence[str] = (),
) -> list[str]:
    """Summarise a run in a few sentences, the most useful first; empty if nothing was measured.

    They describe the first engine. Further engines are compared with it: the best change may be one, and each other one
    has a sentence. Another GPU is never the best change. `busy` are sentences about a busy machine: they come first,
    and then no saving is named. Cells that are not usable are in no sentence.
    """
    sentences = list(busy) if cells else []
    engine = cells[0].key.cell.engine if cells else ""
    cells = [cell for cell in cells if cell.key.cell.engine == engine]
    phases = {cell.key.phase for cell in cells}
    cells = [cell for cell in cells if cell.usable]
    decodes = sorted(
        (c for c in cells if c.key.phase == "decode"), key=lambda c: (c.key.cell.batch_size, c.key.cell.depth)
    )
    prefills = sorted((c for c in cells if c.key.phase == "prefill"), key=lambda c: c.key.tokens)
    if decodes:
        first = decodes[0]
        sentences.append(
            f"Decode at batch {first.key.cell.batch_size} is {_because(first, setting)}"
            f"{_where_it_changes(decodes, setting)}."
        )
    if prefills:
        sentences.append(_prefill_sentence(prefills, setting))
    for phase in sorted(phases - {cell.key.phase for cell in cells}):
        sentences.append(f"No time of a {phase} is known to within a tenth: measure again on a quieter machine.")
    if busy:
        return sentences
    if decodes:
        lever = best_lever(decodes[0])
        others = [item for item in differences if lever is None or engine_change(item) != lever.change]
        sentences += [
            *_change_sentences(decodes, lever),
            *_change_elsewhere(decodes[1:], lever),
            *_first_use_sentences(decodes),
            *_change_elsewhere(prefills, lever),
            *_engine_sentences(decodes[0], others),
        ]
    elif prefills:
        sentences += _change_sentences(prefills, best_lever(prefills[0]))
    return sentences


def _change_elsewhere(cells: Sequence[JudgedCell], of_step: Lever | None) -> list[str]:
    """The best change of the largest cell, if it saves at least a tenth; its line, unless `of_step` has that.

    Of a decode step, only what a full window costs, which grows with the batch.
    """
    if not cells:
        return []
    cell = cells[-1]
    best, least_s, is_prefill = best_lever(cell), _LEAST_SAVING * cell.split.latency_s, cell.key.phase == "prefill"
    if best is None or best.saves_s < least_s or not (is_prefill or best.change == UNWINDOWED):
        return []
    of_step_how = of_step.how if of_step is not None else ""
    to_change = "Instead of the step's change" if _sets(best.how) == _sets(of_step_how) else "To change it"
    how = f" {to_change}, write: {best.how}." if best.how not in ("", of_step_how) else ""
    return [
        f"{'In a prefill of' if is_prefill else 'At batch'} {cell.key.cell.name} {_saving(best)} of"
        f" {duration(cell.split.latency_s)} ({best.basis}: {best.because}).{how}"
    ]


def _sets(how: str) -> str:
    """The argument or attribute that a line sets. Two lines that set the same one exclude each other."""
    return how.partition("=")[0]


def _engine_sentences(first: JudgedCell, differences: Sequence[EngineDifference]) -> list[str]:
    """The saving of every other engine on the step of the first cell, if it is beyond noise."""
    engine, step_s = first.key.cell.engine, first.split.latency_s
    return [
        f"The engine {item.engine} {saving(item.saves_s)} of the {duration(step_s)} step against"
        f" {engine}{f': {causes}' if (causes := causes_of(item)) else ''}."
        for item in differences
        if item.is_claim and replace(item.key, cell=replace(item.key.cell, engine=engine)) == first.key
    ]


def _because(cell: JudgedCell, setting: Setting) -> str:
    regime, s = cell.verdict.regime, cell.split
    if regime == "memory-bound":
        kv = " (mostly KV cache)" if Flag.KV_BOUND in cell.verdict.flags else ""
        cached = " from its caches" if Flag.CACHE_RESIDENT in cell.verdict.flags else ""
        return (
            f"memory-bound{kv}: {duration(s.latency_s)} per step, at"
            f" {percent(cell.bytes_per_s / cell.roof_bytes_per_s)} of the {scaled(cell.roof_bytes_per_s, 'B/s')}"
            f" {_source(setting)}{cached}{_largest_other_term(s)}"
        )
    if regime == "compute-bound":
        return (
            f"compute-bound{_throttled(cell)}: {duration(s.latency_s)} per step, at"
            f" {percent(cell.flops_per_s / cell.roof_flops_per_s)} of the {_compute_roof(cell, setting)}"
        )
    if regime == "overhead-bound":
        return f"overhead-bound: of {duration(s.latency_s)}, {_overhead(cell, setting)}"
    if regime == "kernel-bound":
        lost_s = s.kernel_s + s.dequantise_s
        how = f", {duration(s.dequantise_s)} of it dequantising" if s.dequantise_s >= 0.1 * lost_s else ""
        longest = "".join(
            f"; the longest is {kernel.name}, {duration(kernel.seconds)} in {several(kernel.calls, 'call', 'calls')}"
            for kernel in cell.longest[:1]
        )
        return (
            f"kernel-bound: of {duration(s.latency_s)}, the library's kernels lose {duration(lost_s)} against their"
            f" roofs{how}{longest}"
        )
    if regime == "link-bound":
        is_split = any(item.group == COLLECTIVE for item in cell.operators)
        crossing = "the ranks' results" if is_split else "weights"
        to = "the link" if is_split else "to the device"
        return f"link-bound: of {duration(s.latency_s)}, {crossing} take {duration(s.link_s)} to cross {to}"
    if -s.unexplained_s > s.latency_s:
        parts_s = s.latency_s - s.unexplained_s
        return (
            f"{regime}: its parts took {duration(parts_s)} when each was measured by itself, and the whole step only"
            f" {duration(s.latency_s)}; the machine's speed changed in between"
        )
    where = (
        ", far from every roof" if regime == "inconclusive" and Flag.INEFFICIENT_KERNELS in cell.verdict.flags else ""
    )
    paced = ""
    if regime == "mixed" and cell.host_pace_s >= PACED_SHARE * s.latency_s:
        paced = f"; its host takes {duration(cell.host_pace_s)} to dispatch it, so both set its pace"
    return f"{regime}{where}: of {duration(s.latency_s)}, {_largest_terms(s)}{paced}"


def _source(setting: Setting) -> str:
    """Where the roofs come from, in words that follow a roof."""
    return "measured here" if setting.measured else "expected"


def _compute_roof(cell: JudgedCell, setting: Setting) -> str:
    """A cell's compute roof: at its clock, with the range of the measured one if the clock was another then."""
    roof, at_clock = scaled(cell.roof_flops_per_s / cell.clock_share, "FLOP/s"), scaled(cell.roof_flops_per_s, "FLOP/s")
    ends = " to ".join(dict.fromkeys(scaled(end, "FLOP/s") for end in setting.sustained_flops_per_s))
    sustained = f"{ends} under load" if " to " in ends else f"{roof} {_source(setting)}"
    return sustained if roof == at_clock else f"{at_clock} at its clock ({sustained})"


def _overhead(cell: JudgedCell, setting: Setting) -> str:
    s = cell.split
    graph_saves_s = s.latency_s - (cell.graph_step_s or s.latency_s)
    if s.generate_s > max(s.dispatch_s, s.engine_s):
        return f"generate itself takes {duration(s.generate_s)}"
    if s.engine_s > s.dispatch_s:
        return f"the engine takes {duration(s.engine_s)}, while the device idles"
    if setting.can_graph:  # the rest of dispatch overlaps with the GPU's work
        ends_s = cell.host_least_s or cell.host_pace_s, max(cell.host_pace_s, cell.undisturbed_s or 0.0)
        host = " to ".join(dict.fromkeys(map(duration, ends_s)))
        graph = f"; the same work as one graph saves {duration(graph_saves_s)}" if graph_saves_s > s.dispatch_s else ""
        return f"the host needs {host}, in which the GPU works {duration(s.busy_s)}{graph}"
    if s.dispatch_s > s.latency_s:  # measured minutes apart
        return f"dispatch takes all ({duration(s.dispatch_s)} when measured by itself)"
    return f"dispatch takes {duration(s.dispatch_s)}"


def _throttled(cell: JudgedCell) -> str:
    return f", throttled at {percent(cell.clock_share)} of its clock" if Flag.THROTTLED in cell.verdict.flags else ""


def _where_it_changes(decodes: Sequence[JudgedCell], setting: Setting) -> str:
    """The batch from which all larger ones have another regime, at the prompt length of the first cell."""
    first = decodes[0]
    series = [cell for cell in decodes if cell.key.cell.depth == first.key.cell.depth]
    regime = series[-1].verdict.regime
    if regime == first.verdict.regime:
        return ""
    since = list(itertools.takewhile(lambda cell: cell.verdict.regime == regime, reversed(series)))[-1]
    return f"; from batch {since.key.cell.batch_size} on it is {_because(since, setting)}"


def _largest_other_term(s: TimeBreakdown) -> str:
    """The largest term besides weights, KV cache and arithmetic, if it is a tenth of the step."""
    terms = ("dispatch_s", "generate_s", "dequantise_s", "kernel_s", "avoidable_s", "padding_s")
    term = max(terms, key=lambda name: getattr(s, name))
    if getattr(s, term) < _LEAST_STEP_SHARE * s.latency_s:
        return ""
    name = "generate itself" if term == "generate_s" else TERM_NAMES[term]
    return f", {duration(getattr(s, term))} of it {name}"


def _largest_terms(s: TimeBreakdown) -> str:
    # Parts that add up to more than the step leave a negative rest, which is named like any other term.
    ranked = sorted(TERMS, key=lambda term: -abs(getattr(s, term)))[:3]
    return ", ".join(f"{TERMS[term].clause} {duration(getattr(s, term))}" for term in ranked)


def _prefill_sentence(prefills: Sequence[JudgedCell], setting: Setting) -> str:
    best = max(prefills, key=lambda cell: cell.flops_per_s)
    others = [cell.key.tokens for cell in prefills if cell.verdict.regime != "compute-bound"]
    bound = [cell for cell in prefills if cell.key.tokens > max(others, default=0)]
    if Flag.ABOVE_ROOF in best.verdict.flags:
        return (
            f"Prefill at batch {best.key.cell.name} is faster than a measured roof allows"
            f" ({significant(best.tokens_per_s)} tokens/s): {WHY_TOO_FAST}."
        )
    if bound:
        since = f" from {min(cell.key.tokens for cell in bound)} tokens" if others else ""
        share = best.flops_per_s / best.roof_flops_per_s
        return (
            f"Prefill is compute-bound{_throttled(best)}{since}: up to {percent(share)}"
            f" of the {_compute_roof(best, setting)},"
            f" {significant(best.tokens_per_s)} tokens/s at batch {best.key.cell.name}."
        )
    return f"Prefill at batch {best.key.cell.name} is {_because(best, setting)}."


def _saving(lever: Lever) -> str:
    return f"{lever.change} {'would save' if lever.basis == 'computed' else 'saves'} {lever.amount}"


def _no_change(s: TimeBreakdown) -> str:
    """The sentence for a step that no lever shortens: it is near its roof, or its time is partly unexplained."""
    at = f"this step is at {percent(s.attained)} of its roofline"
    if s.attained >= _NEAR_ROOF:
        return f"Nothing to gain but a faster device: {at}, and no change saves 5 % of it."
    share = s.unexplained_s / s.latency_s
    unknown = f", and {percent(share)} of it is unexplained" if share > _LEAST_STEP_SHARE else ""
    return f"No change is known that saves 5 %: {at}{unknown}."


def _change_sentences(cells: Sequence[JudgedCell], lever: Lever | None) -> list[str]:
    """What shortens the first step, and how it is written; then the batch with the most tokens per second."""
    first, batch = cells[0], _batch_words(cells)
    if lever is not None:
        saves = f"{_saving(lever)} of the {duration(first.split.latency_s)} step ({lever.basis}: {lever.because})"
        batches = [f"{batch[:1].upper()}{batch[1:]}."] if batch else []
        return [f"What to change: {saves}.", *_how_sentences(first, lever), *batches]
    if batch:
        return [f"What to change: {batch}."]
    if Flag.ABOVE_ROOF in first.verdict.flags:
        return [
            f"No advice: the step is faster than a measured roof allows, so {WHY_TOO_FAST}. Measure again with --fresh."
        ]
    return [_no_change(first.split)]


def _batch_words(cells: Sequence[JudgedCell]) -> str:
    """The batch with the most tokens per second, at the depth of the first cell; empty if it gains under a tenth."""
    first = cells[0]
    alike = [cell for cell in cells if cell.key.cell.depth == first.key.cell.depth]
    best = alike[best_of([cell.tokens_per_s for cell in alike])]
    gain = best.tokens_per_s / first.tokens_per_s
    if best.key.cell.batch_size <= first.key.cell.batch_size or gain <= 1.1:
        return ""
    cost, a_token_s = best.split.latency_s / first.split.latency_s, best.split.latency_s / best.key.cell.batch_size
    return (
        f"batch {best.key.cell.batch_size} gives {significant(gain, 2)}x the tokens/s"
        f" for {significant(cost, 2)}x the step, {duration(a_token_s)} a token"
    )


def _first_use_sentences(decodes: Sequence[JudgedCell]) -> list[str]:
    """What a step costs at a KV length that is new to the process, and the switch that avoids it.

    The cell that warmed up the engine may have used all its lengths then.
    """
    times_s = ((cell.first_use_s, cell.split.latency_s) for cell in decodes if cell.first_use_s is not None)
    return [
        f"The first time at each KV length a step takes {duration(first_s)}, not {duration(later_s)}: cuDNN builds a"
        f" plan per length, batch size and process. {how_to(WITHOUT_CUDNN, on_gpu=True).line} would"
        f" save about {duration(first_s - later_s)} there; a static cache has one length."
        for first_s, later_s in itertools.islice(times_s, 1)
    ]


def _how_sentences(cell: JudgedCell, lever: Lever) -> list[str]:
    """The line to paste for a cell's best change, and what measures it; then another one, and one not tried."""
    sentences = []
    if lever.how:
        whole = (
            f" Add {lever.measured_by} to this command to measure it on the whole model." if lever.measured_by else ""
        )
        sentences.append(f"To change it, write: {lever.how}.{whole}")
    if (other := next_tried(cell, lever)) is not None:
        sentences.append(f"By itself, {_saving(other)} (tried): {other.how}.")
    more = next((item for item in cell.levers if (item.at_least_s or 0.0) > lever.saves_s), None)
    if more is not None and more.change != lever.change:
        sentences.append(
            f"Not tried: {more.change} would save {more.amount} ({more.because}); {more.measured_by} measures it."
        )
    return sentences
