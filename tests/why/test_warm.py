"""One-time costs of first calls are excluded from savings and shares."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from planted_faults import recorded, tiny_llama

from profiler.why_slow.findings import TriedChange, judge_calls, tried_change
from profiler.why_slow.observations import Call, CallSettings, Observations
from profiler.why_slow.render import why_sentences
from profiler.why_slow.trials import once_warm

COLD_S = 0.2


def call(number: int, seconds: float, warm_s: float | None = None) -> Call:
    return Call(number, "forward", "Llama", 1, 8, 0, 0, 1, seconds, "s.py:4", CallSettings(), warm_s=warm_s)


def tried(saving: float, *numbers: int) -> TriedChange:
    return tried_change(
        "grad-on", numbers, ((1.0, 1 - saving),) * 5, "s.py:4", "gradients are recorded", "no grad", "one"
    )


def test_savings_and_shares_refer_to_warm_calls() -> None:
    """Calls take 10, 8 and 1 s, and 1, 2 and 1 s once warm. Half of a warm call is saved: 2 s, or 50 % of 4 s."""
    calls = (call(0, 10.0, warm_s=1.0), replace(call(1, 8.0, warm_s=2.0), prompt_len=9), call(2, 1.0))
    found = judge_calls(Observations("s.py", 19.0, calls, (), 0.0, "", 0.0), [tried(0.5, 0, 1, 2)])
    [finding] = found.findings
    assert (finding.saves_s, finding.share) == (pytest.approx(2.0), pytest.approx(0.5))
    assert "Percentages refer to 4.00 s: warm calls and tokenizers." in why_sentences(found)
    assert why_sentences(found)[-1] == (
        "First calls at s.py:4 took 18.0 s, and 3.00 s once warm. The rest is a one-time cost, which no finding saves"
        " and no percentage includes."
    )


def test_a_first_call_faster_than_its_repeat_counts_in_full() -> None:
    seen = Observations("s.py", 2.0, (call(0, 1.0, warm_s=1.2),), (), 0.0, "", 0.0)
    assert seen.steady_s == seen.calls_s == 1.0
    assert judge_calls(seen, []).first_calls == []


def test_first_calls_are_repeated() -> None:
    """The model sleeps for COLD_S only in the first call. A later call of its shape replaces the repeat."""
    model = tiny_llama()
    left_s = [COLD_S]
    model.model.register_forward_pre_hook(lambda *_: time.sleep(left_s.pop() if left_s else 0.0))
    recorder = recorded(lambda: [model(torch.ones(1, length, dtype=torch.long)) for length in (4, 4, 5)])
    seen = recorder.seen("s.py")
    first, second, _ = once_warm(recorder, seen, 10.0).calls
    assert first.seconds >= COLD_S > 2 * first.steady_s
    assert second.warm_s is None
    first, *others = once_warm(recorder, seen, 0.0).calls
    assert first.warm_s == pytest.approx(second.seconds)
    assert {call.warm_s for call in others} == {None}, "there was no time"


def test_only_the_first_forward_of_a_loop_is_repeated() -> None:
    """Each forward of a loop without a cache has its own shape, and only the first one has one-time costs."""
    model = tiny_llama()
    recorder = recorded(lambda: [model(torch.ones(1, length, dtype=torch.long)) for length in range(4, 12)])
    first, *others = once_warm(recorder, recorder.seen("s.py"), 10.0).calls
    assert first.warm_s is not None
    assert {call.warm_s for call in others} == {None}


def test_other_shapes_are_repeated_until_one_has_no_one_time_costs() -> None:
    """Of five shapes, the first and fourth are cold. The fourth is the slowest of the others, and the fifth is next."""
    model = tiny_llama()
    naps_s = [COLD_S, 0.02, 0.02, COLD_S, 0.1]
    model.model.register_forward_pre_hook(lambda *_: time.sleep(naps_s.pop(0) if naps_s else 0.1))
    recorder = recorded(lambda: [model(torch.ones(1, length, dtype=torch.long)) for length in (4, 9, 6, 8, 5)])
    calls = once_warm(recorder, recorder.seen("s.py"), 10.0).calls
    assert [call.number for call in calls if call.warm_s is not None] == [0, 3, 4]
