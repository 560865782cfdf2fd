"""Stored bytes: planned on meta and real, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from profiler.catalog import resolve
from profiler.loading import ModelRequest, Quant, build_on_meta, load, load_config
from profiler.timing.engines import EagerEngine, greedy_tokens
from profiler.work.footprint import model_storage_bytes
from profiler.work.formats import is_linear, storage_bytes, stored
from profiler.work.operators import Elementwise, Linear
from profiler.work.step import Step
from profiler.work.walk import walk

CPU = torch.device("cpu")


@pytest.mark.parametrize("quant", ["none", "nf4", "fp4", "int8"])
def test_planned_bytes_equal_loaded_bytes(tiny_folder: Path, quant: Quant) -> None:
    source = resolve(str(tiny_folder))
    config = load_config(source)
    dtype = torch.bfloat16
    planned = build_on_meta(config, dtype, quant)
    loaded = load(ModelRequest(source, CPU, dtype, quant), load_config(source))
    plan = walk(planned).work(Step(1, 1, 8))
    assert walk(loaded.module).work(Step(1, 1, 8)).weight_bytes == plan.weight_bytes
    greedy_tokens(EagerEngine(loaded.module), torch.arange(8)[None], 2)
    assert walk(loaded.module).work(Step(1, 1, 8)).weight_bytes == plan.weight_bytes, "after a step"


@pytest.mark.parametrize("quant", ["none", "nf4", "int8"])
def test_weights_of_a_step_are_the_storages_but_for_the_table(tiny_folder: Path, quant: Quant) -> None:
    """All storages of the model = weights that a step reads + the embedding table + rotary buffers."""
    source = resolve(str(tiny_folder))
    loaded = load(ModelRequest(source, CPU, torch.bfloat16, quant), load_config(source))
    table = storage_bytes([loaded.module.model.embed_tokens.weight])
    buffers = storage_bytes(loaded.module.buffers())
    streamed = walk(loaded.module).work(Step(1, 1, 8)).weight_bytes
    assert streamed == model_storage_bytes(loaded.module) - table - buffers


def test_bits_a_weight() -> None:
    """bitsandbytes: 4 + 32/64 bits with float32 absmax a block of 64; 8 + 32/in for a row-scaled int8."""
    model = build_on_meta(load_config(resolve("mistral-7b-v0.1")), torch.bfloat16, "nf4")
    assert stored(model.model.layers[0].mlp.up_proj).bits_per_weight == pytest.approx(4.5, abs=1e-4)
    model = build_on_meta(load_config(resolve("mistral-7b-v0.1")), torch.bfloat16, "int8")
    assert stored(model.model.layers[0].mlp.up_proj).bits_per_weight == pytest.approx(8 + 32 / 4096, abs=1e-6)
    assert stored(model.lm_head).bits_per_weight == 16


def test_quantised_linears_against_fp16(gguf_file: Path) -> None:
    """SmolLM2-135M's linears: about 0.28 (4.5 of 16 bits) and 0.51 (8 bits and a scale a row) of float16."""
    config = load_config(resolve("smollm2-135m"))

    def linear_bytes(quant: Quant) -> int:
        work = walk(build_on_meta(config, torch.float16, quant))
        return sum(
            op.count * op.weight.weight_bytes
            for op in work.operators
            if isinstance(op, Linear) and op.group != "lm_head"
        )

    assert linear_bytes("nf4") / linear_bytes("none") == pytest.approx(0.28, abs=0.03)
    assert linear_bytes("int8") / linear_bytes("none") == pytest.approx(0.51, abs=0.03)


def test_unknown_format_is_an_error() -> None:
    class Odd(torch.nn.Module):
        in_features = out_features = 4
        weight = torch.zeros(2, 2, dtype=torch.int32)

    assert is_linear(Odd())
    with pytest.raises(ValueError, match="Odd"):
        stored(Odd())


def test_conv1d_is_read_the_right_way_round() -> None:
    model = build_on_meta(load_config(resolve("gpt2")), torch.float32)
    fc = stored(model.transformer.h[0].mlp.c_fc)
    assert (fc.in_features, fc.out_features) == (768, 3072)


def test_norms_are_streamed_as_well() -> None:
    work = walk(build_on_meta(load_config(resolve("llama-2-7b")), torch.float16))
    norms = sum(
        op.count * op.weight_bytes for op in work.operators if isinstance(op, Elementwise) and op.group == "norm"
    )
    assert norms == (2 * 32 + 1) * 4096 * 2


class Packed(torch.nn.Module):
    """GPTQ's layout, 4 bits in groups of 128: int32 words of 8 weights, packed zero points, half scales, row groups."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = ins, outs
        self.register_buffer("qweight", torch.zeros(ins // 8, outs, dtype=torch.int32))
        self.register_buffer("qzeros", torch.zeros(ins // 128, outs // 8, dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(ins // 128, outs, dtype=torch.float16))
        self.register_buffer("g_idx", torch.zeros(ins, dtype=torch.int32))


def test_gptq_groups_of_128() -> None:
    """4 + 16/128 (scales) + 4/128 (zero points) bits a weight, and a 32-bit group index an input row."""
    weight = stored(Packed(4096, 1024))
    assert weight.bits_per_weight == 4 + 16 / 128 + 4 / 128 + 32 / 1024
    assert weight.compute_dtype == torch.float16


def test_float8_in_blocks_of_128() -> None:
    """8 bits a weight and a float32 scale a block of 128 x 128: 8.002 bits."""
    linear = torch.nn.Linear(1024, 512, bias=False)
    linear.weight = torch.nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)
    linear.weight_scale_inv = torch.nn.Parameter(torch.ones(4, 8))
    assert stored(linear).bits_per_weight == pytest.approx(8.002, abs=1e-3)


def test_double_quantisation_is_4_127_bits() -> None:
    """4 + 8/64 + 32/(64 x 256) bits, and about a kilobyte of code book a matrix."""
    from bitsandbytes.nn import Params4bit

    weights = torch.randn(1024, 2048)
    real = Params4bit(weights, requires_grad=False, quant_type="nf4", compress_statistics=True).to("cpu")
    linear = torch.nn.Linear(2048, 1024, bias=False)
    linear.weight, linear.compute_dtype = real, torch.bfloat16
    planned = torch.nn.Linear(2048, 1024, bias=False, device="meta")
    planned.weight = Params4bit(torch.empty(1024, 2048, device="meta"), requires_grad=False, quant_type="nf4")
    planned.compute_dtype = torch.bfloat16
    assert stored(linear).weight_bytes == stored(planned).weight_bytes
    code_books = (16 + 256 + 1) * 4
    assert (stored(linear).weight_bytes - code_books) * 8 / weights.numel() == pytest.approx(4.126953, abs=1e-6)


def test_a_format_without_a_rule_lowers_coverage(tiny_folder: Path) -> None:
    model = build_on_meta(load_config(resolve(str(tiny_folder))), torch.float32)
    odd = model.model.layers[0].mlp.up_proj
    odd.weight = torch.nn.Parameter(torch.zeros(96, 64, dtype=torch.int32), requires_grad=False)
    counted = walk(model)
    assert counted.coverage == pytest.approx(1 - 96 * 64 / counted.params)
    assert "up_proj" in counted.unknown[0]
