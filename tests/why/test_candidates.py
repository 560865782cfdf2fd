"""What else is tried: each thing that the scripts have not, on the smallest model that has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hurry import with_effort
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import profiler
from profiler.device.clock import OwnTime
from profiler.why_slow.call_settings import pipelined_devices
from profiler.why_slow.changes import other_copies
from profiler.why_slow.findings import judge_calls
from profiler.why_slow.observations import Call, Observations
from profiler.why_slow.render import why_sentences

IDS = torch.ones(1, 8, dtype=torch.long)


def generate_with_scores(model: Any) -> None:
    options = {"output_hidden_states": True, "return_dict_in_generate": True, "do_sample": False}
    model.generate(IDS, max_new_tokens=2, **options)


def with_math(model: Any) -> None:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(IDS)


def with_hidden_states(model: Any) -> None:
    with torch.no_grad():
        model(IDS, output_hidden_states=True)


def plainly(model: Any) -> None:
    with torch.no_grad():
        model(IDS)


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        (generate_with_scores, "extra-outputs"),
        (with_hidden_states, "extra-outputs"),
        (with_math, "slow-attention"),
        (plainly, "threads"),
    ],
)
def test_it_is_tried(script: Callable[[Any], None], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it pays is the machine's; that the pairs are of this very change is what the model is left with."""
    with_effort(monkeypatch, script_floor=False, script_least_s=1.0)
    cores = torch.get_num_threads() + (wanted == "threads")
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(cores)), raising=False)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    config = LlamaConfig(num_hidden_layers=1, eos_token_id=None, pad_token_id=0, **sizes)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    with profiler.why() as watching:
        script(model)
    assert watching.found is not None
    assert wanted in {trial.id for trial in watching.found.tried}
    assert watching.found.not_tried == ()
    assert torch.get_num_threads() + (wanted == "threads") == cores


def test_a_format_is_tried_against_a_dense_copy(tiny_folder: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = AutoModelForCausalLM.from_pretrained(
        tiny_folder, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    [dense_copy] = other_copies(model, "bfloat16")
    assert dense_copy.id == "slow-format"
    dense = dense_copy.make()
    weight = dense.model.layers[0].mlp.up_proj.weight
    assert weight.shape == (model.config.intermediate_size, model.config.hidden_size)
    assert weight.is_floating_point()
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8, "the script's own model is left as it was"


def test_layers_on_several_cards_are_told_to_take_turns() -> None:
    def placed(**places: object) -> Any:
        return SimpleNamespace(hf_device_map=places)

    assert pipelined_devices(placed(a=0, b="cuda:1", c=1)) == "layers run card after card: one of 2 works at a time"
    assert (
        pipelined_devices(placed(a=0, b=0))
        == pipelined_devices(placed(a=0, b="cpu", c="disk"))
        == pipelined_devices(object())
        == ""
    )


def test_a_first_call_is_no_steady_state() -> None:
    """1 s, then 0.1 s four times: the others' median stands beside it; two calls alone do not tell which is usual."""
    calls = [
        Call(number, "forward", "Llama", 1, 8, 0, 0, 1, seconds, "s.py:4", {})
        for number, seconds in enumerate((1.0, 0.1, 0.1, 0.1, 0.1))
    ]
    [first] = judge_calls(Observations("s.py", 2.0, tuple(calls), (), 0.0, "", 0.0), []).first_calls
    assert (first.where, first.calls, first.first_s, first.usual_s) == ("s.py:4", 5, 1.0, 0.1)
    assert "The first of 5 like calls at s.py:4 took 1.00 s, the others 100 ms" in " ".join(
        why_sentences(judge_calls(Observations("s.py", 2.0, tuple(calls), (), 0.0, "", 0.0), []))
    )
    assert judge_calls(Observations("s.py", 2.0, tuple(calls[:2]), (), 0.0, "", 0.0), []).first_calls == ()


@pytest.mark.parametrize(("waits", "own_s"), [((3, 3), 0.2), ((3, 4), 5.0), ((None, None), 5.0)])
def test_a_neighbours_turn_is_not_ones_own(
    waits: tuple[int | None, int | None], own_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five seconds on the wall, 0.2 of them on the core: others' turns, unless the thread waited by itself."""
    core, wall, waited = iter((1.0, 1.2)), iter((10.0, 15.0)), iter(waits)
    monkeypatch.setattr("profiler.device.clock.thread_time", lambda: next(core))
    monkeypatch.setattr("profiler.device.clock.now_s", lambda: next(wall))
    monkeypatch.setattr("profiler.device.clock.core_waits", lambda: next(waited))
    assert OwnTime().seconds() == pytest.approx(own_s)
