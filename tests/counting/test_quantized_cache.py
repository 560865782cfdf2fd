"""The counted storage and traffic of quantised KV caches are those of transformers' own caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cached import cached_tensors
from traffic import Traffic
from transformers import LlamaConfig

from profiler.counting.attention import AttentionCore
from profiler.counting.memory_need import cache_bytes
from profiler.counting.operators import ModelWork
from profiler.engines.caches import quantized_cache
from profiler.errors import RequestError
from profiler.facts.cache_format import CACHE_FORMATS
from profiler.facts.operators import Cause
from profiler.facts.step import ExecutionPath, Step

pytestmark = pytest.mark.cpu

BATCH, HEADS, WIDTH, PROMPT = 2, 3, 64, 256
CONFIG = LlamaConfig(num_hidden_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS)


def states(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(BATCH, HEADS, tokens, WIDTH, dtype=dtype)


@pytest.mark.parametrize("backend", CACHE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_moves_and_stores_the_counted_bytes(backend: str, dtype: torch.dtype) -> None:
    """The step is the third token after a prompt. The attention kernel is not part of the cache's traffic."""
    stored, core = CACHE_FORMATS[backend], AttentionCore("core", dtype, HEADS, HEADS, WIDTH, WIDTH)
    try:
        layer: Any = quantized_cache(CONFIG, stored).layers[0]
    except RequestError as error:
        pytest.skip(str(error))
    for tokens in (PROMPT, 1, 1):
        layer.update(states(tokens, dtype), states(tokens, dtype))
    new = states(1, dtype)
    with Traffic() as traffic:
        keys, values = layer.update(new, new)
    path = ExecutionPath(cache="quantized", cache_format=stored, residual_tokens=stored.residual(2))
    work = core.each(Step(BATCH, 1, PROMPT + 2), path)
    cached = (Cause.CACHE_COPIES, Cause.CACHE_CONVERSION, Cause.CONVERTED_READS)
    moved = work.kv_read_bytes + work.kv_write_bytes + sum(work.avoidable_bytes[cause] for cause in cached)
    assert moved - keys.nbytes - values.nbytes == pytest.approx(traffic.bytes, rel=0.02)
    held = [layer._quantized_keys, layer._quantized_values, layer.keys, layer.values]
    kept = cache_bytes(ModelWork((core,), 0, 0, ()), BATCH, PROMPT + 3, stored, stored.residual(3))
    assert kept == pytest.approx(sum(item.nbytes for item in cached_tensors(held)), rel=0.001)


@pytest.mark.parametrize(("backend", "bits"), [("fp8", 8.0), ("quanto", 4.5), ("hqq", 4.5)])
def test_bits_per_element_by_arithmetic(backend: str, bits: float) -> None:
    """Groups of 64 share a 16-bit scale and a 16-bit zero point, so an element takes 4 + 32 / 64 bits."""
    assert 8 * CACHE_FORMATS[backend].element_bytes(2) == bits


def test_the_newest_tokens_are_packed_once_they_are_128() -> None:
    assert [CACHE_FORMATS["quanto"].residual(decoded) for decoded in (0, 1, 127, 128, 129)] == [0, 1, 127, 0, 1]
    assert CACHE_FORMATS["fp8"].residual(127) == 0
