"""Engines on a quantised KV cache: the tokens of transformers' own, and the choice of `--cache`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from machines import HOST
from small_models import small_model
from transformers import QuantizedCache

from profiler.engines.base import greedy_tokens
from profiler.engines.registry import ENGINES, engines_of_caches, quantized_engines
from profiler.errors import RequestError
from profiler.facts.cache_format import CACHE_FORMATS

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model("Llama", hidden_size=256, intermediate_size=256)


@pytest.fixture(params=CACHE_FORMATS)
def backend(request: pytest.FixtureRequest, model: Any) -> str:
    try:
        engines_of_caches(["eager"], [request.param], model.config)
        ENGINES[quantized_engines()[request.param]](model, HOST).prefill(torch.ones(1, 1, dtype=torch.long), 2)
    except RequestError as error:
        pytest.skip(str(error))
    return str(request.param)


def test_the_tokens_are_those_of_generate_on_the_same_cache(model: Any, backend: str) -> None:
    prompt = torch.randint(0, 128, (2, 20), generator=torch.Generator().manual_seed(1))
    cache = QuantizedCache(backend, model.config)
    expected = model.generate(
        prompt, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    tokens = greedy_tokens(ENGINES[quantized_engines()[backend]](model, HOST), prompt, 8)
    assert torch.equal(tokens, expected[:, 20:])


def test_a_filled_cache_stores_as_much_as_a_prefilled_one(model: Any, backend: str) -> None:
    engine = ENGINES[quantized_engines()[backend]](model, HOST)
    with torch.inference_mode():
        filled, prefilled = engine.fill(2, 30, 40), engine.prefill(torch.zeros(2, 30, dtype=torch.long), 40)
        shapes = [
            [tuple(layer._dequantize(layer._quantized_keys).shape) for layer in state.cache.layers]
            for state in (filled, prefilled)
        ]
        filled = engine.decode(filled)
    assert shapes[0] == shapes[1] == [(2, 2, 30, 64)] * 2
    assert int(filled.cache.get_seq_length()) == 31


def test_a_cache_is_an_engine(model: Any) -> None:
    assert engines_of_caches(["eager"], [], model.config) == ["eager"]
    assert engines_of_caches(["eager"], ["dynamic", "fp8"], model.config) == ["eager", "fp8-cache"]
    assert engines_of_caches(["eager"], ["quantized"], model.config) == ["fp8-cache"]


def test_without_a_backend_the_first_reason_is_given(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_hqq_available", "is_optimum_quanto_available"):
        monkeypatch.setattr(f"transformers.cache_utils.{name}", lambda: False)
    monkeypatch.setattr("transformers.QuantizedCache", Older)
    with pytest.raises(RequestError, match=r"needs transformers 5\.22: pip install 'transformers>=5\.22'"):
        engines_of_caches(["eager"], ["quantized"], model.config)


class Older(QuantizedCache):
    """The QuantizedCache of transformers 5.20, which has no fp8."""

    def __init__(self, backend: str, *options: Any) -> None:
        if backend == "fp8":
            raise ValueError(f"Unknown quantization backend `{backend}`")
        super().__init__(backend, *options)


@pytest.mark.parametrize(
    ("engines", "caches", "message"),
    [
        (["eager"], ["int2"], "--cache 'int2' is unknown; use quantized, dynamic, static, fp8"),
        (["graph"], ["fp8"], "--cache works only with --engine eager, not graph"),
    ],
)
def test_what_does_not_work_is_one_line(model: Any, engines: list[str], caches: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engines_of_caches(engines, caches, model.config)
