"""The named parts of a script's time add up to its run time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hurry import with_effort
from planted_faults import tiny_llama

import profiler
from profiler.why_slow.findings import CallFloor, judge_calls, new_finding
from profiler.why_slow.observations import Call, CallSettings, LineTime, Load, Observations
from profiler.why_slow.render import time_parts

SETTINGS = CallSettings()


def generate(number: int, seconds: float, **more: Any) -> Call:
    return Call(number, "generate", "Llama", 1, 8, 0, 4, 4, seconds, "s.py:4", SETTINGS, **more)


def parts_of(seen: Observations, floor: CallFloor | None = None) -> dict[str, float]:
    return {part.what.partition(":")[0]: part.seconds for part in time_parts(judge_calls(seen, [], floor))}


def test_each_second_of_a_script_has_one_name() -> None:
    """Two calls take 10 and 8 s. The first has 2 s of one-time costs, and 5 of 16 s are not in forward passes.

    A twentieth of the 40 s is waiting for other processes.
    """
    calls = (
        generate(0, 10.0, warm_s=8.0, forward_s=7.5, sampling_s=1.5, callbacks_s={"Stops": 0.5}),
        generate(1, 8.0, forward_s=5.5, sampling_s=1.5, callbacks_s={"Stops": 0.5}),
    )
    seen = Observations(
        "s.py", 40.0, calls, (Load("a", 6.0, "s.py:1"),), 2.0, "s.py:2", 0.5,
        between=(LineTime("s.py:9", 3, 1.0),), waited_s=2.0,
    )  # fmt: skip
    parts = parts_of(seen, CallFloor(7.0, 2.0, needless_s=1.0))
    assert parts == pytest.approx(
        {
            "kernels at the roofs of this machine": 5.0,
            "dispatch of kernels by Python and torch, at least": 2.0,
            "work that the tokens do not need": 1.0,
            "waiting for a core that other processes used": 2.0,
            "kernels (modules unknown) slower than the roofs, and dispatch beyond least": 16 - 13 - 2.0 * 18 / 40,
            "sampling": 3.0,
            "your Stops": 1.0,
            "generate's own work": 1.0,
            "one-time costs of first calls": 2.0,
            "loading models": 0.95 * 6.0,
            "tokenizers (s.py": 0.95 * 2.0,
            "the script's code between its forwards (s.py": 0.95 * 1.0,
            "recording these calls": 0.95 * 0.5,
            "imports and the script's other code": 0.95 * (40 - 18 - 9.5),
        }
    )
    assert sum(parts.values()) == pytest.approx(40.0)


def test_no_part_is_longer_than_what_is_left() -> None:
    """By inaccurate measurements, a floor of 5 s and dispatch of 3 s exceed 6 s of forward passes."""
    parts = parts_of(
        Observations("s.py", 6.0, (generate(0, 6.0, forward_s=6.0),), (), 0.0, "", 0.0), CallFloor(8.0, 3.0)
    )
    assert parts == {
        "kernels at the roofs of this machine": 5.0, "dispatch of kernels by Python and torch, at least": 1.0,
    }  # fmt: skip


def test_overlapping_calls_count_once() -> None:
    """Four simultaneous calls of 2 s, half of it in forward passes, count as 1 s and 1 s."""
    calls = tuple(generate(number, 2.0, forward_s=1.0, began_s=0.0) for number in range(4))
    assert parts_of(Observations("s.py", 2.0, calls, (), 0.0, "", 0.0)) == pytest.approx(
        {"generate's own work": 1.0, "forward passes": 1.0}
    )


BOUND = "at most: the bytes that cross the link, at its measured bandwidth"


@pytest.mark.parametrize(
    ("basis", "parts"),
    [(BOUND, {"weights over the link, at most": 4.0, "the rest of forward passes": 5.0}),
     ("tried: 3 pairs", {"forward passes": 9.0})],
    ids=["a bound", "a trial, whose link was not measured"],
)  # fmt: skip
def test_weights_over_a_link_have_a_row(basis: str, parts: dict[str, float]) -> None:
    """Forward passes take 9 s of 10 s."""
    seen = Observations("s.py", 10.0, (generate(0, 9.0, forward_s=9.0),), (), 0.0, "", 0.0)
    finding = new_finding("offload", 4.0, "s.py:1", "some weights cross a link", "keep them on the GPU", basis)
    found = time_parts(judge_calls(seen, [], more=[finding]))
    assert {part.what: part.seconds for part in found} == pytest.approx(
        {**parts, "imports and the script's other code": 1.0}
    )


def test_forward_passes_and_sampling_are_timed_within_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both calls have the forward passes of 6 tokens. Only the sampling call has logits processors."""
    with_effort(monkeypatch, script_floor=False, script_least_s=0.0, script_most_s=0.0)
    model, ids = tiny_llama(), torch.ones(1, 8, dtype=torch.long)
    with profiler.why() as watching:
        model.generate(ids, max_new_tokens=6, do_sample=False)
        model.generate(ids, max_new_tokens=6, do_sample=True, top_k=5, top_p=0.9, temperature=0.7)
    greedy, sampled = watching.found.seen.calls
    for call in (greedy, sampled):
        assert call.forwards == 6
        assert call.forward_s is not None
        assert 0 < call.prompt_s < call.forward_s < call.seconds
    assert sampled.sampling_s > greedy.sampling_s
    assert sum(part.seconds for part in time_parts(watching.found)) == pytest.approx(watching.found.seen.wall_s)
