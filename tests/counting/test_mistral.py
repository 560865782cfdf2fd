"""Mistral-7B by hand: every figure is arithmetic on its published shape, not output of the counter.

hidden 4096, intermediate 14336, 32 layers, 32 query heads, 8 KV heads of 128, vocabulary 32000, untied.
"""

from __future__ import annotations

import pytest
from loaded import walked

from profiler.counting.operators import ModelWork
from profiler.facts.step import ExecutionPath, Step

LAYER_LINEARS = 4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336
HEAD = 32000 * 4096
NORMS = (2 * 32 + 1) * 4096


@pytest.fixture(scope="module")
def mistral() -> ModelWork:
    return walked("mistral-7b-v0.1")


def test_prefill_of_512(mistral: ModelWork) -> None:
    step = Step(1, 512, 0)
    causal = 4 * 32 * 128 * (512 * 513 // 2) * 32
    linears = 2 * 512 * 32 * LAYER_LINEARS
    assert mistral.work(step).model_flops == 7_215_941_419_008 == linears + causal + 2 * HEAD
    full_square = ExecutionPath(kernel="math")
    assert mistral.work(step, full_square).executed_flops == 7_284_526_678_016
    all_logits = ExecutionPath(kernel="math", all_logits=True)
    assert mistral.work(step, all_logits).executed_flops == 7_418_482_262_016


def test_decode_at_512(mistral: ModelWork) -> None:
    assert (mistral.params, mistral.coverage) == (32 * LAYER_LINEARS + 2 * HEAD + NORMS, 1.0)
    work = mistral.work(Step(1, 1, 512))
    assert work.model_flops == 14_489_747_456
    assert work.weight_bytes == 14_221_320_192 == 2 * (32 * LAYER_LINEARS + HEAD + NORMS)
    assert work.kv_read_bytes == 512 * 131_072
    assert work.kv_write_bytes == 131_072
    assert work.embedding_bytes == 4096 * 2
    assert work.logits_bytes == 32000 * 2
    assert work.model_bytes == 14_288_632_320
    assert float(work.intensity) == pytest.approx(1.014, abs=5e-4)


def test_decode_in_nf4() -> None:
    nf4 = walked("mistral-7b-v0.1", quant="nf4")
    assert nf4.params == 7_241_732_096
    assert float(nf4.work(Step(1, 1, 512)).intensity) == pytest.approx(3.40, abs=0.01)


def test_executed_traffic_of_an_eager_prefill_and_decode(mistral: ModelWork) -> None:
    """The expected bytes are from a trace with fake tensors and sdpa.

    Every aten kernel reads its inputs and writes its outputs once.
    """
    assert mistral.work(Step(1, 512, 0)).executed_bytes == pytest.approx(27.15e9, rel=0.01)
    assert mistral.work(Step(1, 1, 512)).executed_bytes == pytest.approx(14.448e9, rel=0.001)


@pytest.mark.parametrize(
    ("path", "multiple"),
    [
        (ExecutionPath(), 3.0), (ExecutionPath(attention="eager"), 11.0),
        (ExecutionPath(cache="static", static_cache_len=1024), 1024 / 513),
    ],
    ids=["sdpa, dynamic", "eager, dynamic", "sdpa, static"],
)  # fmt: skip
def test_kv_traffic_as_a_multiple_of_the_minimum(mistral: ModelWork, path: ExecutionPath, multiple: float) -> None:
    work = mistral.work(Step(1, 1, 512), path)
    minimum = work.kv_read_bytes + work.kv_write_bytes
    kv_causes = {"cache copies", "repeat_kv copies", "unfilled cache slots"}
    extra = sum(value for cause, value in work.avoidable_bytes.items() if cause in kv_causes)
    assert (minimum + extra) / minimum == pytest.approx(multiple, rel=0.005)


@pytest.mark.parametrize("batch", [1, 2, 8, 32])
def test_dense_decode_intensity_is_the_batch_size(batch: int) -> None:
    assert float(walked("llama-2-7b").work(Step(batch, 1, 1)).intensity) == pytest.approx(batch, rel=0.02)
