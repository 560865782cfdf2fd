"""The time of failed calls counts, the answer reports them, and the script gets the exception."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hurry import with_effort
from planted_faults import tiny_llama

import profiler
from profiler.why_slow.render import call_rows, why_document

IDS = torch.ones(1, 8, dtype=torch.long)
SLEEP_S = 0.3


class RunsOut:
    """A logits processor that raises at the second token."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, _ids: Any, scores: Any) -> Any:
        self.tokens += 1
        if self.tokens == 2:
            time.sleep(SLEEP_S)
            raise RuntimeError("out of memory (pretended)")
        return scores


@pytest.fixture(autouse=True)
def floor_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers of the calls in each computation of a floor."""
    numbers: list[list[int]] = []
    with_effort(monkeypatch, script_least_s=1.0, script_most_s=1.0)
    monkeypatch.setattr(
        "profiler.why_slow.floor.floor_of_calls", lambda calls, *_: numbers.append([call.number for call in calls])
    )
    return numbers


def test_a_failed_call_counts_with_its_time(floor_calls: list[list[int]]) -> None:
    model = tiny_llama()
    with profiler.why() as watching:
        with pytest.raises(RuntimeError, match="out of memory"):
            model.generate(IDS, max_new_tokens=4, do_sample=False, logits_processor=[RunsOut()])
        model.generate(IDS, max_new_tokens=3, do_sample=False)
    failed, done = watching.found.seen.calls
    assert (failed.failed, done.failed) == ("RuntimeError: out of memory (pretended)", "")
    assert failed.seconds >= SLEEP_S
    assert failed.forwards == 2
    assert watching.found.seen.calls_s >= failed.seconds + done.seconds - 1e-6
    assert "2 calls of generate" in watching.answer
    assert "1 of them failed after " in watching.answer
    assert "(RuntimeError: out of memory (pretended))" in watching.answer
    assert "the script's own work" not in watching.answer
    assert floor_calls == [[done.number]]
    assert not any(failed.number in trial.calls for trial in watching.found.tried)
    assert any("they failed (RuntimeError" in text for text in watching.found.not_tried)
    assert ["failed" in row[-1] for row in call_rows(watching.found)] == [True, False]
    assert why_document(watching.found).calls[0].failed


def test_an_answer_without_successful_calls(floor_calls: list[list[int]]) -> None:
    model = tiny_llama()

    class StopError(Exception):
        pass

    def stop(*_: Any) -> Any:
        raise StopError

    with profiler.why() as watching:
        for _ in range(4):
            with pytest.raises(StopError):
                model.generate(IDS, max_new_tokens=4, do_sample=False, stopping_criteria=[stop])
    assert [call.failed for call in watching.found.seen.calls] == ["StopError"] * 4
    assert "4 of them failed" in watching.answer
    assert "Nothing to change" not in watching.answer
    assert floor_calls == []
