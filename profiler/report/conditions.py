"""What only some runs have: unequal prompts and ranks."""

from __future__ import annotations

from collections.abc import Iterator

from profiler.judge.padding import RaggedStep
from profiler.report.blocks import FULL, Lines, Section, evenly, text_table
from profiler.stats import CLAIM_VISITS
from profiler.store.folder import Run
from profiler.units import duration, percent, scaled, signed_duration


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
    """The number of ranks, and their link."""
    link = run.document.ceilings.collective
    if run.document.ranks < 2 or link is None:
        return None
    head = (
        f"{run.document.ranks} ranks, each with {scaled(run.model.storage_bytes, 'B')} of weights, by {link.name}:"
        f" {duration(link.alpha_s)} per message and {scaled(link.bus_bytes_per_s, 'B/s')} (busbw)"
    )
    return Section("Ranks", [Lines([head])], "measured between the ranks", FULL)
