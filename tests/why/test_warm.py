"""What a first call alone pays for is no part of what a change saves, and hides no fault."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from profiler.why_slow.findings import ChangeTrial, judge_calls
from profiler.why_slow.observations import Call, Observations
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.render import why_sentences
from profiler.why_slow.trials import once_warm

COLD_S = 0.5


def call(number: int, seconds: float, warm_s: float | None = None) -> Call:
    return Call(number, "forward", "Llama", 1, 8, 0, 0, 1, seconds, "s.py:4", {}, warm_s=warm_s)


def tried(saving: float, *numbers: int) -> ChangeTrial:
    return ChangeTrial(
        "grad-on", numbers, ((1.0, 1 - saving),) * 5, "s.py:4", "gradients are recorded", "no grad", "one"
    )


def test_a_share_of_warm_calls_is_of_warm_seconds() -> None:
    """10 s, then 1 s twice, and half of a warm call saved: 1.5 s, 50 % of what is left without the first's 9 s."""
    calls = (call(0, 10.0, warm_s=1.0), call(1, 1.0), call(2, 1.0))
    found = judge_calls(Observations("s.py", 12.0, calls, (), 0.0, "", 0.0), [tried(0.5, 0, 1, 2)])
    [finding] = found.findings
    assert (finding.saves_s, finding.share) == (pytest.approx(1.5), pytest.approx(0.5))
    assert "Shares are of 3.00 s: its calls once warm, and tokenizers." in why_sentences(found)
    assert "The first of 3 like calls at s.py:4 took 10.0 s, the others 1.00 s" in why_sentences(found)[-1]


def test_a_fault_is_found_behind_a_cold_call() -> None:
    """One call of 1.75 s that takes 64 ms once warm, a quarter of it for nothing: 16 ms, and the rest told apart."""
    seen = Observations("s.py", 2.0, (call(0, 1.75, warm_s=0.064),), (), 0.0, "", 0.0)
    found = judge_calls(seen, [tried(0.25, 0)])
    [finding] = found.findings
    assert (finding.saves_s, finding.share) == (pytest.approx(0.016), pytest.approx(0.25))
    lines = why_sentences(found)
    assert "16.0 ms (25 %)" in lines[1]
    assert lines[-1] == (
        "The only call of its kind at s.py:4 took 1.75 s, and 64.0 ms once more: the rest is paid once, no finding"
        " saves it, and it is in no share."
    )


def test_a_call_that_was_no_slower_than_once_more_keeps_its_seconds() -> None:
    seen = Observations("s.py", 2.0, (call(0, 1.0, warm_s=1.2),), (), 0.0, "", 0.0)
    assert seen.steady_s == seen.calls_s == 1.0
    assert judge_calls(seen, []).first_calls == ()


def test_first_calls_are_run_again() -> None:
    """A model that sleeps half a second the first time: once more it has none of it; the second stays as it is."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    model, recorder = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).eval(), Recorder()
    left_s = [COLD_S]
    model.model.register_forward_pre_hook(lambda *_: time.sleep(left_s.pop() if left_s else 0.0))
    with watched(recorder), torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 4, dtype=torch.long))
    seen = recorder.seen("s.py")
    first, second = once_warm(recorder, seen, 10.0).calls
    assert first.seconds >= COLD_S > 2 * first.steady_s
    assert second.warm_s is None
    assert once_warm(recorder, seen, 0.0) == seen, "there was no time"
