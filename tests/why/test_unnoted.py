"""Models unlike those that the watch was written for: their scripts run as alone, and the answer stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hurry import with_effort
from transformers import (
    CLIPConfig,
    CLIPModel,
    DistilBertConfig,
    DistilBertModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTModel,
)

import profiler
from profiler.why_slow import trials as again
from profiler.why_slow.call_settings import ModelSettings
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.render import html_why

IDS = torch.ones(1, 4, dtype=torch.long)
PIXELS = torch.ones(1, 3, 32, 32)
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
IMAGES = {"image_size": 32, "patch_size": 16}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES)).eval()


def distilbert() -> Callable[[], Any]:
    model = DistilBertModel(DistilBertConfig(vocab_size=64, dim=32, n_layers=1, n_heads=2, hidden_dim=64)).eval()
    return lambda: model(IDS)


def vit() -> Callable[[], Any]:
    model = ViTModel(ViTConfig(**SIZES, **IMAGES)).eval()
    return lambda: model(PIXELS)


def clip() -> Callable[[], Any]:
    text = {**SIZES, "vocab_size": 64, "eos_token_id": 2, "bos_token_id": 1}
    config = CLIPConfig(text_config=text, vision_config={**SIZES, **IMAGES}, projection_dim=16)
    model = CLIPModel(config).eval()
    return lambda: model(IDS, PIXELS)


@pytest.fixture(autouse=True)
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    with_effort(monkeypatch, script_least_s=0.0, script_most_s=0.0)
    monkeypatch.setattr("profiler.why_slow.floor.floor_of_calls", lambda _: None)


@pytest.mark.parametrize("model", [distilbert, vit, clip])
def test_an_encoder_whose_config_knows_no_cache_is_noted(model: Callable[[], Callable[[], Any]]) -> None:
    run = model()
    with profiler.why() as watching, torch.no_grad():
        run()
    assert watching.found is not None
    [call] = watching.found.seen.calls
    assert call.settings["cache"] == "off"
    assert watching.found.seen.unnoted is None


def unreadable(*_: object) -> None:
    raise KeyError("what nobody foresaw")


def test_what_cannot_be_noted_is_told_once_and_the_script_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three calls fails to be noted: two are left, and what the script computes is what it computes
    alone."""
    model, of = llama(), ModelSettings.of
    read = iter([of, unreadable, of])
    monkeypatch.setattr(ModelSettings, "of", lambda *given: next(read)(*given))
    with torch.no_grad():
        alone = model(IDS).logits
        with profiler.why() as watching:
            assert all(torch.equal(model(IDS).logits, alone) for _ in range(3))
    assert watching.found is not None
    assert len(watching.found.seen.calls) == 2
    told = [line for line in watching.answer.splitlines() if "what nobody foresaw" in line]
    assert told == [
        "Noting failed once, and what it was of is in none of these figures (KeyError: 'what nobody foresaw')."
    ]


def test_where_no_call_could_be_noted_that_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelSettings, "of", unreadable)
    model = llama()
    with profiler.why() as watching, torch.no_grad():
        for _ in range(2):
            model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert watching.found is not None
    assert watching.answer == (
        "this block ran, and no call was noted: noting failed 2 times, and what it was of is in none of these figures"
        " (KeyError: 'what nobody foresaw')."
    )
    assert "what nobody foresaw" in html_why(watching.found)


@pytest.mark.parametrize("method", ["load", "text"])
def test_a_load_and_a_text_that_cannot_be_noted_are_the_scripts_all_the_same(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "name_of_source", unreadable)
    monkeypatch.setattr(Recorder, "note_text", unreadable)
    recorder = Recorder()
    given = ("a model", lambda *_: 7, (), {}) if method == "load" else (lambda *_: 7, ("a text",), {})
    assert getattr(recorder, method)(*given) == 7
    assert recorder.unnoted is not None


def test_candidates_that_fail_in_an_unforeseen_way_leave_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "candidates", unreadable)
    model, recorder = llama(), Recorder()
    with watched(recorder), torch.no_grad():
        model(IDS)
    trials, missed = again.try_changes(recorder, recorder.seen("s.py"), 1.0)
    assert (trials, missed) == ([], ["what else there is: KeyError: 'what nobody foresaw'"])


def test_a_floor_that_fails_in_an_unforeseen_way_leaves_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.why_slow.floor.floor_of_calls", unreadable)
    model = llama()
    with profiler.why() as watching, torch.no_grad():
        model(IDS)
    assert watching.found is not None
    assert watching.found.floor is None
    assert "1 call of forward" in watching.answer
