"""The stored bytes planned on meta are exactly those of the loaded model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loaded import on_meta, walked
from machines import CPU
from simulated import four_bit

from profiler.counting.memory_need import cache_bytes, memory_need
from profiler.counting.walk import walk
from profiler.facts.operators import Cause
from profiler.facts.step import ExecutionPath, Step, StoredWeight
from profiler.quant.bitsandbytes import dense_rows
from profiler.quant.registry import QuantOptions
from profiler.quant.storage import stored

pytestmark = pytest.mark.cpu

# The 4-bit formats have two layouts on a CPU: as quantised, and repacked for its fused kernel.


@pytest.mark.parametrize(("fused", "double"), [(False, False), (True, False), (True, True)])
def test_a_cpu_with_a_fused_kernel_has_smaller_scales(
    monkeypatch: pytest.MonkeyPatch, fused: bool, double: bool
) -> None:
    """Weights take 4 bits, and a matrix 16 codes. A block of 64 has a float32 absmax, or an unnested bfloat16 one."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: fused)
    model = on_meta("smollm2-135m", quant="nf4", options=QuantOptions(double=double), device=CPU)
    weights = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    matrices, norms = 30 * 7, 61 * 576 * 2
    expected = weights // 2 + weights // 64 * (2 if fused else 4) + matrices * 16 * 4 + 49152 * 576 * 2 + norms
    expected += matrices * 4 if double else 0  # the float32 offset of the second level remains
    assert walk(model).work(Step(1, 1, 8)).weight_bytes == expected
    if not double:
        assert expected == (113_108_736 if fused else 116_426_496)
    here, on_a_card, anywhere = (
        each.model.layers[0].mlp.up_proj
        for each in (model, *(on_meta("smollm2-135m", quant="nf4", device=to) for to in (torch.device("cuda"), None)))
    )
    assert stored(here).dense_from_rows == (None if fused else 1)
    assert not on_a_card.support_avx512bf16_for_cpu, "the kernel of this CPU does not apply to a card"
    library_bytes = 576 * 1536 // 2 + 576 * 1536 // 64 * 4 + 16 * 4
    assert stored(anywhere).weight_bytes == library_bytes, "without a device, the layout is that of the library"


def test_double_quantisation_is_4_127_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 + 8/64 + 32/(64 x 256) bits, and about a kilobyte of code book per matrix."""
    from bitsandbytes.nn import LinearNF4

    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    real, planned = (LinearNF4(2048, 1024, bias=False, device=device).to(device) for device in ("cpu", "meta"))
    real.compute_dtype = planned.compute_dtype = torch.bfloat16
    assert real.weight.bnb_quantized
    assert stored(real).weight_bytes == stored(planned).weight_bytes
    code_books = (16 + 256 + 1) * 4
    assert (stored(real).weight_bytes - code_books) * 8 / (2048 * 1024) == pytest.approx(4.126953, abs=1e-6)


def test_cache_and_peak() -> None:
    """Llama-2-7B caches 524,288 bytes per token, 2 GiB at 4096. Mistral v0.1's window of 4096 keeps 4095."""
    llama, llama3 = walked("llama-2-7b"), walked("llama-3.1-8b")
    assert cache_bytes(llama, 1, 4096) == 2 * 2**30
    assert cache_bytes(walked("mistral-7b-v0.1"), 2, 30_000) == 2 * 4095 * 131_072
    weights = 13_476_831_232
    peak = memory_need(llama, weights, Step(8, 2048, 0), 32, ExecutionPath()).peak_bytes
    cache = 8 * 2080 * 524_288
    # To weights and cache, the MLP adds gate, up and their product, and four hidden states.
    widest = 8 * 2048 * (3 * 11008 + 4 * 4096) * 2
    assert peak == pytest.approx(weights + cache + widest, rel=0.001)
    # Llama-3.1's logits for all of 8 x 2048 positions are 4.2 GB of bfloat16, made from 0.13 GB of hidden states.
    one = memory_need(llama3, 0, Step(8, 2048, 0), 32, ExecutionPath()).peak_bytes
    every = memory_need(llama3, 0, Step(8, 2048, 0), 32, ExecutionPath(all_logits=True)).peak_bytes
    cache = cache_bytes(llama3, 8, 2080)
    assert every == pytest.approx(cache + 8 * 2048 * (4096 + 128_256) * 2, rel=0.001)
    assert every > one


def test_a_kernel_that_is_fused_again_from_some_rows_on() -> None:
    """For 11008 inputs and 4096 outputs, bitsandbytes 0.50 on an A100 is dense at 6 and 7 rows and from 17 on."""
    weight = StoredWeight("nf4", 11008, 4096, 1, 0, torch.bfloat16, dense_from_rows=6, fused_rows=((8, 16),))
    rows = [5, 6, 7, 8, 16, 17, 1537]
    copied = weight.conversion_bytes(np.array(rows), torch.bfloat16, 0)[Cause.DEQUANTISATION]
    copy = 2 * 2 * 11008 * 4096
    assert copied.tolist() == [0, copy, copy, 0, 0, copy, copy]
    assert [bool(weight.writes_dense_copy(each)) for each in rows] == [bool(each) for each in copied]


A100, T4 = (108, 8, 0), (40, 7, 5)


@pytest.mark.parametrize(
    ("card", "dtype", "shape", "dense", "always_from"),
    [(A100, torch.bfloat16, (11008, 4096), {6, 7}, 17), (T4, torch.float16, (1536, 1536), {5, 6, 7, 8}, 65)],
)
def test_bitsandbytes_own_table_is_not_monotone(
    card: tuple[int, ...], dtype: torch.dtype, shape: tuple[int, int], dense: set[int], always_from: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The rows are from `_gemm_4bit_use_custom_cuda` (bitsandbytes 0.50, backends/cuda/ops.py) for an A100 and a T4."""
    table = four_bit.table()
    if table is None:
        pytest.skip("bitsandbytes 0.50 is not installed")
    monkeypatch.setattr(table, "_gpu_dispatch_props", lambda _index: card)
    table._gemm_4bit_use_custom_fn.cache_clear()
    ins, outs = shape
    rows = dense_rows(lambda rows: table._gemm_4bit_use_custom_fn(0, dtype, rows, outs, ins), 1536)
    table._gemm_4bit_use_custom_fn.cache_clear()
    weight = StoredWeight("nf4", ins, outs, 1, 0, dtype, dense_from_rows=rows.dense_from, fused_rows=rows.fused)
    assert {each for each in range(1, always_from) if weight.writes_dense_copy(each)} == dense
    assert rows.always_from == always_from
