"""A trial fits into its time: it runs in full, runs shortened, or does not start."""

from __future__ import annotations

import re
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
from profiler.stats import student_t
from profiler.why_slow import findings
from profiler.why_slow.findings import Untried, is_settled, pairs_agree
from profiler.why_slow.observations import Call, CallSettings
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.repeat_call import (
    CallGroup,
    Candidate,
    RepeatedCall,
    Run,
    WeightedRun,
    in_even_sequence,
    repeat,
    with_steps,
)
from profiler.why_slow.trials import TrialPlan, plan_trial, run_trial

SETTINGS = CallSettings(cache=False)


def generate(new_tokens: int, *, batched: bool = False) -> Run:
    call = Call(0, "generate", "Llama", 1, 8, 0, new_tokens, new_tokens, 1.0, "s.py:4", SETTINGS)
    noted: Any = SimpleNamespace(batched=batched)
    return RepeatedCall(noted, call, tiny_llama).as_run


def candidate(seconds: float, new_tokens: int = 0, prompt_s: float = 0.0, **more: Any) -> Candidate:
    run = generate(new_tokens) if new_tokens else Run(lambda: None)
    return Candidate(
        "beams", "four beams", "one", "s.py:4", run, run, (seconds,), new_tokens=new_tokens, prompt_s=prompt_s, **more
    )


PADDED = replace(candidate(6.0, 16, prompt_s=4.0), saves_in_prompt=True)
CANDIDATES = {
    "a forward": candidate(1.0),
    "a short forward": candidate(0.1),
    "a forward next to nothing else": candidate(1.0, alone=True),
    "a long generate": candidate(10.9, 100, prompt_s=1.0),
    "a generate of which much is its prompt": PADDED,
}


def needed_s(tried: Candidate) -> float:
    """The seconds that the fewest pairs are said to need."""
    return plan_trial(tried, 0.0)


@pytest.mark.parametrize("tried", CANDIDATES.values(), ids=CANDIDATES)
def test_a_trial_starts_if_and_only_if_it_has_the_time_that_it_is_said_to_need(tried: Candidate) -> None:
    """A user who gives the named budget gets the trial, and its three pairs fit into every larger one.

    The unchanged sides alone are a lower bound of their time: prompts and planned tokens, or the whole call.
    """
    assert isinstance(plan_trial(tried, 0.99 * needed_s(tried)), float)
    step_s = (tried.seconds - tried.prompt_s) / max(1, tried.new_tokens - 1)
    for factor in (1.01, 1.5, 2.0, 5.0, 20.0, 200.0):
        allowed_s = factor * needed_s(tried)
        plan = plan_trial(tried, allowed_s)
        assert isinstance(plan, TrialPlan)
        side_s = tried.prompt_s + (plan.tokens - 1) * step_s if plan.tokens else tried.seconds
        assert 3 * plan.repeats * side_s <= allowed_s
        assert plan.least_s <= allowed_s


class Sleeps:
    """A `generate` whose prompt takes `prompt_s` and whose other tokens take 0.14 s."""

    def __init__(self, prompt_s: float) -> None:
        self.prompt = lambda: time.sleep(prompt_s)

    def __call__(self) -> object:
        return self.prompt(), time.sleep(0.14)

    def shortened(self, tokens: int) -> tuple[WeightedRun, ...]:
        return (WeightedRun(1.0, self.prompt if tokens == 1 else self),)


def test_in_a_trial_of_the_prompt_the_other_tokens_count_as_unchanged() -> None:
    """The change halves a prompt of 0.16 s in a call of 0.3 s."""
    padded = replace(candidate(0.3, 16, prompt_s=0.16), saves_in_prompt=True, as_is=Sleeps(0.16), changed=Sleeps(0.08))
    plan = plan_trial(padded, 1.02 * needed_s(padded))
    assert plan.tokens == 1
    call = Call(0, "generate", "Llama", 8, 64, 0, 16, 16, 0.3, "s.py:4", SETTINGS)
    noted: Any = SimpleNamespace(arguments=())
    trial = run_trial(padded, CallGroup([call], [noted], None, "s.py:1", Recorder()), plan, now_s() + 60.0)
    assert trial.saving == pytest.approx(0.08 / 0.3, rel=0.15)
    assert trial.shape.endswith("its prompt only")


def test_a_shortened_call_stands_for_all_of_its_tokens() -> None:
    """Without a cache, 9 tokens give the time of 101: 3 s of prompt, and steps of 0.5 s plus 1 ms per context token."""

    def run(_call: object, new_tokens: int, further: int = 0) -> float:
        steps = range(further + 1, further + new_tokens)
        return 3.0 + 0.02 * further + sum(0.5 + 0.001 * step for step in steps)

    seconds = [part.weight * run(None, *part.run.args) for part in generate(101).shortened(9)]  # type: ignore[attr-defined]
    assert sum(seconds) == pytest.approx(run(None, 101), rel=1e-3)


def test_a_shortened_call_runs_with_a_longer_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 of 21 tokens are generated: with a cache after the prompt of 8 tokens, without one after 8 further tokens."""
    model, recorder = tiny_llama(), Recorder()
    ids = torch.arange(8)[None]
    with watched(recorder):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=21, do_sample=False)
    [call], [noted] = recorder.seen("s.py").calls, recorder.notes
    without_cache = replace(call, settings=replace(call.settings, cache=False))
    lengths: list[tuple[int, int, int]] = []
    generate = model.generate

    def recorded(inputs: Any, attention_mask: Any, **options: Any) -> Any:
        lengths.append((inputs.shape[1], attention_mask.shape[1], options["max_new_tokens"]))
        return generate(inputs, attention_mask=attention_mask, **options)

    monkeypatch.setattr(model, "generate", recorded)
    for each, weights in ((without_cache, [1.0, 5.0, -5.0]), (call, [-4.0, 5.0])):
        parts = repeat(noted, each, model).shortened(5)
        for part in parts:
            part.run()
        assert [part.weight for part in parts] == weights
    assert lengths == [(8, 8, 1), (16, 16, 5), (16, 16, 1), (8, 8, 1), (8, 8, 5)]


def test_some_forwards_stand_for_a_loop() -> None:
    """Six of 48 forwards of 1 to 48 s represent all 1176 s. A prompt and some steps represent a loop with a cache."""
    forwards = [Run(lambda second=second: second) for second in range(1, 49)]
    parts = in_even_sequence(forwards).shortened(6)
    assert len(parts) == 6
    assert sum(part.weight * float(str(part.run())) for part in parts) == pytest.approx(1176.0, rel=0.03)
    cached = with_steps(lambda steps: 5.0 + 0.5 * steps, 47)
    parts = cached.shortened(6)
    assert [part.run() for part in parts] == [5.0, 7.5]
    assert sum(part.weight * float(str(part.run())) for part in parts) == pytest.approx(float(str(cached())))


def test_what_was_not_tried_is_listed_once_with_the_budget_that_would_try_it() -> None:
    untried = Untried()
    for where in ("s.py:4", "s.py:9", "s.py:4"):
        untried.add(f"slow-format ({where})", "there is no room for a copy")
    untried.without_time = {"beams (s.py:4)": 41.0, "threads (s.py:9)": 12.0}
    first, second = untried.lines(30.0)
    assert first == "slow-format (s.py:4), slow-format (s.py:9): there is no room for a copy"
    assert second.startswith("beams (s.py:4), threads (s.py:9): no time was left for 3 pairs; --budget ")
    assert int(re.findall(r"--budget (\d+) would be enough", second)[0]) >= 30 + 41 + 12


def test_without_a_budget_no_trial_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    with_effort(monkeypatch, script_floor=False)
    model = tiny_llama()
    with profiler.why(budget_s=0.0) as watching:
        model.generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=8, num_beams=2, do_sample=False)
    assert watching.found.tried == ()
    [line] = watching.found.not_tried
    assert "beams (test_trial_plan.py" in line
    assert re.search(r"--budget \d+ would be enough", line)


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


@pytest.mark.parametrize(("pairs", "table"), [(3, 6.965), (4, 4.541)])
def test_a_steady_saving_is_chance_in_at_most_one_of_a_hundred_cases(pairs: int, table: float) -> None:
    """A printed table of Student's t has 6.965 and 4.541 for a one-sided test at 1 %, with 2 and 3 degrees."""
    assert table <= student_t(pairs - 1, findings._WITHIN) <= 1.1 * table


def test_generate_batch_is_not_shortened() -> None:
    """Each call starts a manager and plans a cache, so that few tokens take nearly as long as all."""
    assert generate(24).shortened(4)
    assert not generate(24, batched=True).shortened(4)
