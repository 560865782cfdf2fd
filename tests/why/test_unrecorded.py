"""What `why` cannot record, and calls that fail: the script runs as usual, and the answer reports them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hurry import with_effort
from planted_faults import tiny_llama
from transformers import ViTConfig, ViTModel

import profiler
from profiler.why_slow import watched_calls

IDS = torch.ones(1, 8, dtype=torch.long)


@pytest.fixture(autouse=True)
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    with_effort(monkeypatch, script_least_s=0.0, script_most_s=0.0)
    monkeypatch.setattr("profiler.why_slow.floor.floor_of_calls", lambda *_: None)


def test_an_encoder_whose_config_has_no_cache_is_recorded() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = ViTModel(ViTConfig(**sizes, image_size=32, patch_size=16)).eval()
    with profiler.why() as watching, torch.no_grad():
        model(torch.ones(1, 3, 32, 32))
    [call] = watching.found.seen.calls
    assert call.settings.cache is False
    assert watching.found.seen.unnoted is None


def unreadable(*_: object) -> None:
    raise KeyError("unforeseen")


def test_a_call_that_cannot_be_recorded_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """If recording fails at the second of three calls, the others are recorded. All three return the usual logits."""
    model, of = tiny_llama(), watched_calls.forward_settings
    reads = iter([of, unreadable, of])
    monkeypatch.setattr(watched_calls, "forward_settings", lambda *args: next(reads)(*args))
    with torch.no_grad():
        logits = model(IDS).logits
        with profiler.why() as watching:
            assert all(torch.equal(model(IDS).logits, logits) for _ in range(3))
    assert len(watching.found.seen.calls) == 2
    unnoted = watching.found.seen.unnoted
    assert (unnoted.count, unnoted.reason) == (1, "KeyError: 'unforeseen'")


SLEEP_S = 0.3


def runs_out(ids: Any, scores: Any) -> Any:
    """A logits processor that raises at the second token."""
    if ids.shape[1] > IDS.shape[1]:
        time.sleep(SLEEP_S)
        raise RuntimeError("out of memory (pretended)")
    return scores


@pytest.fixture
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
            model.generate(IDS, max_new_tokens=4, do_sample=False, logits_processor=[runs_out])
        model.generate(IDS, max_new_tokens=3, do_sample=False)
    failed, done = watching.found.seen.calls
    assert (failed.failed, done.failed) == ("RuntimeError: out of memory (pretended)", "")
    assert failed.seconds >= SLEEP_S
    assert failed.forwards == 2
    assert watching.found.seen.calls_s >= failed.seconds + done.seconds - 1e-6
    assert floor_calls == [[done.number]]
    assert not any(failed.number in trial.calls for trial in watching.found.tried)
    assert any("they failed (RuntimeError" in text for text in watching.found.not_tried)


def test_an_answer_without_successful_calls(floor_calls: list[list[int]]) -> None:
    model = tiny_llama()

    def stop(*_: Any) -> Any:
        raise LookupError

    with profiler.why() as watching:
        for _ in range(4):
            with pytest.raises(LookupError):
                model.generate(IDS, max_new_tokens=4, do_sample=False, stopping_criteria=[stop])
    assert [call.failed for call in watching.found.seen.calls] == ["LookupError"] * 4
    assert floor_calls == []
