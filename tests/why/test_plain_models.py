"""Language models in plain PyTorch are recorded, counted and tried, like those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hurry import with_effort
from planted_faults import recorded, tiny_llama
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import profiler
from profiler.facts.step import Step
from profiler.why_slow.floor import floor_of_calls, subjects_of
from profiler.why_slow.plain_models import plain_work

VOCABULARY, WIDTH, HEADS, LAYERS = 96, 64, 4, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys, self.values = torch.zeros(2, 1, HEADS, 64, WIDTH // HEADS)

    def forward(self, x: Any, start: int) -> Any:
        batch, tokens, _ = x.shape
        q, k, v = (y.view(batch, tokens, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        if start:
            self.keys[:, :, start : start + tokens], self.values[:, :, start : start + tokens] = k, v
            k, v = self.keys[:, :, : start + tokens], self.values[:, :, : start + tokens]
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=not start)
        return x + self.out(y.transpose(1, 2).reshape(batch, tokens, WIDTH))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Any, start: int = 0) -> Any:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x, start)
        return self.head(self.norm(x[:, -1:]))


class Wrapped(nn.Module):
    """A transformers model inside another module, as peft wraps it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()

    def forward(self, ids: Any) -> Any:
        return self.model(ids)


def ids(tokens: int) -> torch.Tensor:
    return torch.ones(1, tokens, dtype=torch.long)


def test_a_cached_step_has_its_context() -> None:
    model = Plain().eval()

    def run() -> None:
        model(ids(8))
        model(ids(1), 8)
        model.head(torch.ones(1, 1, WIDTH))  # a part of a model is not a model
        nn.CrossEntropyLoss()(torch.ones(1, 4), torch.ones(1, dtype=torch.long))

    seen = recorded(run).seen("script")
    assert [call.words for call in seen.calls] == ["forward 1 x 8", "forward 1 x 1 @ 8"]
    assert {call.model for call in seen.calls} == {"Plain"}
    assert "__call__" not in vars(Plain)
    assert "__init_subclass__" not in vars(nn.Module)
    assert functional.scaled_dot_product_attention.__module__ != "profiler.why_slow.recorder"


def test_a_model_of_transformers_in_a_module_is_recorded_itself() -> None:
    wrapped = Wrapped()
    seen = recorded(lambda: wrapped(ids(4))).seen("script")
    assert [call.model for call in seen.calls] == ["LlamaForCausalLM"]


def test_a_compiled_model_is_recorded() -> None:
    model = torch.compile(Plain().eval(), backend="eager")
    seen = recorded(lambda: model(ids(4))).seen("script")
    assert [(call.model, call.settings.compiled) for call in seen.calls] == [("Plain", True)]


def test_its_work_is_that_of_torchs_counter() -> None:
    """One token attends to 9 keys, and torch's counter counts the same matrix products."""
    model = Plain().eval()
    recorder = recorded(lambda: model(ids(1), 8))
    work = plain_work(model, recorder.notes[0].attention)
    # torch's counter does not know the fused kernel of a CPU.
    with FlopCounterMode(display=False) as counter, torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        model(ids(1), 8)
    step = Step(1, 1, 8)
    assert work.work(step).model_flops == counter.get_total_flops()
    linears = LAYERS * 4 * WIDTH * WIDTH + WIDTH * VOCABULARY
    attention = LAYERS * 2 * WIDTH * 9
    assert work.work(step).model_flops == 2 * (linears + attention)
    # Only the last position reaches the head.
    assert work.work(Step(1, 5, 0)).model_flops == (
        2 * (5 * LAYERS * 4 * WIDTH * WIDTH + WIDTH * VOCABULARY) + 2 * LAYERS * 2 * WIDTH * 15
    )
    assert work.params == sum(parameter.numel() for parameter in model.parameters())


def test_its_calls_have_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    from profiler.counting.floor import RoofSet

    roofs = RoofSet("known", 1e9, {"float32": 1e9}, 0)
    monkeypatch.setattr("profiler.why_slow.floor.here_roofs", lambda *_: roofs)
    model = Plain().eval()
    recorder = recorded(lambda: model(ids(1), 8))
    [call] = recorder.seen("script").calls
    floor = floor_of_calls([call], subjects_of(recorder.notes))
    # A step of one token reads each weight of 4 bytes for two FLOPs, and the keys and values of 8 tokens.
    weights = sum(parameter.numel() for parameter in model.parameters()) - VOCABULARY * WIDTH
    nbytes = 4 * (weights + WIDTH + VOCABULARY + LAYERS * 2 * WIDTH * 9)
    assert floor.seconds == pytest.approx(nbytes / 1e9, rel=0.01)
    assert floor.dispatch_s is None


@pytest.mark.slow
def test_a_loop_that_computes_its_text_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with_effort(monkeypatch, script_floor=False)
    model = Plain().eval()
    text = ids(600)
    with torch.inference_mode(), profiler.why() as watching:
        for _ in range(8):
            text = torch.cat([text, model(text).argmax(-1)], dim=1)
    [finding] = [item for item in watching.found.findings if item.id == "cache-off"]
    assert finding.change == "keep the keys and values of earlier tokens, and pass only the new token"
    assert [trial.id for trial in watching.found.tried if trial.id == "one-by-one"] == []
