"""The hollow twin dispatches the model's operators, has almost no weights, and its own time is measured."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from cases import slow_except
from machines import HOST
from subjects import subject_of
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.counting.walk import walk
from profiler.engines.transformers import EagerEngine
from profiler.facts.dispatch import dispatch_of
from profiler.loading.config import config_from, load_config
from profiler.loading.load import load
from profiler.loading.meta_model import from_config
from profiler.loading.request import ModelRequest
from profiler.loading.source import resolve
from profiler.measure import dispatch
from profiler.measure.dispatch import hollow_config

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")


class OperatorList(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def decode_operators(name: str, config) -> tuple[list[str], int]:  # type: ignore[no-untyped-def]
    loaded = load(ModelRequest(resolve(name), CPU, torch.bfloat16), config)
    engine = EagerEngine(loaded.module, HOST)
    with torch.inference_mode():
        state = engine.prefill(torch.arange(6)[None], 16)
        with OperatorList() as operators:
            engine.decode(state)
    return operators.names, walk(loaded.module).params


@pytest.mark.parametrize("name", slow_except(("gpt2",), ["qwen2.5-0.5b", "gemma-2-9b", "gpt2", "mixtral-8x7b"]))
def test_same_operators_as_the_model(name: str) -> None:
    """Operators are compared on 2 layers of the true width, so the model fits on any machine."""
    config = load_config(resolve(name))
    text = config.get_text_config()
    setattr(text, text.attribute_map.get("num_hidden_layers", "num_hidden_layers"), 2)
    for key in ("vocab_size", "intermediate_size"):
        if getattr(text, key, None):
            setattr(text, key, 512)
    text.pad_token_id = None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    twin, twin_params = decode_operators(name, hollow_config(config))
    model, model_params = decode_operators(name, config)
    if name == "mixtral-8x7b":  # the experts of a token depend on its values, and so does the number of their products
        twin, model = sorted(set(twin)), sorted(set(model))
    assert twin == model
    assert twin_params < model_params / 20


def test_layers_with_other_heads_keep_their_grouping() -> None:
    """Gemma-4-31B has 2 query heads per key in windowed layers, and 8 in global ones; the twin has 4 query heads."""
    layers = {
        "model_type": "gemma4_text", "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }  # fmt: skip
    twin = from_config(hollow_config(config_from(layers, "model")), torch.float32, None)
    assert [layer.self_attn.num_key_value_groups for layer in twin.model.layers] == [2] * 5 + [4]
    assert sum(parameter.numel() for parameter in twin.parameters()) < 1_000_000
    assert twin(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits.shape[1] == 3


@pytest.mark.timing
@pytest.mark.ci
def test_weights_that_stream_by_are_taken_off_step_by_step(tiny_folder: Path) -> None:
    """Linears take 0 to 8 ms per call, 4 ms on average; the twin's own part does not depend on their sum in a step."""
    subject, config = subject_of(str(tiny_folder))
    linears = [module for module in subject.loaded.module.modules() if isinstance(module, torch.nn.Linear)]
    draw = random.Random(0)

    def stream(*_: object) -> None:
        until_s = time.perf_counter() + draw.uniform(0, 8e-3)
        while time.perf_counter() < until_s:
            pass

    for linear in linears:
        linear.register_forward_pre_hook(stream)
    measured = dispatch.measure_dispatch(subject.loaded, config, HOST, [1], ["eager"], 0.5)
    decode = next(item for item in measured if item.phase == "decode")
    streamed_s = 4e-3 * len(linears)
    found = dispatch_of(decode)
    assert 0 < found.in_kernels_s < found.step_s < 0.5 * streamed_s
