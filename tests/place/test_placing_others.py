"""Steps, caches and devices in other tools' files, checked against arithmetic and the tools' sources."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from foreign_files import FILES, changed, served

from profiler.errors import RequestError
from profiler.place.command import place
from profiler.place.place import placed_section
from profiler.readers.detect import FORMATS, read_foreign

# Llama-3.1-8B in Q4_K: the bytes and parameters of its file, and the embedding's parameters, which no step reads.
SIZE, PARAMS, EMBEDDING = 4_912_899_072, 8_030_261_248, 128_256 * 4096
WEIGHTS = SIZE * (1 - EMBEDDING / PARAMS)


def llama_bench(path: Path, *changes: dict[str, Any]) -> Path:
    """A file of decodes of 32 tokens at 9 ms each on an RTX 4090: one row for each of `changes`."""
    model = {"model_type": "llama 8B Q4_K - Medium", "model_size": SIZE, "model_n_params": PARAMS}
    shape = {"gpu_info": "NVIDIA GeForce RTX 4090", "backends": "CUDA", "n_prompt": 0, "n_gen": 32, "n_depth": 0}
    times = {"avg_ns": 32 * 9e6, "stddev_ns": 0, "samples_ns": [32 * 9e6] * 5}
    usual = {**model, **shape, **times, "n_gpu_layers": 99}
    return changed(path, "llama-bench.json", *(usual | each for each in changes))


@pytest.mark.parametrize(
    ("type_k", "type_v", "key_bytes", "value_bytes"),
    [
        ("f32", "bf16", 4, 2),
        ("q4_0", "q4_0", 18 / 32, 18 / 32),
        ("q4_1", "q5_0", 20 / 32, 22 / 32),
        ("q5_1", "iq4_nl", 24 / 32, 18 / 32),
        ("q8_0", "f16", 34 / 32, 2),
    ],
)
def test_a_quantised_cache_has_the_bytes_of_its_blocks(
    type_k: str, type_v: str, key_bytes: float, value_bytes: float, tmp_path: Path
) -> None:
    """The floor is the weights and the cache over 1,008 GB/s: 65,552 tokens of 32 layers x 8 heads x 128 elements.

    Keys and values have a type each, in blocks of 32 elements with the sizes that ggml-common.h asserts.
    """
    head = "| model | size | params | backend | ngl | type_k | type_v | test | t/s |"
    row = f"| llama 8B | 4.58 GiB | 8.03 B | CUDA | 99 | {type_k} | {type_v} | tg32 @ d65536 | 111.11 ± 0.10 |"
    (tmp_path / "t.md").write_text("\n".join([head, "|" + " --- |" * 9, row]))
    as_json = llama_bench(tmp_path / "f", {"type_k": type_k, "type_v": type_v, "n_depth": 65_536})
    cache = (65_536 + 16) * 32 * 8 * 128 * (key_bytes + value_bytes)
    for path in (as_json, tmp_path / "t.md"):
        [found] = place(path, "llama-3.1-8b", gpu="RTX 4090").rows
        assert found.floor_s == pytest.approx((WEIGHTS + cache) / 1008e9, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "size", "gpu", "flops_per_s"),
    [
        ("llama 8B Q4_K - Medium", SIZE, "RTX 4090", 660.6e12), ("llama 8B F16", 2 * PARAMS, "RTX 4090", 165.2e12),
        ("llama 8B Q4_K - Medium", SIZE, "V100 SXM2 16GB", 125e12),
    ],
)  # fmt: skip
def test_packed_weights_are_multiplied_in_int8(
    name: str, size: int, gpu: str, flops_per_s: float, tmp_path: Path
) -> None:
    """Activations are rounded to 8 bits and multiplied on int8 tensor cores (ggml-org/llama.cpp pull request 7676).

    An RTX 4090 does 660.6 TOPS in int8, and 165.2 TFLOP/s in 16 bits with sums in 32. Without units for int8, a V100
    has the rate of its tensor cores.
    """
    prompt = {"model_type": name, "model_size": size, "n_prompt": 512, "n_gen": 0}
    [row] = place(llama_bench(tmp_path / "f", prompt), "mistral-7b-v0.1", gpu=gpu).rows
    assert row.floor_s == pytest.approx(2 * 6.98e9 * 512 / flops_per_s, rel=0.05)


@pytest.mark.parametrize(("n_batch", "n_ubatch", "chunks"), [(128, 512, 8), (2048, 256, 4), (None, 4096, 2)])
def test_a_chunk_is_no_longer_than_a_batch(n_batch: int, n_ubatch: int, chunks: int, tmp_path: Path) -> None:
    """llama.cpp cuts n_ubatch to n_batch, which is 2,048 by default: 1,024 tokens with -b 128 are 8 chunks."""
    prompt = {"n_prompt": 4096 if chunks == 2 else 1024, "n_gen": 0, "n_batch": n_batch, "n_ubatch": n_ubatch}
    [found] = place(llama_bench(tmp_path / "f", prompt), "llama-3.1-8b").rows
    assert f"the prompt ran in {chunks} chunks of " in "; ".join(found.note)


def test_a_speculative_step_gives_several_tokens(tmp_path: Path) -> None:
    """3.2 tokens per step with the bonus token: 1,024 tokens in 2.56 s are 320 steps of 8 ms, or 400 tokens/s."""
    _, decode = place(served(tmp_path / "f", acc_length=3.2), "llama-3.1-8b", gpu="H100 SXM").rows
    assert decode.latency_s == pytest.approx(8e-3)
    assert decode.tokens_per_s == pytest.approx(400)
    assert decode.regime is not None
    assert "gives 3.2 tokens per sequence" in "; ".join(decode.note)
    # The tool writes -1 for no speculation: 2.5 ms are then 1.8 times too fast for 16 GB.
    _, decode = place(served(tmp_path / "f", acc_length=-1.0), "llama-3.1-8b", gpu="H100 SXM").rows
    assert decode.regime is None
    assert "several tokens per step speculated" in "; ".join(decode.note)


def test_a_speculative_generation_has_fewer_steps(tmp_path: Path) -> None:
    """1,024 tokens at 2.8 per step: a prefill and 365 steps of 15 GB and 8 x 642 tokens of cache at 3.35 TB/s."""
    path = tmp_path / "f"
    times = {"total_latency_ms": 17_600.0, "avg_request_latency_ms": 2200.0, "request_throughput_req_s": 3.64}
    times |= {"system_output_throughput_tok_s": 1024 * 3.64, "system_total_throughput_tok_s": 1154 * 3.64}
    report = {"world_info": {"max_batch_size": 8}, "performance": times, "decoding_stats": {"acceptance_length": 2.8}}
    path.write_text(json.dumps(report))
    [row] = place(path, "llama-3.1-8b", gpu="H100 SXM").rows
    assert row.floor_s == pytest.approx(1023 / 2.8 * (7.5e9 * 2 + 8 * 642 * 131_072) / 3.35e12, rel=0.02)
    assert row.attained < 1


def test_a_prompt_from_a_cache_is_not_prefilled(tmp_path: Path) -> None:
    """Of 1,024 tokens 922 are cached: 102 are computed, 2 x 7.5e9 FLOPs each, less than reading 15 GB takes."""
    prefill, decode = place(served(tmp_path / "f", cache_hit_rate=0.9), "llama-3.1-8b", gpu="H100 SXM").rows
    assert "90 % of the prompt came from a cache" in "; ".join(prefill.note)
    assert (prefill.prompt_len, prefill.context_len) == (102, 922)
    assert prefill.floor_s == pytest.approx((7.5e9 * 2 + 1024 * 131_072) / 3.35e12, rel=0.02)
    assert decode.prompt_len + decode.context_len == 1024


A100 = "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize("new", [1, 4])
def test_a_generation_of_llama_bench_has_a_step_for_each_token(new: int, tmp_path: Path) -> None:
    """llama-bench.cpp: after the prompt, test_gen calls llama_decode n_gen times; each reads all weights."""
    both = {"n_prompt": 16, "n_gen": new, "avg_ns": 1e9, "samples_ns": [1e9] * 5}
    [found] = place(llama_bench(tmp_path / "f", both), "llama-3.1-8b").rows
    assert found.floor_s == pytest.approx((1 + new) * WEIGHTS / 1008e9, rel=5e-3)


@pytest.mark.parametrize(
    ("ran", "gpus", "stages"),
    [
        ({"split_mode": "row"}, 2, 1),
        ({"split_mode": "row", "devices": "CUDA1"}, 1, 1),
        ({"split_mode": "row", "gpu_info": f"{A100}/{A100}"}, 2, 1),
        ({"split_mode": "layer", "devices": "auto"}, 1, 2),
        ({"split_mode": "layer", "tensor_split": "1.00"}, 1, 1),
        ({"split_mode": "layer", "tensor_split": "0.00/1.00"}, 1, 1),
        ({"split_mode": "layer", "tensor_split": "0.00"}, 1, 2),
        ({"split_mode": "layer", "gpu_info": f"{A100}, AMD Radeon Graphics (RADV RAPHAEL_MENDOCINO)"}, 1, 1),
        ({"split_mode": "none", "main_gpu": 1, "gpu_info": f"NVIDIA L4, {A100}"}, 1, 1),
    ],
)
def test_only_the_gpus_that_ran_count(ran: dict[str, Any], gpus: int, stages: int, tmp_path: Path) -> None:
    """`gpu_info` lists the machine's GPUs; `devices`, `tensor_split` and `split_mode` say which of them ran."""
    found = place(llama_bench(tmp_path / "f", {"gpu_info": f"{A100}, {A100}", **ran}), "llama-3.1-8b")
    assert found.ceilings.name == f"{'2 x ' if gpus > 1 else ''}A100 80GB SXM, datasheet"
    assert [f"{stages} GPUs that hold layers" in warning for warning in found.warnings] == [True] * (stages > 1)


@pytest.mark.parametrize(
    ("lines", "gpu", "stages"),
    [
        ("ggml_vulkan: 0 = Radeon 8060S Graphics (RADV GFX1151) (radv) | uma: 1 | fp16: 1 |", "Strix Halo", 1),
        ("ggml_vulkan: 0 = NVIDIA L4 (NVIDIA) | uma: 0\nggml_vulkan: 1 = NVIDIA L4 (NVIDIA) | uma: 0", "L4", 2),
        ("ggml_metal_device_init: GPU name:   Apple M4 Max\nggml_metal_device_init: has tensor = false", "M4 Max", 1),
    ],
)
def test_lines_above_a_table_name_its_gpus(lines: str, gpu: str, stages: int, tmp_path: Path) -> None:
    table = "| model | size | params | ngl | test | t/s |\n| - | - | - | - | - | - |\n"
    (tmp_path / "f").write_text(f"{lines}\n{table}| llama 8B | 4.58 GiB | 8.03 B | 99 | tg32 | 9.9 ± 0.1 |\n")
    found = place(tmp_path / "f", "llama-3.1-8b")
    assert found.ceilings.name == f"{gpu}, datasheet"
    assert [f"{stages} GPUs that hold layers" in warning for warning in found.warnings] == [True] * (stages > 1)


EVAL = "eval time = 29100.0 ms / 500 runs"
TWO = "".join(f"  Device {at}: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: yes\n" for at in (0, 1))
HELD = "print_info: file size = 39.59 GiB (4.82 BPW)\n"
HEAD = "| model | size | params | ngl | dev | test | t/s |\n| - | - | - | - | - | - | - |\n"
DEV = HEAD + "| llama 70B | 39.59 GiB | 70.55 B | 99 | CUDA0/CUDA1 | tg500 | 17.182 ± 0.02 |\n"


@pytest.mark.parametrize(
    ("text", "tp", "gpus", "said"),
    [
        (f"$ ollama run llama3.1:70b\neval count: 501 token\neval duration: 29.1s\neval rate: {501 / 29.1:.3f} token\n",
         0, 1, "must come from at least 2 GPUs that hold layers in turn"),
        (TWO + HELD + EVAL, 0, 1, "it ran on 2 GPUs that hold layers in turn"),
        (HELD + EVAL, 2, 1, "it ran on 2 GPUs that hold layers in turn"),
        (DEV, 0, 1, "it ran on 2 GPUs that hold layers in turn"),
        (DEV, 2, 1, "it ran on 2 GPUs that hold layers in turn"),
        (DEV, 3, 1, "says that it ran on 2 GPUs, not on 3"),
        (f"$ llama-cli -sm row\n{TWO}{HELD}{EVAL}", 0, 2, ""),
        (f"$ llama-cli --split-mode row\n{HELD}{EVAL}", 2, 2, ""),
        (f"$ llama-cli -sm row\n{HELD}{EVAL}", 0, 1, "more GPUs (--tp N)"),
    ],
)  # fmt: skip
def test_layers_of_llama_cpp_are_held_in_turn(text: str, tp: int, gpus: int, said: str, tmp_path: Path) -> None:
    """69.5 B weights of Llama-3.1-70B in 4.82 bits are 41.9 GB: 45 ms at 936 GB/s, 77 % of 58.2 ms; two share rows."""
    (tmp_path / "f").write_text(text)
    found = place(tmp_path / "f", "llama-3.1-70b", gpu="RTX 3090", tp=tp, prompt_lens="1")
    [row] = found.rows
    assert row.floor_s == pytest.approx(69.5e9 * 4.82 / 8 / 936e9 / gpus, rel=0.02)
    assert said in " ".join(found.warnings)
    assert [row.fits, "--tp" not in " ".join(found.warnings)] == ["--tp" not in said] * 2


@pytest.mark.parametrize(
    ("device", "gpu", "is_same"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090", False), ("NVIDIA GeForce RTX 3080 Ti", "RTX 3080", False),
        ("Apple M4 Max", "M4", False), ("Apple M4 Max", "M4 Max 64GB", True), ("Apple M4 Max", "M4 Max 36GB", True),
        ("NVIDIA GeForce RTX 3080", "RTX 3080 12GB", True), ("NVIDIA A100-SXM4-80GB", "A100 40GB SXM", False),
        ("AMD Radeon RX 7900 XTX (RADV NAVI31)", "RX 7900 XTX", True), ("RTX 4090 24GB", "RTX 4090", True),
        ("NVIDIA GeForce RTX 3060, NVIDIA GeForce RTX 3090", "RTX 3090", True),
    ],
)  # fmt: skip
def test_a_file_of_another_device_is_in_doubt(device: str, gpu: str, is_same: bool, tmp_path: Path) -> None:
    found = place(llama_bench(tmp_path / "f", {"gpu_info": device}), "llama-3.1-8b", gpu=gpu)
    assert (f"ran on {device}, not on" in " ".join(found.warnings)) != is_same


def test_figures_without_a_layer_on_the_gpu_are_left_out(tmp_path: Path) -> None:
    """-ngl 0,99, -dev none and a build for the CPU: rows are left out; a file with only such a row is refused."""
    host = {"avg_ns": 32 * 1e8, "samples_ns": [32 * 1e8] * 5}
    rows = ({"n_gpu_layers": 0, **host}, {"n_gpu_layers": 99}, {"devices": "none", **host}, {"backends": "CPU", **host})
    found = place(llama_bench(tmp_path / "f", *rows), "llama-3.1-8b")
    [decode] = found.rows
    assert "n_gpu_layers 99" in decode.settings
    [doubt] = found.warnings
    assert "3 figures are left out" in doubt
    for row in (rows[0], *rows[2:]):
        with pytest.raises(RequestError, match="its figures are the host's"):
            place(llama_bench(tmp_path / "f", row), "llama-3.1-8b")


def test_weights_in_the_hosts_memory_need_no_room(tmp_path: Path) -> None:
    """-ngl 10 of 32 layers, or experts on the host: the GPU's ceiling is not the file's, and 16 GB need not fit.

    16 GB in 9 ms are above the ceiling. If no figure has a share, nothing is left to measure on that GPU.
    """
    big = {"model_size": 16_000_000_000}
    rows = [{"n_gpu_layers": 10, **big}, {"n_gpu_layers": 99, "n_cpu_moe": 8, **big}, {"n_gpu_layers": 99, **big}]
    found = place(llama_bench(tmp_path / "f", *rows), "llama-3.1-8b", gpu="RTX 3060 12GB")
    assert [(row.fits, row.no_share) for row in found.rows] == [*[(True, "partly on the host")] * 2, (True, "")]
    assert [row.regime for row in found.rows] == [None, None, None]
    assert "the weights need 16.0 GB" in found.warnings[1]
    assert "10 of 32 layers were on the GPU" in "; ".join(found.rows[0].note)
    assert "another, lower ceiling" in "; ".join(found.rows[1].note)
    assert "lower ceiling" not in "; ".join(found.rows[2].note)
    for part, ends in ((rows, "as they were"), (rows[:2], "roofscope count llama-3.1-8b --gpu NAME")):
        placed = place(llama_bench(tmp_path / "f", *part), "llama-3.1-8b", gpu="RTX 3060 12GB")
        assert placed_section(placed).blocks[-1].lines[-1].endswith(ends)


def test_rows_of_another_model_have_no_share(tmp_path: Path) -> None:
    """Three models in one table: of 8.03 B and 8.19 B parameters the latter are Qwen3-8B's, in two formats."""
    models = (("llama 8B Q4_K - Medium", 8.03e9), ("qwen3 8B Q4_K - Medium", 8.19e9), ("qwen3 8B Q8_0", 8.19e9))
    rows = [{"model_type": name, "model_n_params": params} for name, params in (*models, ("qwen3moe 30B.A3B", 30.5e9))]
    found = place(llama_bench(tmp_path / "f", *rows), "qwen3-8b", gpu="RTX 4090")
    assert [row.no_share for row in found.rows] == ["another model", "", "", "another model"]
    assert [row.regime is None for row in found.rows] == [True, False, False, True]
    assert found.warnings == ["2 of 4 figures are of another model: llama 8B, qwen3moe 30B.A3B."]


def test_a_cache_in_the_hosts_memory_needs_no_room(tmp_path: Path) -> None:
    """-nkvo 1: 180,000 tokens of 131,072 bytes are 23.6 GB, next to 4.9 GB of weights on a GPU of 24 GB."""
    rows = [{"n_depth": 180_000, "no_kv_offload": host, "avg_ns": 32e9, "samples_ns": []} for host in (True, False)]
    there, here = place(llama_bench(tmp_path / "f", *rows), "llama-3.1-8b").rows
    assert (there.regime, here.regime) == ("inconclusive", "inconclusive")
    assert "the cache was in the host's memory" in "; ".join(there.note)
    assert "the cache" not in "; ".join(here.note)
    weights = {"no_kv_offload": True, "model_size": 2 * PARAMS}
    too_large = place(llama_bench(tmp_path / "f", weights), "llama-3.1-8b", gpu="RTX 3060 12GB")
    assert "the weights need 16.1 GB" in too_large.warnings[1]


@pytest.mark.parametrize(("n_kv", "cells"), [(8192 + 32 * 128, 8192 + 32 * 64), (32 * (8192 + 128), 32 * (8192 + 64))])
def test_a_shared_prompt_is_cached_once(n_kv: int, cells: int, tmp_path: Path) -> None:
    """batched-bench.cpp: a unified cache has PP + B x TG cells (n_ctx_req), any other one B x (PP + TG).

    15.01 GB of weights and, on average, half of the TG cells, each of 131,072 bytes, over 3.35 TB/s.
    """
    row = {"pp": 8192, "tg": 128, "pl": 32, "n_kv": n_kv, "is_pp_shared": 1, "t_pp": 0.6, "t_tg": 2.56}
    prefill, decode = place(
        changed(tmp_path / "f", "llama-batched-bench.jsonl", row), "llama-3.1-8b", gpu="H100 SXM"
    ).rows
    assert (prefill.batch_size, decode.batch_size) == (1, 32)
    assert decode.floor_s == pytest.approx((15.01e9 + cells * 131_072) / 3.35e12, rel=5e-3)
    # 16.06 GB of weights and 1.3 GB of cache have room in 24 GB; 35 GB of cache do not.
    warnings = place(tmp_path / "f", "llama-3.1-8b", gpu="RTX 4090").warnings
    assert ("the cache of 32 x 8256 tokens need" in " ".join(warnings)) == (cells > 16_384)


PAGE = Path(__file__).parents[2] / "docs/how-to/place-others-figures.md"
EXAMPLES = re.findall(r"^\| (.+?) \| .*\| `roofscope (place .+?)` \|$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("example", [example for _, example in EXAMPLES])
def test_examples_of_tools_run(example: str, roofscope: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PAGE.parents[2])
    outcome = roofscope(*shlex.split(example))
    assert (outcome.code, outcome.err) == (0, "")
    assert "under the ceilings of" in " ".join(outcome.out.split())


def test_each_tool_has_an_example() -> None:
    """All but those that share a line with another one."""
    found = {read_foreign(FILES.parents[2] / shlex.split(example)[1]).tool for _, example in EXAMPLES}
    assert {each.tool for each in FORMATS} - found <= {"genai-perf", "SGLang bench_one_batch_server"}
