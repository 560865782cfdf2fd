"""What a sequence keeps and reads: states, windows, shared and chosen keys, a common prefix, quantised caches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cached import cached_tensors
from loaded import walked
from small_models import SIZES
from traffic import Traffic
from transformers import AutoConfig, LlamaConfig

from profiler.counting.attention import AttentionCore, Indexer
from profiler.counting.cache import counted_model
from profiler.counting.count import count, counted_module
from profiler.counting.grid_count import count_grid
from profiler.counting.memory_need import cache_bytes, memory_need, state_bytes
from profiler.counting.model_numbers import model_numbers
from profiler.counting.operators import Elementwise, Linear, ModelWork, RecurrentState
from profiler.counting.preset_counts import CountedModel
from profiler.counting.walk import walk
from profiler.data.ceiling_set import ceilings_called
from profiler.engines.caches import quantized_cache
from profiler.errors import RequestError
from profiler.facts.cache_format import CACHE_FORMATS
from profiler.facts.operators import Cause
from profiler.facts.step import ExecutionPath, Step, bytes_by_kind
from profiler.loading.config import config_from
from profiler.loading.meta_model import build_on_meta, from_config
from profiler.loading.source import resolve

pytestmark = pytest.mark.cpu

# Shapes of a published model; the vocabulary does not matter here.
QWEN_27B = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
}  # fmt: skip
LLAMA = {**SIZES, "model_type": "llama"}
PATH = ExecutionPath()


def counted(raw: dict[str, Any]) -> CountedModel:
    config = config_from(raw, "model")
    return counted_module(build_on_meta(config, torch.bfloat16), config, torch.bfloat16, "none")


def test_a_state_in_every_memory_figure_and_in_the_traffic() -> None:
    """48 layers x 48 heads x 128 x 128 in float32, and 4 inputs of (2 x 16 + 48) x 128 channels in bfloat16."""
    state = 48 * (48 * 128 * 128 * 4 + 80 * 128 * 4 * 2)
    model = counted(QWEN_27B)
    assert state_bytes(model.work) == state
    assert cache_bytes(model.work, 64, 512) == 64 * (512 * 65_536 + state)
    assert cache_bytes(model.work, 64, 512, shared=500) == 500 * 65_536 + 64 * (12 * 65_536 + state)
    found = model_numbers(model, 512, (ceilings_called("A100 80GB SXM"),))
    assert (found.kv_bytes_per_token, found.state_bytes_per_sequence) == (65_536, state)
    assert (found.architecture.layers, found.architecture.attention_layers) == (64, 16)
    assert found.gpus[0].largest_batch < found.gpus[0].largest_batch_one_by_one < (83e9 - model.weight_bytes) / state
    step = model.work.work(Step(64, 1, 512))
    assert bytes_by_kind(step)["state"] == 2 * 64 * state
    assert bytes_by_kind(model.work.work(Step(64, 512, 0)))["state"] == 64 * state


def test_an_indexer_chooses_keys() -> None:
    """A decode step after 10,000 tokens reads 2,048 latents of 576, and 10,000 indexer keys of 128."""
    dsa = {
        "model_type": "deepseek_v32", "vocab_size": 128, "hidden_size": 256, "num_hidden_layers": 1,
        "mlp_layer_types": ["dense"], "intermediate_size": 128,
    }  # fmt: skip
    work = walked(dsa)
    [core], [indexer] = work.of_kind(AttentionCore), work.of_kind(Indexer)
    found = core.work(Step(1, 1, 10_000), ExecutionPath())
    assert found.kv_read_bytes == 2048 * 576 * 2
    assert found.model_flops == 2048 * 2 * 128 * (512 + 64 + 512)
    scores = indexer.work(Step(1, 1, 10_000), ExecutionPath())
    assert scores.kv_read_bytes == 10_000 * 128 * 2
    assert scores.model_flops == 10_001 * 64 * 2 * (128 + 1)
    assert cache_bytes(work, 1, 10_000) == 10_000 * (576 + 128) * 2
    assert work.dense_instead == ()


@pytest.mark.parametrize(
    ("model_type", "sizes", "flops"),
    [
        ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2}, 1 + 2 + 2),
        ("qwen3_5_text", {"layer_types": ["linear_attention"], "num_attention_heads": 4, "num_key_value_heads": 2},
         1 + 2 + 2 + 2),
    ],
)  # fmt: skip
def test_the_flops_of_a_recurrence(model_type: str, sizes: dict[str, Any], flops: int) -> None:
    """Per element of the state and token: a decay, an outer product that is added, and a product with the query.

    h = a h + v k^T, y = h q (Mamba-2, arXiv:2405.21060, equation 1). Gated DeltaNet also multiplies the decayed state
    by the key: S = a S + (v - a S k) k^T, o = S q (arXiv:2412.06464, equation 10).
    """
    base = {"model_type": model_type, "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, **sizes}
    [state] = walked(base).of_kind(RecurrentState)
    assert state.work(Step(1, 1, 5), ExecutionPath()).model_flops / state.state_elements == flops


def test_a_gated_linear_recurrence_keeps_a_value_per_channel() -> None:
    """RecurrentGemma has 2 layers of RG-LRU before attention: gates of 4 blocks of 16 x 16, a float32 a channel."""
    sizes = {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 6}
    work = walked({**SIZES, "model_type": "recurrent_gemma", **sizes})
    [state] = work.of_kind(RecurrentState)
    gates = [operator for operator in work.of_kind(Linear) if "gate_weight" in operator.name]
    assert (state.count, state.kept_bytes(9), state.flops_per_element) == (2, 64 * 4, 5)
    assert sum(gate.work(Step(1, 1, 0), ExecutionPath()).model_flops for gate in gates) == 2 * 2 * 2 * 4 * 16 * 16
    assert work.coverage == 1


def test_a_norm_per_head_is_understood() -> None:
    """Command R+ has norms of 96 x 128 and 8 x 128 in each layer; here they are of 4 x 16 and 2 x 16."""
    work = walked({**SIZES, "model_type": "cohere", "use_qk_norm": True})
    norms = [operator for operator in work.of_kind(Elementwise) if operator.group == "norm"]
    assert sum(norm.count * norm.weight_bytes for norm in norms) == 2 * (2 * (64 + 4 * 16 + 2 * 16) + 64)
    assert work.coverage == 1


def test_a_window_beyond_what_the_model_supports_never_fills() -> None:
    """Phi-4-mini's window is 262,144 tokens, and it supports 131,072."""
    window = {"sliding_window": 262_144, "max_position_embeddings": 131_072}
    found = model_numbers(counted({**SIZES, "model_type": "mistral", **window}), 64)
    assert (found.windows_full_at, found.kv_bytes_per_later_token) == (0, found.kv_bytes_per_token)


def test_a_model_of_pictures_is_counted_as_its_decoder(tmp_path: Any) -> None:
    """A tower of 12 layers, 64 wide, reads a picture of 16 x 16 patches; a step of text does not."""
    tower = {
        "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 12,
        "num_attention_heads": 4, "image_size": 224, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    config = config_from({"model_type": "llava", "text_config": LLAMA, "vision_config": tower}, "model")
    config.save_pretrained(tmp_path)
    found = count(str(tmp_path))
    work, alone = found.whole.work, walked(LLAMA)
    assert work.work(Step(1, 1, 9)).model_flops == alone.work(Step(1, 1, 9)).model_flops
    assert work.params - dict(work.group_params)["towers"] == alone.params
    patches = 256
    layers = 12 * (2 * patches * (4 * 64 * 64 + 2 * 64 * 256) + 4 * patches**2 * 64)
    embedding, projector = 2 * patches * 3 * 14 * 14 * 64, 2 * patches * (64 * 64 + 64 * 64)
    assert work.picture_pixels == 224
    assert work.tower_flops == pytest.approx(layers + embedding + projector, rel=0.02)


SMALL = {**SIZES, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT_NEO = {"num_layers": 2, "num_heads": 4, "window_size": 6, "attention_types": [[["global", "local"], 1]]}
LLAMA_4 = {"attention_chunk_size": 6, "layer_types": ["full_attention", "chunked_attention"], "num_local_experts": 2}
GEMMA = {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}


@pytest.mark.parametrize(
    ("model_type", "sizes"), [("gpt_neo", GPT_NEO), ("llama4_text", LLAMA_4), ("gemma3_text", GEMMA)]
)
def test_pairs_are_those_of_the_library(model_type: str, sizes: dict[str, Any]) -> None:
    """A prompt of 20 tokens in a layer without a limit and in one with a limit of 6, then one token and another."""
    model = from_config(AutoConfig.for_model(model_type, **SMALL | sizes), torch.float32, "eager").eval()
    cores = walk(model).of_kind(AttentionCore)
    cache, context = None, 0
    for query in (20, 1, 2):
        with torch.no_grad():
            ids = torch.arange(3, 3 + query)[None]
            output = model(ids, past_key_values=cache, output_attentions=True, use_cache=True)
        step = Step(1, query, context)
        real = [int((weights[0] > 0).any(0).sum()) for weights in output.attentions]
        assert real == [int(core.pairs(step)) for core in cores]
        cache, context = output.past_key_values, context + query


BATCH, PREFIX, PROMPT = 8, 512, 256


def work_of(name: str) -> ModelWork:
    return counted_model(resolve(name)).work


@pytest.mark.parametrize("name", ["mistral-7b-v0.1", "gemma-2-9b", "gpt2", "mixtral-8x7b", "qwen3-8b"])
def test_a_prefill_after_a_prefix_is_the_difference_of_two_prefills(name: str) -> None:
    """full(N + P) - full(N), operator by operator; but each runs its LM head on its own last position."""
    for operator in work_of(name).operators:
        whole, first, rest = (
            operator.work(step, PATH).model_flops
            for step in (Step(BATCH, PREFIX + PROMPT, 0), Step(BATCH, PREFIX, 0), Step(BATCH, PROMPT, PREFIX, PREFIX))
        )
        assert rest == (first if operator.group == "lm_head" else whole - first), operator.name


@pytest.mark.parametrize("name", ["mistral-7b-v0.1", "gpt2", "mixtral-8x7b", "deepseek-v2-lite"])
def test_sequences_keep_the_prefix_once(name: str) -> None:
    """N + B (P + new) tokens, each as many bytes as the cache of one."""
    work, new = work_of(name), 32
    kept = cache_bytes(work, BATCH, PREFIX + PROMPT + new, shared=PREFIX)
    assert kept == (PREFIX + BATCH * (PROMPT + new)) * cache_bytes(work, 1, 1)
    need = memory_need(work, 0, Step(BATCH, PROMPT, PREFIX, PREFIX), new, PATH)
    assert need.cache_bytes == kept


def test_a_window_past_the_prefix_holds_none_of_it() -> None:
    """Mistral-7B sees 4,096 tokens: at 10,000 with a prefix of 2,000, the window is each sequence's own.

    The prefix stays for further prompts. 131,072 bytes per token; a full window needs 4,095 cached tokens.
    """
    work = work_of("mistral-7b-v0.1")
    assert cache_bytes(work, BATCH, 10_000, shared=2_000) == (2_000 + BATCH * 4_095) * 131_072
    step = work.work(Step(BATCH, 1, 10_000, 2_000))
    assert step.kv_read_bytes == BATCH * 4_095 * 131_072
    assert step.redundant_bytes[Cause.SHARED_READS] == 0
    # At 5,000 the window begins at token 905, so it holds 1,095 tokens of the prefix.
    step = work.work(Step(BATCH, 1, 5_000, 2_000))
    assert step.kv_read_bytes == (1_095 + BATCH * 3_000) * 131_072
    assert step.redundant_bytes[Cause.SHARED_READS] == (BATCH - 1) * 1_095 * 131_072


def test_a_grid_and_its_memory() -> None:
    """A prefill of P after N on a grid is the step of P; many more sequences fit next to one copy of a long prefix."""
    counted, ceilings = counted_model(resolve("llama-3.1-8b")), ceilings_called("H100 SXM")
    grid = count_grid(
        "m", counted, "none", batch_sizes=[1, 4], prompt_lens=[768], context_lens=[800], prefix=512, gpus=[ceilings]
    )
    assert grid.model_flops[1] == counted.work.work(Step(4, 256, 512, 512)).model_flops
    assert list(grid.tokens) == [256, 4 * 256, 1, 4]
    assert grid.cache_bytes[1] == cache_bytes(counted.work, 4, 768, shared=512)
    [plain], [shared] = (model_numbers(counted, 8192, (ceilings,), prefix).gpus for prefix in (0, 8000))
    # 66.2 GB for caches (82.8 less 16.1 of weights, and the workspace) at 131,072 bytes per token.
    assert 55 < plain.largest_batch_one_by_one < 63
    assert shared.largest_batch_one_by_one > 35 * plain.largest_batch_one_by_one


def test_the_counted_step() -> None:
    """A prefill of 768 tokens, 512 of them cached, at batch 8: it saves about two thirds."""
    prefill = count("llama-3.1-8b", phase="prefill", batch=BATCH, prompt=768, prefix=512)
    assert (prefill.step.query, prefill.step.context) == (256, 512)
    assert prefill.prefix.unshared_cache_bytes == BATCH * 768 * 131_072
    assert prefill.prefix.cache_bytes == (512 + BATCH * 256) * 131_072
    plain = count("llama-3.1-8b", phase="prefill", batch=BATCH, prompt=768)
    assert prefill.prefix.saved_flops == plain.work.model_flops - prefill.work.model_flops
    assert 0.6 < prefill.prefix.saved_share < 2 / 3
    assert plain.prefix is None
    with pytest.raises(RequestError, match="use 0 to 767"):
        count("llama-3.1-8b", phase="prefill", prompt=768, prefix=768)


HEADS, WIDTH = 3, 64
CONFIG = LlamaConfig(num_hidden_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS)


def states(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, HEADS, tokens, WIDTH, dtype=dtype)


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
    work = core.each(Step(2, 1, PROMPT + 2), path)
    cached = (Cause.CACHE_COPIES, Cause.CACHE_CONVERSION, Cause.CONVERTED_READS)
    moved = work.kv_read_bytes + work.kv_write_bytes + sum(work.redundant_bytes[cause] for cause in cached)
    assert moved - keys.nbytes - values.nbytes == pytest.approx(traffic.bytes, rel=0.02)
    held = [layer._quantized_keys, layer._quantized_values, layer.keys, layer.values]
    later = replace(path, residual_tokens=stored.residual(3))
    kept = cache_bytes(ModelWork((core,), 0, ()), 2, PROMPT + 3, later)
    assert kept == pytest.approx(sum(item.nbytes for item in cached_tensors(held)), rel=0.001)


def test_bits_per_element_by_arithmetic_and_the_newest_tokens_are_packed_once_they_are_128() -> None:
    """Groups of 64 share a 16-bit scale and a 16-bit zero point, so an element takes 4 + 32 / 64 bits."""
    bits = {name: 8 * CACHE_FORMATS[name].element_bytes(2) for name in ("fp8", "quanto", "hqq")}
    assert bits == {"fp8": 8.0, "quanto": 4.5, "hqq": 4.5}
    assert [CACHE_FORMATS["quanto"].residual(decoded) for decoded in (0, 1, 127, 128, 129)] == [0, 1, 127, 0, 1]
    assert CACHE_FORMATS["fp8"].residual(127) == 0
