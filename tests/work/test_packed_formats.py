"""Formats that other libraries write, made by those very libraries."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from profiler.catalog import resolve
from profiler.loading import ModelRequest, build_on_meta, load, load_config
from profiler.work.formats import storage_bytes, stored
from profiler.work.operators import Linear
from profiler.work.step import Step
from profiler.work.walk import walk

W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
        }
    },
}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, vocab_size=128
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.fixture(scope="module")
def compressed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A W4A16 checkpoint, compressed and saved by compressed-tensors."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = llama()
    apply_quantization_config(model, QuantizationConfig.model_validate(copy.deepcopy(W4A16)))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.reshape(module.weight.shape[0], -1, 128)
            module.weight_scale.data = (groups.float().abs().amax(-1) / 7.5).to(module.weight_scale.dtype)
    compressor = compressors.ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")
    compressor.compress_model(model)
    weight = stored(model.model.layers[0].self_attn.q_proj)
    # 4 bits a weight, a bfloat16 scale a group of 128, and the two int64 of its shape.
    assert weight.weight_bytes == 256 * 256 // 2 + 256 * 2 * 2 + 2 * 8
    assert weight.format == "packed"
    folder = tmp_path_factory.mktemp("models") / "w4a16"
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return folder


def test_compressed_tensors_are_counted_as_they_run(compressed_folder: Path) -> None:
    """transformers unpacks them in the first forward pass: the decode step then reads 16 bits a weight, not 4."""
    source = resolve(str(compressed_folder))
    config = load_config(source)
    planned = walk(build_on_meta(copy.deepcopy(config), torch.bfloat16)).work(Step(1, 1, 8)).weight_bytes
    loaded = load(ModelRequest(source, torch.device("cpu"), torch.bfloat16, weights="checkpoint"), config)
    work = walk(loaded.module)
    linears = [op for op in work.operators if isinstance(op, Linear) and op.group != "lm_head"]
    assert all(op.weight.bits_per_weight == 16 for op in linears)
    assert work.work(Step(1, 1, 8)).weight_bytes == planned


@pytest.mark.parametrize(("config_name", "scale_bytes"), [("Int8WeightOnlyConfig", 5), ("Float8WeightOnlyConfig", 4)])
def test_torchao_weight_only(config_name: str, scale_bytes: int) -> None:
    """8 bits a weight and a float32 scale a row (int8: and a zero point of a byte), to the byte of its storages."""
    quantization = pytest.importorskip("torchao.quantization")
    linear = nn.Linear(128, 256, bias=False, dtype=torch.bfloat16)
    quantization.quantize_(nn.Sequential(linear), getattr(quantization, config_name)())
    weight: Any = linear.weight
    inner = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    assert stored(linear).weight_bytes == storage_bytes(inner) == 128 * 256 + scale_bytes * 256
    assert stored(linear).compute_dtype == torch.bfloat16
    planned = nn.Linear(128, 256, bias=False, dtype=torch.bfloat16, device="meta")
    quantization.quantize_(nn.Sequential(planned), getattr(quantization, config_name)())
    assert stored(planned).weight_bytes == stored(linear).weight_bytes


def test_torchao_int4_weight_only() -> None:
    """4 bits a weight, and a bfloat16 scale and zero point a group of 128: 4.25 bits in torchao's CPU layout."""
    prototype = pytest.importorskip("torchao.prototype.quantization.int4")
    quantization = pytest.importorskip("torchao.quantization")
    linear = nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
    quantization.quantize_(nn.Sequential(linear), prototype.PrototypeInt4WeightOnlyConfig(group_size=128))
    assert stored(linear).bits_per_weight == 4.25


class Awq(nn.Module):
    """AWQ's GEMM layout, 4 bits in groups of 128: 8 outputs an int32 word, packed zero points, half scales."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = ins, outs
        self.register_buffer("qweight", torch.zeros(ins, outs // 8, dtype=torch.int32))
        self.register_buffer("qzeros", torch.zeros(ins // 128, outs // 8, dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(ins // 128, outs, dtype=torch.float16))


def test_awq_groups_of_128() -> None:
    """AWQ keeps no group index: 4 + 16/128 + 4/128 = 4.15625 bits a weight (arXiv:2306.00978, group size 128)."""
    weight = stored(Awq(4096, 1024))
    assert weight.bits_per_weight == 4.15625
    assert weight.format == "awq"
