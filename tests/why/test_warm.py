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
    """Calls take 10, 1 and 1 s. Half of each warm call is saved: 1.5 s, or 50 % of the 3 s of warm calls."""
    calls = (call(0, 10.0, warm_s=1.0), call(1, 1.0), call(2, 1.0))
    found = judge_calls(Observations("s.py", 12.0, calls, (), 0.0, "", 0.0), [tried(0.5, 0, 1, 2)])
    [finding] = found.findings
    assert (finding.saves_s, finding.share) == (pytest.approx(1.5), pytest.approx(0.5))
    assert "Percentages refer to 3.00 s: warm calls and tokenizers." in why_sentences(found)
    assert "First calls at s.py:4 took 10.0 s, and 1.00 s once warm." in why_sentences(found)[-1]


def test_a_fault_is_found_despite_a_cold_call() -> None:
    """A call of 1.75 s takes 64 ms once warm. A quarter of that is 16 ms, and one-time costs are separate."""
    seen = Observations("s.py", 2.0, (call(0, 1.75, warm_s=0.064),), (), 0.0, "", 0.0)
    found = judge_calls(seen, [tried(0.25, 0)])
    [finding] = found.findings
    assert (finding.saves_s, finding.share) == (pytest.approx(0.016), pytest.approx(0.25))
    lines = why_sentences(found)
    assert "16.0 ms (25 %)" in lines[1]
    assert lines[-1] == (
        "First calls at s.py:4 took 1.75 s, and 64.0 ms once warm. The rest is a one-time cost, which no finding saves"
        " and no percentage includes."
    )


def test_first_calls_of_a_line_share_a_sentence() -> None:
    """Three prompts of different lengths at one line take 3.36, 2.63 and 2.94 s, and 1.72 s together once warm."""
    times = ((3.36, 0.565), (2.63, 0.578), (2.94, 0.577))
    calls = tuple(replace(call(n, *seconds), prompt_len=8 + n) for n, seconds in enumerate(times))
    [line] = [
        text
        for text in why_sentences(judge_calls(Observations("s.py", 9.0, calls, (), 0.0, "", 0.0), []))
        if "once warm" in text
    ]
    assert line.startswith("First calls at s.py:4 took 8.93 s, and 1.72 s once warm.")


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
