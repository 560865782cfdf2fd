"""Another tool's figures compared with ceilings, checked against figures from outside."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from foreign_files import FILES, changed

from profiler.counting.operators import Experts
from profiler.counting.preset_counts import preset_counts
from profiler.data.datasheets import gpu_called
from profiler.errors import RequestError
from profiler.loading.source import presets
from profiler.place.command import place

COLUMNS = ("phase", "batch_size", "prompt_len", "new_tokens", "latency_s", "bits_per_weight", "tokens_per_step")


def table(path: Path, *rows: tuple[object, ...]) -> Path:
    """A plain table, whose rows have the first of the columns."""
    path.write_text("\n".join(",".join(map(str, row)) for row in (COLUMNS[: len(rows[0])], *rows)))
    return path


STEP = ("decode", 1, 1, 1, 1.0)


@pytest.mark.parametrize(
    ("row", "model", "requested", "floor_s"),
    [
        # Gemma-2-9B's 9.24 B weights are in float32, and 18.5 GB as vLLM serves them: 18.3 ms at 1,008 GB/s, not 36.7.
        (("decode", 1, 64, 32, 0.0225), "gemma-2-9b", {"gpu": "RTX 4090"}, 9.2417e9 * 2 / 1008e9),
        # Mistral-7B has 6.98e9 block weights: 2 FLOPs per weight and token, and the triangle of attention.
        (("prefill", 1, 2048, "", 0.05), "mistral-7b-v0.1", {"gpu": "H100 SXM"},
         (2 * 6.98e9 * 2048 + 4 * 32 * 4096 * 2048**2 / 2) / 989.4e12),
        # 4,096 prompts of 131,072 tokens through 70 billion parameters: 7.3e19 FLOPs, eight times what int64 holds.
        (("prefill", 4096, 131_072, "", 1e6), "llama-3.1-70b", {"gpu": "H100 SXM"},
         4096 * (2 * 68.45e9 * 131_072 + 80 * 4 * 8_192 * 131_072**2 / 2) / 989.4e12),
        # gpt-fast, README: 104.9 tokens/s after a prompt of 5. 13.21 GB of weights without the embedding, and 105
        # tokens of cache: 6.51 ms of 9.53.
        (("decode", 1, 5, 200, 1 / 104.9), "llama-2-7b", {"gpu": "A100 80GB SXM"}, 0.683 / 104.9),
        # Linears in the format's bits and the head in 16, or all that a step reads in a mean.
        (STEP, "llama-3.1-70b", {"quant": "nvfp4", "gpu": "GB10"}, (68.45e9 * 4.5 / 8 + 2.10e9) / 273e9),
        (STEP, "llama-3.1-70b", {"bits": 4.84, "gpu": "GB10"}, 69.50e9 * 4.84 / 8 / 273e9),
        (STEP, "qwen3-8b", {"quant": "Q4_K_M", "gpu": "M4 Max 64GB"}, 7.57e9 * 4.8944 / 8 / 546e9),
        (STEP, "llama-3.1-8b", {"quant": "FP8", "gpu": "L4"}, (6.98e9 + 0.525e9 * 2) / 300e9),
        # 5.65 GiB of 8.03 B weights are 6.04 bits.
        (STEP, "qwen3-8b", {"quant": "q5_1", "gpu": "L4"}, 7.57e9 * 6.04 / 8 / 300e9),
        # 19.1 B x 4 of 32 experts in 4.25 bits, and 1.22 B in 16.
        (STEP, "gpt-oss-20b", {"quant": "mxfp4", "gpu": "L4"}, 3.70e9 / 300e9),
        # Packed bytes are not scaled again: 7.5 B weights in a file's own 4.5 bits, whatever is requested.
        (("decode", 1, 64, 1, 0.02, 4.5), "llama-3.1-8b", {"gpu": "L4"}, (7.505e9 * 4.5 / 8 + 64 * 131_072) / 300e9),
        (("decode", 1, 64, 1, 0.02, 4.5), "llama-3.1-8b", {"gpu": "L4", "quant": "nf4"}, 4.23e9 / 300e9),
        # 29.0 B x 8 of 128 experts and 0.91 B of attention in 8 bits, the head in 16.
        (STEP, "qwen3-30b-a3b", {"quant": "fp8", "gpu": "L40S"}, 3.34e9 / 864e9),
        # Servers multiply in FP8: 65,536 tokens, and attention in 16 bits. An A100 has no units for FP8.
        (("prefill", 8, 8192, 0, 1.0), "llama-3.1-8b", {"quant": "fp8", "gpu": "H100 SXM"},
         2 * 6.98e9 * 65_536 / 1979e12 + 32 * 8 * 2 * 4096 * 8192**2 / 989.4e12),
        (("prefill", 8, 8192, "", 3.0), "llama-3.1-8b", {"quant": "fp8", "gpu": "A100 80GB SXM"},
         (2 * 6.98e9 * 65_536 + 32 * 8 * 2 * 4096 * 8192**2) / 312e12),
    ],
)  # fmt: skip
def test_a_floor_is_that_of_arithmetic(
    row: tuple[object, ...], model: str, requested: dict[str, Any], floor_s: float, tmp_path: Path
) -> None:
    [found] = place(table(tmp_path / "t", row), model, **requested).rows
    assert found.floor_s == pytest.approx(floor_s, rel=0.01)
    assert found.bound == ("compute" if row[0] == "prefill" else "memory")


def test_a_figure_above_the_ceiling_is_not_valid(tmp_path: Path) -> None:
    """14.2 GB at 3.35 TB/s take 4.2 ms: nothing decodes Mistral-7B in 16 bits in 1 ms."""
    path = table(tmp_path / "t", ("decode", 1, 64, 32, 0.001), ("prefill", 1, 2048, "", 0.001))
    found = place(path, "mistral-7b-v0.1", gpu="H100 SXM")
    assert [row.regime for row in found.rows] == [None, None]
    assert "from a cache" in "; ".join(found.rows[1].note)
    # 14.48 GB of 16 bits would take 4.3 ms: in 1 ms a step reads less than 4 bits per weight.
    assert "by its times at most 3.8 on H100 SXM" in found.warnings[0]
    assert found.warnings[1:] == ["2 of 2 figures are above the ceiling, so not valid."]


def test_decode_steps_that_include_the_prefill_are_reported(tmp_path: Path) -> None:
    """Tokens/s over a whole generation: after 16 times the prompt a step takes 3.5 times as long."""
    rows = [("decode", 1, prompt, 32, (prompt * 0.2e-3 + 31 * 5e-3) / 32) for prompt in (64, 256, 1024)]
    found = place(table(tmp_path / "t", *rows), "mistral-7b-v0.1", gpu="H100 SXM")
    assert any("include the prompt's time" in doubt for doubt in found.warnings)
    honest = [("decode", 1, prompt, 32, 5e-3 + prompt * 1e-7) for prompt in (64, 256, 1024)]
    assert not place(table(tmp_path / "u", *honest), "mistral-7b-v0.1", gpu="H100 SXM").warnings


def test_a_cold_first_repetition_is_reported(tmp_path: Path) -> None:
    """A first repetition that takes 1.9 times as long as two others; one within the noise; only one other."""
    for samples, is_cold in (([1.9e9, 1.0e9, 1.0e9], True), ([1.2e9, 1.0e9, 1.1e9], False), ([1.9e9, 1.0e9], False)):
        path = changed(tmp_path / "file", "llama-bench.json", {"backends": "CUDA", "samples_ns": samples})
        [row] = place(path, "smollm2-135m", gpu="T4").rows
        assert ("1.9 times as long as the others" in "; ".join(row.note)) == is_cold


def test_a_generation_is_its_prefill_and_its_steps(tmp_path: Path) -> None:
    generation = ("generate", 4, 128, 32, 1.0)
    path = table(tmp_path / "t", generation, ("prefill", 4, 128, "", 1.0), ("decode", 4, 128, 32, 1.0))
    whole, prefill, step = place(path, "smollm2-135m", gpu="H100 SXM").rows
    assert whole.floor_s == pytest.approx(prefill.floor_s + 31 * step.floor_s)


def test_what_a_file_does_not_say_is_asked_for(roofscope: Callable[..., Any]) -> None:
    with pytest.raises(RequestError, match="Give --gpu NAME, or --here"):
        place(FILES / "table.csv", "smollm2-135m")
    arguments = ("place", str(FILES / "vllm-latency.json"), "--model", "smollm2-135m", "--gpu", "T4")
    refused = roofscope(*arguments)
    assert refused.code == 2
    assert "give --batch-sizes and --prompt-lens and --new-tokens" in refused.err
    done = roofscope(*arguments, "--prompt-lens", "128", "--batch-sizes", "4", "--new-tokens", "32", "--format", "json")
    [row] = json.loads(done.out)["rows"]
    assert (row["phase"], row["batch_size"], row["prompt_len"], row["new_tokens"]) == ("generate", 4, 128, 32)
    assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["latency_s"])
    with pytest.raises(RequestError, match="give one number each"):
        place(
            FILES / "vllm-latency.json", "smollm2-135m", gpu="T4", prompt_lens="1,2", batch_sizes="1", new_tokens="32"
        )


@pytest.mark.slow
def test_here_is_this_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roofscope: Callable[..., Any]) -> None:
    """They are measured for any device in the file: a decode step reads its bytes at that bandwidth.

    On a CPU that emulates bfloat16, its matmuls take longer than that.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "roofs"))
    path = table(tmp_path / "t", ("decode", 1, 64, 32, 10.0))
    done = roofscope("place", str(path), "--model", "smollm2-135m", "--here", "--format", "json")
    found = json.loads(done.out)
    assert found["ceilings"]["name"].endswith(", measured")
    [row] = found["rows"]
    # 134.5 M weights of 2 bytes, 80 tokens of 23,040 bytes of cache, and logits of 2 bytes.
    nbytes = 2 * 134_515_008 + 80 * 23_040 + 2 * 49_152
    # 2 FLOPs per weight, and 4 x 576 per token and layer for attention.
    flops = 2 * 134_515_008 + 30 * 4 * 576 * 80
    read_s, matmuls_s = nbytes / found["ceilings"]["bytes_per_s"], flops / found["ceilings"]["flops_per_s"]["bfloat16"]
    assert row["floor_s"] == pytest.approx(max(read_s, matmuls_s), rel=0.01)
    assert row["bound"] == ("memory" if read_s > matmuls_s else "compute")


@pytest.mark.ci
def test_files_and_presets_load_no_model_library(tmp_path: Path) -> None:
    """torch takes over a second to load, pandas a third of one."""
    file = str(table(tmp_path / "a", ("decode", 1, 64, 32, 1)))
    commands = (
        ["compare", file, file], ["place", file, "--model", "smollm2-135m", "--gpu", "T4"],
        ["rent", "mistral-7b-v0.1", "--quant", "int4wo"],
    )  # fmt: skip
    script = (
        "import sys\nfrom profiler.cli.app import app\n"
        f"for command in {commands!r}:\n    app(command, standalone_mode=False)\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert {"profiler.comparison.compare", "profiler.place.place", "profiler.rent.command"} <= loaded
    assert not {"torch", "transformers", "pandas", "matplotlib"} & loaded


MIXTURES = [name for name in presets() if (counted := preset_counts(name)) and counted.work.of_kind(Experts)]


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_needs_room_for_all_of_its_experts(name: str, tmp_path: Path) -> None:
    """One token reads few of them: what it reads would fit. A GPU with less room than the stored weights holds none."""
    found = place(table(tmp_path / "t", ("decode", 1, 64, 32, 0.05, 16)), name, gpu="T4")
    [row] = found.rows
    assert (row.fits, row.regime) == (False, None)
    assert "the weights need" in found.warnings[0]
    assert "more GPUs (--tp N), another GPU or fewer bits, or the host's memory held a part" in found.warnings[0]
    assert place(table(tmp_path / "t", ("decode", 1, 64, 32, 0.05)), name, gpu="B300 SXM").rows[0].fits


def test_a_cache_without_room_is_reported(tmp_path: Path) -> None:
    """16.1 GB of Llama-3.1-8B and 131,072 bytes per token: 128 x 8,704 tokens are 146 GB, and 73 in 8 bits.

    Those of 32 sequences are 36 GB, of which an A100 40GB holds half.
    """
    path = table(tmp_path / "t", *(("decode", batch, 8192, 1024, 0.1) for batch in (128, 32, 1)))
    found = place(path, "llama-3.1-8b", gpu="A100 40GB SXM")
    assert [(row.fits, row.regime) for row in found.rows] == [
        (False, None), (True, "inconclusive"), (True, "inconclusive")
    ]  # fmt: skip
    assert "the weights and the cache of 128 x 8704 tokens need 162 GB" in found.warnings[1]
    assert "2 of 3 figures must come from more GPUs (--tp N), another GPU or a cache in fewer" in found.warnings[1]


EVAL = "llama_perf_context_print: eval time = 20000.0 ms / 1000 runs ( 20 ms per token)"


@pytest.mark.parametrize(
    ("command", "gigabytes"),
    [
        ("llama-cli -m /models/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf -md Llama-3.2-1B-Q8_0.gguf", 7.50 * 4.8944 / 8),
        ("vllm serve 'nvidia/Llama-3.1-8B-Instruct-NVFP4' --kv-cache-dtype fp8", 6.98 * 4.5 / 8 + 1.05),
        ("python -m mlx_lm.generate --model=mlx-community/Llama-3.1-8B-4bit -m 512", 7.50 * 4.5 / 8),
        ("ollama run llama3.1:8b-instruct-q8_0", 7.50 * 8.5008 / 8),
        ("vllm serve hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", 6.98 * 4.15625 / 8 + 1.05),
        ("vllm serve meta-llama/Llama-3.1-8B --quantization fp8", 6.98 + 1.05),
        ("ollama run llama3.1:8b-instruct-fp16", 15.01), ("llama-cli -m Llama-3.1-8B-F16.gguf", 15.01),
        ("llama-cli -m Llama-3.1-8B-bf16-Q8_0.gguf", 7.50 * 8.5008 / 8),
        ("llama-cli -m Llama-3.1-8B-UD-Q4_K_XL.gguf", None), ("vllm serve Llama-3.1-8B-GPTQ-Int8", None),
        ("llama-cli -m Llama-3.1-8B-Q8_0.gguf; llama-cli -m Llama-3.1-8B-Q4_0.gguf", None),
    ],
)  # fmt: skip
def test_a_format_in_the_name_of_the_model_is_counted(command: str, gigabytes: float | None, tmp_path: Path) -> None:
    """Linears of 6.98 B and a head of 0.525 B weights, all in the format, or the head in 16 bits.

    Of no format with a known number of bits, or of two, the weights are counted in 16 bits without a regime.
    """
    (tmp_path / "f").write_text(f"$ {command}\n{EVAL}\n")
    found = place(tmp_path / "f", "llama-3.1-8b", gpu="RTX 3090", prompt_lens="1")
    [row] = found.rows
    assert row.floor_s * 936 == pytest.approx((gigabytes or 15.01) + 0.066, rel=0.01)
    assert ("give --bits or --quant" in " ".join(found.warnings)) == (gigabytes is None)
    assert gigabytes or row.regime == "inconclusive"


def test_a_table_may_name_gpu_model_and_quant(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("gpu,model,quant,batch_size,prompt_len,new_tokens,tokens_per_s\nRTX 4090,x,q4_k_m,1,1,1,150\n")
    found = place(path, "llama-3.1-8b")
    assert (found.ceilings.name, found.quant, found.rows[0].regime) == ("RTX 4090, datasheet", "q4_k_m", "memory-bound")
    assert "fewer bits per weight, drafts or a larger batch" in "; ".join(found.rows[0].note)


def test_experts_in_a_published_format_keep_it() -> None:
    """gpt-oss-20b, 11.27 GiB: 19.1 B weights in MXFP4, 4.25 bits, leave 8.6 bits for the other 1.8 B.

    A token reads 2.39 B of experts and 1.22 B of others: 1.27 + 1.31 GB over 1,792 GB/s are 1.44 ms of 2.56.
    """
    found = place(FILES / "llama-bench-moe.md", "gpt-oss-20b", gpu="RTX PRO 6000 Blackwell")
    decode = found.rows[2]
    assert decode.floor_s == pytest.approx(1.44e-3, rel=0.01)
    assert decode.attained == pytest.approx(0.56, abs=0.005)
    assert "in the experts, 8.6 elsewhere" in found.stored
    # 391.20 ± 0.39 and 380.31 ± 15.07 tokens/s.
    assert [row.spread for row in found.rows[2:4]] == pytest.approx([0.39 / 391.20, 15.07 / 380.31])


def test_a_published_format_does_not_say_the_bits_beside_the_experts(tmp_path: Path) -> None:
    """gpt-oss-20b in 16 bits beside the experts: 1.27 + 2.44 GB at 300 GB/s are 12.4 ms. In 4.63 bits, as above, 8.6.

    ollama's files, and what vLLM reads, keep 16 bits.
    """
    path = tmp_path / "f"
    path.write_text("llama-server -hf ggml-org/gpt-oss-20b-GGUF\neval time = 11600.0 ms / 1000 runs\n")
    for bits, floor_s, regime in ((0.0, 12.4e-3, None), (4.63, 8.6e-3, "memory-bound")):
        found = place(path, "gpt-oss-20b", gpu="L4", bits=bits, prompt_lens="1")
        [row] = found.rows
        assert (row.floor_s, row.regime) == (pytest.approx(floor_s, rel=0.02), regime)
        assert ("mxfp4 in the experts and bfloat16 elsewhere" in " ".join(found.warnings)) == (not bits)
    path.write_text("ollama run gpt-oss:20b\neval count: 101 token\neval rate: 70 token\n")
    for unpacked in (path, table(tmp_path / "t", ("decode", 1, 1, 1, 0.0145))):
        found = place(unpacked, "gpt-oss-20b", gpu="L4", prompt_lens="1")
        assert found.rows[0].regime == "memory-bound"
        assert "elsewhere" not in " ".join(found.warnings)


def test_several_gpus_share_a_step() -> None:
    """Mixtral on eight H200: 25.8 GB of two experts per layer over 38.4 TB/s, 0.67 ms of 2.66; prompts have room."""
    file = FILES / "vllm-mixtral-before.json"
    _, decode = place(file, "mixtral-8x7b", gpu="H200 SXM", tp=8).rows
    assert decode.floor_s == pytest.approx(0.67e-3, rel=0.02)
    assert decode.attained == pytest.approx(0.25, abs=0.005)
    # 64 all-reduces of 8 KiB, each at least NCCL's latency of 6.6 + 14 x 0.6 µs.
    assert decode.link_s == pytest.approx(65 * 15e-6, rel=0.1)
    one = place(file, "mixtral-8x7b", gpu="H200 SXM")
    assert [row.regime for row in one.rows] == [None, None]
    assert all("several GPUs" in "; ".join(row.note) for row in one.rows)
    typed = place(file, "mixtral-8x7b", gpu="H200 SXM", tp=8, link="100,1").rows[1]
    assert typed.link_s > 64 * 100e-6
    for wrong in ({"tp": -1}, {"link": "nvlink4"}):
        with pytest.raises(RequestError):
            place(file, "mixtral-8x7b", gpu="H200 SXM", **wrong)  # type: ignore[arg-type]


def test_a_verifying_step_counts_its_tokens(tmp_path: Path) -> None:
    """Six tokens touch 128 x (1 - (1 - 8/128)^6) = 41 of 128 experts, not 8: a step reads that many more bytes."""
    floors = []
    for server in ({"tp_size": 1, "speculative_num_draft_tokens": 6}, {"tp_size": 1}):
        path = changed(tmp_path / "f", "sglang-mtp.jsonl", {"server_info": server})
        floors.append(place(path, "qwen3-30b-a3b", gpu="H200 SXM").rows[1].floor_s)
    experts = 48 * 3 * 2048 * 768 * 2
    touched = [128 * (1 - (1 - 8 / 128) ** tokens) for tokens in (6, 3.5)]
    assert (floors[0] - floors[1]) * 4.8e12 == pytest.approx(experts * (touched[0] - touched[1]), rel=0.01)


def test_tokens_per_step_of_a_table(tmp_path: Path) -> None:
    """40.7 tokens/s at 2.76 tokens per step are steps of 67.8 ms; unsaid, half of the ceiling is a doubt."""
    head = "phase,batch_size,prompt_len,new_tokens,tokens_per_s"
    path = tmp_path / "t"
    for name in ("tokens_per_step", "acceptance_length"):
        path.write_text(f"{head},{name}\ndecode,1,1024,256,40.7,2.76\n")
        [row] = place(path, "llama-3.1-8b", gpu="RTX 3090").rows
        assert (row.latency_s, row.tokens_per_s) == (pytest.approx(0.0678, rel=1e-3), pytest.approx(40.7))
    path.write_text(f"{head}\ndecode,1,1024,256,40.7\n")
    [row] = place(path, "llama-3.1-8b", gpu="RTX 3090").rows
    assert row.attained > 0.5
    assert "the file does not say how many tokens a step gives" in "; ".join(row.note)
    path.write_text(f"{head},tokens_per_step\ndecode,1,1024,256,40.7,1\n")
    assert "how many tokens" not in "; ".join(place(path, "llama-3.1-8b", gpu="RTX 3090").rows[0].note)


def test_an_unknown_batch_is_the_largest_that_fits() -> None:
    """Llama-3.1-8B in FP8 leaves room for about 3,960 sequences of 142 tokens, fewer than the 13,299 in flight."""
    [row] = place(FILES / "trtllm-bench.txt", "llama-3.1-8b", gpu="H100 SXM", quant="fp8").rows
    assert (row.phase, row.new_tokens) == ("generate", 28)
    assert row.tokens_per_s == pytest.approx(6957.3, rel=1e-3)
    per_sequence = 142 * 131_072
    assert row.batch_size * per_sequence + 8.03e9 < gpu_called("H100 SXM").room_bytes
    assert (row.batch_size + 80) * per_sequence + 8.03e9 > gpu_called("H100 SXM").room_bytes


def test_what_ran_is_judged_with_its_doubt(tmp_path: Path) -> None:
    """141 GB of Llama-3.1-70B in 16 bits do not fit 128 GB, and 139 GB take 509 ms at 273 GB/s, not the 244 measured.

    In 4.84 bits, 42 GB are read in 154 ms. Llama-3.1-8B in 25.5 bits needs 25.6 GB of an RTX 4090's 24.9, and
    without its embedding table 23.9. In 32 bits nothing explains 30 GB on it.
    """
    for figure, model, gpu, fits, attained, regime, doubt in (
        ((0.2439,), "llama-3.1-70b", "GB10", True, 2.09, None, "by its times at most 7.7 on GB10"),
        ((0.6,), "llama-3.1-70b", "GB10", True, 0.85, "inconclusive", "Shares are in doubt"),
        ((0.2439, 4.84), "llama-3.1-70b", "GB10", True, 0.635, "memory-bound", ""),
        ((0.03, 25.5), "llama-3.1-8b", "RTX 4090", True, 0.795, "inconclusive", "held a part, such as a table"),
        ((0.03, 32), "llama-3.1-8b", "RTX 4090", False, 0.995, None, "or not given, and floors"),
    ):
        found = place(table(tmp_path / "t", ("decode", 1, 512, 512, *figure)), model, gpu=gpu)
        [row] = found.rows
        assert (row.fits, row.regime, "memory-bound" in "; ".join(row.note)) == (fits, regime, regime == "memory-bound")
        assert row.attained == pytest.approx(attained, rel=0.01)
        assert doubt in " ".join(found.warnings)


def test_a_slow_step_alone_names_overhead_and_links(tmp_path: Path) -> None:
    """15 GB at 3.35 TB/s are 4.5 ms: of 20 ms or of 64 sequences' 20 ms, and not of 6 ms."""
    rows = [("decode", batch, 64, 32, step_s) for batch, step_s in ((1, 0.02), (64, 0.02), (1, 0.006))]
    found = place(table(tmp_path / "t", *rows), "llama-3.1-8b", gpu="H100 SXM").rows
    assert ["overhead (host, kernels) or GPUs' links" in "; ".join(row.note) for row in found] == [True, False, False]
