"""Forecasts on GPUs that were not measured: at least the lower bound of the datasheet."""

from dataclasses import replace
from typing import Any

import pytest

from profiler.counting.cache import counted_model
from profiler.data.datasheets import gpu_called
from profiler.errors import RequestError
from profiler.forecast.command import forecast_on
from profiler.forecast.options import ForecastRequest
from profiler.grid.ranges import make_grid
from profiler.loading.source import resolve
from profiler.predict.operator_arrays import StepArrays
from profiler.predict.published_efficiency import steps_by_datasheet
from profiler.predict.result import ForecastCell, ForecastDocument
from profiler.rent import RentOptions, rent

CARD = "A100 80GB SXM"
BYTES_PER_S = 2.039e12
"""From NVIDIA's datasheet, like 312 TFLOP/s in 16 bits and 19.5 in float32."""


def cell(answer: ForecastDocument, phase: str) -> ForecastCell:
    return next(cell for cell in answer.cells if cell.phase == phase)


@pytest.mark.slow
def test_float32_runs_under_the_peak_of_float32() -> None:
    """Llama-3.1-8B, 512 tokens: 2 FLOPs per token for each of its layers' 6.979 B weights, and attention's triangle."""
    wanted = ForecastRequest(prompt_lens="512", batch_sizes="1", dtype="float32")
    answer = forecast_on("llama-3.1-8b", CARD, wanted)
    flops = 2 * 6.979e9 * 512 + 32 * 2 * 32 * (128 + 128) * 512 * 513 / 2
    assert cell(answer, "prefill").low_s > flops / 19.5e12
    assert any("float32" in note for note in answer.notes)
    half = forecast_on("llama-3.1-8b", CARD, ForecastRequest(prompt_lens="512", batch_sizes="1"))
    assert cell(answer, "prefill").latency_s / cell(half, "prefill").latency_s == pytest.approx(312 / 19.5, rel=0.01)
    assert not any("float32" in note for note in half.notes)
    with pytest.raises(RequestError, match="no published figure is of a GPU of Intel"):
        forecast_on("llama-3.1-8b", "Max 1550 (one stack)", wanted)
    # NVIDIA's T4 datasheet has 65 TFLOP/s of FP16 in tensor cores, and none of BF16.
    wanted = ForecastRequest(prompt_lens="512", batch_sizes="1")
    assert forecast_on("llama-3.1-8b", "T4", wanted).precision == "float16"
    with pytest.raises(RequestError, match="no peak for matmuls in bfloat16; use --dtype float16"):
        forecast_on("llama-3.1-8b", "T4", replace(wanted, dtype="bfloat16"))


def test_a_context_equal_to_the_limit_is_not_too_long() -> None:
    """New tokens count only if they were requested. The cell has the name of the context that was requested."""
    for requested in ({"context_lens": "131072"}, {"prompt_lens": "131072"}):
        answer = forecast_on("llama-3.1-8b", CARD, ForecastRequest(**requested, batch_sizes="1"))
        assert cell(answer, "decode").name == "decode 1 x 131072"
    for more in (ForecastRequest(context_lens="131073"), ForecastRequest(context_lens="131072", new_tokens=8)):
        with pytest.raises(RequestError, match="limit is 131072"):
            forecast_on("llama-3.1-8b", CARD, more)


def test_what_a_format_leaves_dense_is_in_16_bits() -> None:
    """Gemma-2's checkpoint is in float32, which is not used for the rest of a model with packed linears."""
    assert forecast_on("gemma-2-9b", CARD, ForecastRequest(quant="nf4")).precision == "bfloat16, nf4"
    mixture = forecast_on("gpt-oss-20b", CARD, ForecastRequest())
    assert mixture.precision == "bfloat16, mxfp4"
    assert "no published figure of mixtures of experts in plain transformers" in mixture.notes[0]


def test_a_cache_that_is_copied_is_moved_thrice() -> None:
    """64 x 2064 tokens of 131,072 bytes each and 15.0 GB of weights: at least 33 ms at the datasheet's bandwidth."""
    decode = cell(forecast_on("llama-3.1-8b", CARD, ForecastRequest("2048", "64", new_tokens=32)), "decode")
    assert decode.context_len == 2064
    at_least = (15.0e9 + 3 * 64 * 2064 * 131_072) / BYTES_PER_S
    assert decode.low_s > at_least > 32e-3


@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize(("gpu", "bytes_per_s"), [("T4", 320e9), ("A10G", 600e9), ("V100 SXM2 32GB", 900e9)])
def test_dense_copies_of_nf4_are_moved(gpu: str, bytes_per_s: float, batch: int) -> None:
    """Per weight of the layers, half a byte is read, and two are written and read: 31.4 GB of Mistral-7B.

    A T4's 320 GB/s move them in 98 ms. Kernels that multiply few rows by packed weights need not.
    """
    answer = forecast_on("mistral-7b-v0.1", gpu, ForecastRequest("128", f"1,{batch}", quant="nf4"))
    one, several = (each for each in answer.cells if each.phase == "decode")
    assert one.low_s < 4.5 * 6.979e9 / bytes_per_s <= several.low_s
    assert any("bitsandbytes up to 0.49" in note for note in answer.notes)


def test_dense_copies_that_fit_the_l2_are_no_bound() -> None:
    """TinyLlama's largest linear is 2048 x 5632, so copies of 23 MB: less than the 50 MB of an H100, not of a T4."""
    weights = 22 * (2 * 2048 * 2048 + 3 * 2048 * 5632)
    counted = replace(counted_model(resolve("tinyllama-1.1b"), quant="nf4"), dtype="float16")
    steps = StepArrays.of(make_grid("128", "8", 32).keys)
    for gpu, moves in (("H100 SXM", False), ("T4", True)):
        decode = steps_by_datasheet(counted, "nf4", gpu_called(gpu), steps, "eager").on_gpu.at(~steps.prefill)
        copied_bytes = decode.other_bytes - decode.uncertain_bytes
        assert (copied_bytes[0] > 4 * weights) == moves
        assert decode.other_bytes[0] > 4 * weights


def test_a_latent_that_is_expanded_again_costs_its_matmuls() -> None:
    """DeepSeek-V2-Lite: 27 layers expand the latents (512) of 64 x 2064 tokens to 16 heads of 256 in every step."""
    decode = cell(forecast_on("deepseek-v2-lite", CARD, ForecastRequest("2048", "64", new_tokens=32)), "decode")
    tokens = 64 * 2064
    expanded_flops = 27 * 2 * 512 * 16 * 256 * tokens
    # The expanded latents are written (16 x 256); then keys and values are written by head (192 + 128) and read.
    moved_bytes = 27 * 2 * tokens * (16 * 256 + 2 * 16 * 320 + 3 * 576)
    assert decode.low_s > max(expanded_flops / 312e12, moved_bytes / BYTES_PER_S) > 40e-3


def test_what_a_step_loses_is_overhead_only_where_the_host_is_slower() -> None:
    """4096 tokens of Mistral-7B take 14.2 GFLOP each: 0.9 s at 65 TFLOP/s, and no host launches that long."""
    on_t4 = forecast_on("mistral-7b-v0.1", "T4", ForecastRequest("512", "8", quant="nf4"))
    prefill = cell(on_t4, "prefill")
    assert prefill.terms["compute_s"] == pytest.approx(4096 * 14.2e9 / 65e12, rel=0.05)
    assert (prefill.terms["overhead_s"], prefill.regime) == (0.0, "slow-kernels")
    fast = cell(forecast_on("mistral-7b-v0.1", "H100 SXM", ForecastRequest("128", "1")), "decode")
    assert (fast.terms["kernel_s"], fast.regime) == (0.0, "overhead-bound")


@pytest.mark.parametrize(
    ("gpu", "form"), [("M4 Max", {}), ("RX 7900 XTX", {"bits": 4.85}), ("Arc B580", {}), ("H20", {"quant": "fp8"})]
)
def test_a_refused_gpu_or_format_has_a_floor(gpu: str, form: dict[str, Any]) -> None:
    """No figure of fp8 in plain transformers is published: they take 6 times as long as SGLang (Qwen's benchmark)."""
    with pytest.raises(RequestError, match=f"{gpu} .*`roofscope count MODEL --gpu '{gpu}'` gives the least time"):
        forecast_on("smollm2-135m", gpu, ForecastRequest("64", "1", **form))


@pytest.mark.parametrize(
    ("model", "gpu", "options", "needs"),
    [
        ("gpt-oss-20b", "T4", {"engine": "compiled"}, "8.0 for mxfp4, and has 7.5"),
        ("llama-3.1-8b", "P40", {"engine": "compiled"}, "7.0 for compiled engines, and has 6.1"),
        ("gpt-oss-20b", "L4", {"engine": "compiled"}, ""),
        ("gpt-oss-20b", "T4", {"engine": "eager"}, ""),
    ],
)
def test_an_engine_needs_a_compute_capability(model: str, gpu: str, options: dict[str, Any], needs: str) -> None:
    """vLLM's documentation has 7.0, its Mxfp4Config 8.0; transformers multiplies MXFP4 from 7.5 on."""
    offers = rent(RentOptions(model, price=f"{gpu}=1,H100 SXM=1", **options)).gpus
    assert next(offer for offer in offers if offer.gpu == gpu).why.partition("capability ")[2] == needs
    if needs:
        with pytest.raises(RequestError, match=f"{gpu} needs compute capability {needs}"):
            forecast_on(model, gpu, ForecastRequest("512", "1", **options))
    else:
        how = forecast_on(model, gpu, ForecastRequest("512", "1", **options)).how
        assert ("compiled engines" in how) == (options["engine"] == "compiled")


@pytest.mark.slow
def test_a_prefill_after_a_cached_prefix() -> None:
    """1,536 of 2,048 tokens are cached, and kept once in compiled engines: decode still reads 12 x 2,064 tokens."""
    wanted = ForecastRequest("2048", "12", new_tokens=32, engine="compiled")
    plain, cached = (forecast_on("llama-3.1-8b", "L4", replace(wanted, prefix=prefix)) for prefix in (0, 1536))
    whole, rest = cell(plain, "prefill"), cell(cached, "prefill")
    assert (rest.prompt_len, rest.context_len) == (2048, 1536)
    # A quarter of the tokens in the linears; attention's last quarter has 7/16 of its triangle.
    assert 1 / 4 < rest.latency_s / whole.latency_s < 1 / 3.5
    assert cell(cached, "decode").latency_s == pytest.approx(cell(plain, "decode").latency_s, rel=1e-3)
    # 48 sequences have 13.1 GB of caches, next to 16.1 of weights on a GPU of 24; with one prefix 3.6 GB.
    for prefix in (0, 1536):
        many = forecast_on("llama-3.1-8b", "L4", replace(wanted, batch_sizes="48", prefix=prefix))
        assert cell(many, "decode").fits == bool(prefix)
    with pytest.raises(RequestError, match="use 0 to 2047"):
        forecast_on("llama-3.1-8b", "L4", replace(wanted, prefix=2048))
