"""What batches of unequal prompts cost, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from profiler.diagnosis.ragged import RaggedStep
from profiler.record.run import Run
from profiler.timing.sampling import CLAIM_VISITS
from profiler.units import duration, percent, signed_duration


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
    told = [f"{lever.change} {_saves(lever.saves_s)} ({lever.basis}: {lever.because})" for lever in step.ways]
    if told:
        yield f"of {'a' if step.phase == 'prefill' else 'that'} {word}: {'; '.join(told)}"


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
