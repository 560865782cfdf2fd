"""A trial fits into its time: it runs in full, runs shortened, or does not start."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hurry import with_effort
from planted_faults import tiny_llama

import profiler
from profiler.device.clock import now_s
from profiler.why_slow.findings import is_settled, pairs_agree
from profiler.why_slow.observations import Call
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.repeat_call import (
    CallGroup,
    Candidate,
    EvenRunSequence,
    RepeatedCall,
    Steps,
    WeightedRun,
    Whole,
    repeat,
)
from profiler.why_slow.trials import TrialPlan, UntriedChanges, plan_trial, run_trial, usual_saving

SETTINGS = {"gradients": "off", "cache": "off"}


def generate(new_tokens: int) -> RepeatedCall:
    call = Call(0, "generate", "Llama", 1, 8, 0, new_tokens, new_tokens, 1.0, "s.py:4", SETTINGS)
    noted: Any = None
    return RepeatedCall(noted, call, tiny_llama)


def candidate(seconds: float, new_tokens: int = 0, prompt_s: float = 0.0, **more: Any) -> Candidate:
    run = generate(new_tokens) if new_tokens else Whole(lambda: None)
    return Candidate(
        "beams", "four beams", "one", "s.py:4", run, run, (seconds,), new_tokens=new_tokens, prompt_s=prompt_s, **more
    )


def test_a_call_is_repeated_whole_if_five_pairs_fit() -> None:
    """Beams usually save 60 %, so five pairs are five runs of 1 s and six of 0.4 s."""
    assert plan_trial(candidate(1.0), 7.41) == TrialPlan(7.41, pytest.approx(4.6))  # type: ignore[arg-type]
    assert plan_trial(candidate(1.0, new_tokens=100), 7.41).tokens == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(("allowed_s", "repeats"), [(2.4, 2), (5.0, 3), (100.0, 6)])
def test_a_short_call_is_repeated_within_a_side(allowed_s: float, repeats: int) -> None:
    """A 0.1 s call is repeated for 0.2 s, or for up to 0.6 s if there is time.

    There is time if eight runs and nine changed runs, each 40 % of a run, fit into it.
    """
    assert plan_trial(candidate(0.1), allowed_s).repeats == repeats  # type: ignore[union-attr]


def test_a_long_generate_is_shortened() -> None:
    """A call has 1 s of prompt and 99 steps of 0.1 s. Each of 8.4 sides gets 6 of 50.4 s: two prompts and 40 steps."""
    plan = plan_trial(candidate(10.9, 100, prompt_s=1.0), 50.41)
    assert isinstance(plan, TrialPlan)
    assert plan.tokens == 40


def test_three_pairs_are_the_fewest() -> None:
    """Three pairs of a 1 s forward need 4.6 s. A `generate` of 10 ms steps needs 5.6 times four steps, 0.224 s."""
    assert plan_trial(candidate(1.0), 4.61) == TrialPlan(4.61, pytest.approx(4.6))  # type: ignore[arg-type]
    assert plan_trial(candidate(1.0), 4.5) == pytest.approx(4.6)
    shortest = plan_trial(candidate(0.99, 100), 0.23)
    assert isinstance(shortest, TrialPlan)
    assert (shortest.tokens, shortest.least_s) == (4, pytest.approx(0.224))
    assert plan_trial(candidate(0.99, 100), 0.22) == pytest.approx(0.224)
    assert plan_trial(candidate(1.0, alone=True), 3.9) == 4.0, "one run before the three pairs"


def test_two_tokens_stand_for_a_short_answer_without_a_cache_only() -> None:
    """With steps of 100 ms, 5.6 times two steps need 1.12 s, and 5.6 times four need 2.24 s."""
    assert plan_trial(replace(candidate(1.5, 16), prompts=3), 1.1) == pytest.approx(1.12)
    assert plan_trial(replace(candidate(1.6, 17), prompts=3), 1.1) == pytest.approx(2.24)
    assert plan_trial(candidate(1.5, 16), 1.1) > 1.2


def test_three_pairs_of_the_prompt_stand_for_a_call_of_which_much_is_its_prompt() -> None:
    """The prompt takes 4 s of a 6 s call. Three full pairs need 4.6 times 6 s, three pairs of prompts 4.6 times 4 s."""
    padded = replace(candidate(6.0, 16, prompt_s=4.0), saves_in_prompt=True)
    assert plan_trial(padded, 37.0) == TrialPlan(37.0, pytest.approx(27.6))  # type: ignore[arg-type]
    assert plan_trial(padded, 27.0) == TrialPlan(27.0, pytest.approx(18.4), tokens=1)  # type: ignore[arg-type]
    assert plan_trial(padded, 18.0) == pytest.approx(18.4)
    assert plan_trial(replace(padded, saves_in_prompt=False), 26.0) == pytest.approx(27.6)
    assert plan_trial(replace(padded, prompt_s=1.4), 6.0) > 20.0, "the prompt is a small part of the call"
    assert plan_trial(replace(padded, changed=Whole(lambda: None)), 27.0) == pytest.approx(27.6)


def test_a_batch_is_expected_to_save_only_after_the_prompts() -> None:
    """Prompts take 7 of 10 s. A batch usually saves 60 % of the other 3 s, and a shared prefix half of all 10 s."""
    batch, prefix = (replace(candidate(10.0, 16, prompt_s=7.0), id=name) for name in ("one-by-one", "shared-prefix"))
    assert usual_saving(batch) == pytest.approx(0.18)
    assert usual_saving(replace(batch, prompt_s=0.0)) == pytest.approx(0.6)
    assert usual_saving(prefix) == pytest.approx(0.5)


class Sleeps:
    """A `generate` whose prompt takes `prompt_s` and whose other tokens take 0.28 s."""

    def __init__(self, prompt_s: float) -> None:
        self.prompt = lambda: time.sleep(prompt_s)

    def __call__(self) -> object:
        return self.prompt(), time.sleep(0.28)

    def shortened(self, tokens: int) -> tuple[WeightedRun, ...]:
        return (WeightedRun(1.0, self.prompt if tokens == 1 else self),)


def test_in_a_trial_of_the_prompt_the_other_tokens_count_as_unchanged() -> None:
    """The change halves a prompt of 0.32 s in a call of 0.6 s."""
    padded = replace(candidate(0.6, 16, prompt_s=0.32), saves_in_prompt=True, as_is=Sleeps(0.32), changed=Sleeps(0.16))
    plan = plan_trial(padded, 1.5)
    assert isinstance(plan, TrialPlan)
    assert plan.tokens == 1
    call = Call(0, "generate", "Llama", 8, 64, 0, 16, 16, 0.6, "s.py:4", SETTINGS)
    noted: Any = SimpleNamespace(arguments=())
    trial = run_trial(padded, CallGroup([call], [noted], None, "s.py:1"), plan, now_s() + 60.0)
    assert trial.saving == pytest.approx(0.16 / 0.6, rel=0.1)
    assert trial.shape.endswith("its prompt only")


def test_a_shortened_call_stands_for_all_of_its_tokens() -> None:
    """Without a cache, 9 tokens give the time of 101: 3 s of prompt, and steps of 0.5 s plus 1 ms per context token."""
    seconds = {}

    def run(_call: object, new_tokens: int, further: int = 0) -> float:
        steps = range(further + 1, further + new_tokens)
        return 3.0 + 0.02 * further + sum(0.5 + 0.001 * step for step in steps)

    parts = generate(101).shortened(9)
    for part in parts:
        seconds[part] = part.weight * run(None, *part.run.args)  # type: ignore[attr-defined]
    assert sum(seconds.values()) == pytest.approx(run(None, 101), rel=1e-3)


def test_what_cannot_be_shortened() -> None:
    assert Whole(lambda: None).shortened(8) == ()
    assert generate(100).shortened(0) == ()
    short = generate(8)
    assert short.shortened(8) == (WeightedRun(1.0, short),)


def test_a_shortened_call_runs_with_a_longer_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 of 21 tokens are generated: with a cache after the prompt of 8 tokens, without one after 8 further tokens."""
    model, recorder = tiny_llama(), Recorder()
    ids = torch.arange(8)[None]
    with watched(recorder):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=21, do_sample=False)
    [call], [noted] = recorder.seen("s.py").calls, recorder.notes
    without_cache = replace(call, settings={**call.settings, "cache": "off"})
    lengths: list[tuple[int, int, int]] = []
    generate = model.generate

    def recorded(ids: Any, attention_mask: Any, **options: Any) -> Any:
        lengths.append((ids.shape[1], attention_mask.shape[1], options["max_new_tokens"]))
        return generate(ids, attention_mask=attention_mask, **options)

    monkeypatch.setattr(model, "generate", recorded)
    for each, weights in ((without_cache, [1.0, 5.0, -5.0]), (call, [-4.0, 5.0])):
        parts = repeat(noted, each, model).shortened(5)
        for part in parts:
            part.run()
        assert [part.weight for part in parts] == weights
    assert lengths == [(8, 8, 1), (16, 16, 5), (16, 16, 1), (8, 8, 1), (8, 8, 5)]


def test_some_forwards_stand_for_a_loop() -> None:
    """Six of 48 forwards of 1 to 48 s represent all 1176 s. A prompt and some steps represent a loop with a cache."""
    forwards = [Whole(lambda second=second: second) for second in range(1, 49)]
    parts = EvenRunSequence(forwards).shortened(6)
    assert len(parts) == 6
    assert sum(part.weight * float(str(part.run())) for part in parts) == pytest.approx(1176.0, rel=0.03)
    cached = Steps(lambda steps: 5.0 + 0.5 * steps, 47)
    parts = cached.shortened(6)
    assert [part.run() for part in parts] == [5.0, 7.5]
    assert sum(part.weight * float(str(part.run())) for part in parts) == pytest.approx(float(str(cached())))


def test_what_was_not_tried_is_listed_once_with_the_budget_that_would_try_it() -> None:
    untried = UntriedChanges()
    for where in ("s.py:4", "s.py:9", "s.py:4"):
        untried.add(f"slow-format ({where})", "there is no room for a copy")
    untried.without_time = {"beams (s.py:4)": 41.0, "threads (s.py:9)": 12.0}
    assert untried.lines(30.0) == [
        "slow-format (s.py:4), slow-format (s.py:9): there is no room for a copy",
        "beams (s.py:4), threads (s.py:9): no time was left for 3 pairs; --budget 90 would try them",
    ]


def test_without_a_budget_no_trial_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    with_effort(monkeypatch, script_floor=False)
    model = tiny_llama()
    with profiler.why(budget_s=0.0) as watching:
        model.generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=8, num_beams=2, do_sample=False)
    assert watching.found is not None
    assert watching.found.tried == ()
    [line] = watching.found.not_tried
    assert "beams (test_trial_plan.py" in line
    assert "--budget 10 would try" in line


@pytest.mark.parametrize(
    ("savings", "settled", "agreed"),
    [
        ((0.4, 0.5), False, False),
        ((0.4, 0.5, 0.4), True, True),
        ((0.4, 0.5, 0.2), False, True),
        ((0.11, 0.12, 0.13), True, True),
        ((0.04, 0.12, 0.2), False, False),
        ((0.05, 0.08, 0.1, 0.11), True, True),
        ((0.01, 0.02, 0.1, 0.2), False, False),
        ((0.01, 0.02, 0.1, 0.2, 0.1), True, True),
        ((-0.1, 0.1, -0.1), True, False),
        ((0.1,) * 4 + (-0.1,), False, False),
        ((0.1,) * 7 + (-0.1,), True, True),
        ((0.1,) * 6 + (-0.1, -0.1), True, False),
    ],
)
def test_how_many_pairs_are_enough(savings: tuple[float, ...], settled: bool, agreed: bool) -> None:
    """Enough are a steady saving, three pairs of 30 %, five that agree, or seven of eight that agree.

    The last two happen by chance in 3 % and 4 % of cases. Student's t of the first cases that begin with 0.11, 0.04,
    0.05 and 0.01 is 20.8, 2.6, 6.4 and 1.9.
    """
    rounds = [(1.0, 1 - saving) for saving in savings]
    assert (is_settled(rounds), pairs_agree(rounds)) == (settled, agreed)
