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
