"""Stored bytes: planned on meta they are those of the loaded model, also in files that other libraries wrote."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import loaded, on_meta, walked
from machines import CPU
from safetensors.torch import save_file
from simulated import four_bit
from small_models import small_model
from torch import nn

from profiler.counting.cache import counted_model
from profiler.counting.count import count
from profiler.counting.operators import Experts, Linear
from profiler.counting.walk import walk
from profiler.facts.step import Step, StoredWeight
from profiler.loading.config import load_config
from profiler.loading.device_map import planned_weight_bytes
from profiler.loading.meta_model import build_on_meta
from profiler.loading.source import presets, resolve
from profiler.quant.bitsandbytes import dense_rows
from profiler.quant.registry import QuantOptions
from profiler.quant.storage import conversion_calls, stored

pytestmark = pytest.mark.cpu

# The 4-bit formats have two layouts on a CPU: as quantised, and repacked for its fused kernel.


@pytest.mark.parametrize(("fused", "double"), [(False, False), (True, False), (True, True)])
def test_scales_for_a_fused_kernel_are_smaller(monkeypatch: pytest.MonkeyPatch, fused: bool, double: bool) -> None:
    """Two layers of SmolLM2: 4 bits per weight, 16 codes per matrix, a float32 or bfloat16 absmax per block of 64."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: fused)
    config = {**presets()["smollm2-135m"].config, "num_hidden_layers": 2}
    model = on_meta(config, quant="nf4", options=QuantOptions(double=double), device=CPU)
    weights = 2 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    matrices, norms = 2 * 7, 5 * 576 * 2
    expected = weights // 2 + weights // 64 * (2 if fused else 4) + matrices * 16 * 4 + 49152 * 576 * 2 + norms
    expected += matrices * 4 if double else 0  # the float32 offset of the second level remains
    assert walk(model).work(Step(1, 1, 8)).weight_bytes == expected
    here, on_a_card, anywhere = (
        each.model.layers[0].mlp.up_proj
        for each in (model, *(on_meta(config, quant="nf4", device=to) for to in (torch.device("cuda"), None)))
    )
    assert stored(here).dense_from_rows == (None if fused else 1)
    assert not on_a_card.support_avx512bf16_for_cpu, "the kernel of this CPU does not apply to a card"
    library_bytes = 576 * 1536 // 2 + 576 * 1536 // 64 * 4 + 16 * 4
    assert stored(anywhere).weight_bytes == library_bytes, "without a device, the layout is that of the library"


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


GROUPS_OF_128 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
W4A16 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUPS_OF_128}},
}  # fmt: skip


def llama() -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
    return small_model("Llama", **sizes, num_hidden_layers=1).to(torch.bfloat16)


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
    # 4 bits per weight, a bfloat16 scale per group of 128, and the two int64 of its shape.
    assert weight.weight_bytes == 256 * 256 // 2 + 256 * 2 * 2 + 2 * 8
    assert weight.format == "packed"
    folder = tmp_path_factory.mktemp("models") / "w4a16"
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return folder


def test_compressed_tensors_are_counted_as_they_run(compressed_folder: Path) -> None:
    """transformers unpacks them in the first forward pass, so a decode step reads 16 bits per weight, not 4."""
    model = loaded(compressed_folder, torch.bfloat16)
    work = walk(model.module)
    assert all(op.weight.bits_per_weight == 16 for op in work.of_kind(Linear))
    assert model.unpacked_from == "compressed-tensors"
    assert work.work(Step(1, 1, 8)).weight_bytes == walked(str(compressed_folder)).work(Step(1, 1, 8)).weight_bytes
    shown = count(str(compressed_folder))
    assert shown.published is None
    assert shown.note.startswith("the weights are stored as compressed-tensors, and counted as transformers runs them")


def planned(card: str, **quantization: Any) -> Any:
    config = load_config(resolve(card))
    config.quantization_config = quantization
    return build_on_meta(config, torch.bfloat16)


@pytest.mark.parametrize(
    ("card", "quantization", "file_bytes", "params"),
    [
        # TheBloke/Llama-2-7B-Chat-GPTQ lists 4.28 GB for 4 bits in groups of 32.
        ("llama-2-7b", {"quant_method": "gptq", "bits": 4, "desc_act": True, "group_size": 32}, 4.28e9, 6_738_415_616),
        # gpt-oss model card, arXiv:2508.10925, table 1.
        ("gpt-oss-20b", {"quant_method": "mxfp4"}, 12.8 * 2**30, 20_914_757_184),
    ],
    ids=["gptq", "mxfp4"],
)
def test_a_checkpoint_is_planned_to_the_size_of_its_published_files(
    card: str, quantization: dict[str, Any], file_bytes: float, params: int
) -> None:
    module = planned(card, **quantization)
    assert planned_weight_bytes(module) == pytest.approx(file_bytes, rel=0.005), "integers in buffers, too"
    counted = walk(module)
    assert (counted.params, counted.coverage) == (params, 1.0)


def test_awq_has_no_group_index() -> None:
    """4 + 16/128 + 4/128 = 4.15625 bits per weight (arXiv:2306.00978, group size 128); GPTQ adds 32 bits per input."""
    awq = planned("mistral-7b-v0.1", quant_method="awq", bits=4, group_size=128, zero_point=True, version="gemm")
    weight = stored(awq.model.layers[0].self_attn.k_proj)
    assert (weight.format, weight.bits_per_weight) == ("awq", 4.15625)
    gptq = planned("mistral-7b-v0.1", quant_method="gptq", bits=4, group_size=128)
    assert stored(gptq.model.layers[0].self_attn.k_proj).bits_per_weight == 4.15625 + 32 / 1024


def test_dense_weights_of_a_packed_checkpoint() -> None:
    module = planned("mixtral-8x7b", quant_method="awq", bits=4, group_size=128, modules_to_not_convert=["gate"])
    assert module.model.layers[0].mlp.gate.weight.dtype == torch.bfloat16
    assert stored(module.model.layers[0].self_attn.q_proj).format == "awq"
    # GPTQModel's patterns of modules (`dynamic`) leave some dense, and give others more bits.
    dynamic = {"-:.*attn.*": {}, "+:.*down_proj.*": {"bits": 8}}
    chosen = planned("llama-2-7b", quant_method="gptq", bits=4, group_size=128, dynamic=dynamic).model.layers[0]
    assert isinstance(chosen.self_attn.q_proj, nn.Linear)
    assert [stored(part).bits_per_weight // 1 for part in (chosen.mlp.up_proj, chosen.mlp.down_proj)] == [4, 8]


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["gate"]}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("card", "quantization", "params", "expert_bytes"),
    [
        # 4 bits, and per group of 128 a float16 scale and a 4-bit zero.
        ("mixtral-8x7b", AWQ, 46_702_792_704, 3 * 4096 * 14336 * (4 + (16 + 4) / 128) / 8),
        # 4.25 bits, and biases in 16 (gpt-oss model card, arXiv:2508.10925, table 1).
        ("gpt-oss-20b", {"quant_method": "mxfp4"}, 20_914_757_184, 3 * 2880 * 2880 * 4.25 / 8 + 2 * (5760 + 2880)),
        # Qwen/Qwen3-30B-A3B-FP8: 8 bits, and a float32 per block of 128 x 128.
        ("qwen3-30b-a3b", FP8, 30_532_122_624, 3 * 2048 * 768 + 4 * (16 * 12 + 6 * 16)),
    ],
    ids=["awq", "mxfp4", "fp8"],
)
def test_packed_experts_have_their_published_bytes_and_the_flops_of_dense_ones(
    card: str, quantization: dict[str, Any], params: int, expert_bytes: float
) -> None:
    packed, dense = walk(planned(card, **quantization)), counted_model(resolve(card)).work
    assert (packed.params, packed.coverage) == (params, 1.0)
    assert packed.work(Step(1, 1, 512)).model_flops == dense.work(Step(1, 1, 512)).model_flops
    [experts] = packed.of_kind(Experts)
    assert experts.expert_bytes == expert_bytes


def test_experts_in_tritons_layout_count_as_in_the_checkpoint() -> None:
    """On a GPU with triton's kernels, transformers removes the blocks from the parameters after loading."""
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    in_layout = on_meta("gpt-oss-20b")
    for name, _ in [pair for pair in in_layout.named_modules() if pair[0].endswith(".experts")]:
        with torch.device("meta"):
            experts = Mxfp4GptOssExperts(in_layout.config).to(torch.bfloat16)
        del experts._parameters["gate_up_proj"], experts._parameters["down_proj"]
        experts.gate_up_proj = experts.down_proj = object()
        in_layout.set_submodule(name, experts)
    counted, expected = walk(in_layout), walked("gpt-oss-20b")
    assert (counted.params, counted.coverage) == (expected.params, 1.0) == (20_914_757_184, 1.0)
    found, step = (work.work(Step(1, 1, 512)) for work in (counted, expected))
    assert (found.model_bytes, found.model_flops) == (step.model_bytes, step.model_flops)


def test_packed_gguf_blocks() -> None:
    """Q8_0 is 34 bytes for 32 weights (ggml, `block_q8_0`), so 8.5 bits; a lookup reads only the blocks of its row."""
    from transformers.integrations.gguf.utils import GgufEmbedding, GgufLinear

    module = on_meta("llama-2-7b", torch.float32)
    dense = walk(module)
    q8_0 = 8
    with torch.device("meta"):
        module.model.embed_tokens = GgufEmbedding(32000, 4096, q8_0)
        for name, linear in [pair for pair in module.named_modules() if isinstance(pair[1], nn.Linear)]:
            module.set_submodule(name, GgufLinear(linear.in_features, linear.out_features, q8_0))
    counted = walk(module)
    assert (counted.params, counted.coverage) == (dense.params, 1.0) == (6_738_415_616, 1.0)
    weight = stored(module.lm_head)
    assert (weight.bits_per_weight, weight.dense_from_rows) == (8.5, 9)
    assert conversion_calls([module.lm_head], 9, torch.float32) == [], "its kernel converts part by part"
    step = Step(1, 1, 0)
    norms = 65 * 4096 * 4
    assert counted.work(step).weight_bytes == (6_738_415_616 - 65 * 4096 - 32000 * 4096) * 34 // 32 + norms
    assert counted.work(step).embedding_bytes == 4096 * 34 // 32


def saved(folder: Path, config: Any, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> Path:
    """Write a checkpoint folder as a quantiser does."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({**config.to_dict(), "dtype": "bfloat16", "quantization_config": quantization})
    )
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3's FP8: float8 weights with a float32 scale per block of 128 x 128."""
    model = llama()
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        outs, ins = tensors[name].shape
        blocks = tensors[name].float().reshape(outs // 128, 128, ins // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        tensors[name] = (blocks / scale[:, None, :, None]).reshape(outs, ins).to(torch.float8_e4m3fn)
        tensors[name.replace("weight", "weight_scale_inv")] = scale
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    return saved(tmp_path_factory.mktemp("models") / "fp8", model.config, tensors, quantization)


@pytest.fixture(scope="module")
def mxfp4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss of one layer with four experts, their weights in blocks of 32."""
    sizes = {"intermediate_size": 64, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = small_model("GptOss", **sizes, num_hidden_layers=1, layer_types=["full_attention"]).to(torch.bfloat16)
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, ins, outs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outs, ins // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, outs, ins // 32), 120, dtype=torch.uint8)
    return saved(tmp_path_factory.mktemp("models") / "mxfp4", model.config, tensors, {"quant_method": "mxfp4"})


@pytest.mark.parametrize(("fixture", "method"), [("fp8_folder", "fp8"), ("mxfp4_folder", "mxfp4")])
def test_unpacked_formats_are_counted_as_they_run(fixture: str, method: str, request: pytest.FixtureRequest) -> None:
    """Without kernels for these formats, transformers unpacks them at loading, and a step reads 16 bits per weight."""
    if torch.cuda.is_available():
        pytest.skip("a card may have the kernels")
    folder, step = str(request.getfixturevalue(fixture)), Step(1, 1, 8)
    here, as_stored = walked(folder, as_run_here=True), walked(folder)
    for weights in ("checkpoint", "random"):
        model = loaded(folder, torch.bfloat16, weights=weights)
        assert model.unpacked_from == method
        assert walk(model.module).work(step).weight_bytes == here.work(step).weight_bytes
    assert as_stored.work(step).weight_bytes < 0.75 * here.work(step).weight_bytes
    assert as_stored.coverage == here.coverage == 1
