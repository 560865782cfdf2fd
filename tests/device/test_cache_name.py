"""The names of cache arguments in transformers: all `cache` from 5.24 on (src/transformers/models/*/modeling_*.py)."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers
from machines import HOST
from packaging.version import Version
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MambaConfig, PreTrainedConfig

from profiler.engines.transformers import EagerEngine
from profiler.loading.cache_argument import argument_name, cache_of, without_cache
from profiler.why_slow.call_settings import context_len, settings_of

RENAMED = Version(transformers.__version__) >= Version("5.24")
LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=32,
)  # fmt: skip
MAMBA = MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=32, state_size=4)


@pytest.mark.parametrize(("config", "before"), [(LLAMA, "past_key_values"), (MAMBA, "cache_params")])
def test_the_name_is_the_argument_of_the_model(config: PreTrainedConfig, before: str) -> None:
    model = AutoModelForCausalLM.from_config(config)
    assert argument_name(model) == ("cache" if RENAMED else before)
    with torch.inference_mode():
        output = model(torch.zeros(1, 4, dtype=torch.long), use_cache=True)
    assert cache_of(output) is not None


def test_a_step_uses_no_deprecated_name() -> None:
    engine = EagerEngine(AutoModelForCausalLM.from_config(LLAMA), HOST)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.decode(engine.prefill(torch.zeros(1, 4, dtype=torch.long), 8))


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_watched_forward_accepts_either_name(name: str) -> None:
    model = AutoModelForCausalLM.from_config(LLAMA)
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 7, 16), torch.zeros(1, 1, 7, 16), 0)
    named = {"use_cache": True, name: cache}
    assert context_len(named) == 7
    settings = settings_of("forward", model, {**named, name: SimpleNamespace()})
    assert settings.cache_class == "SimpleNamespace"
    assert without_cache({**named, "streamer": None}) == {"use_cache": True, "streamer": None}
