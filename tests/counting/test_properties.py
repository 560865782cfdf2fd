"""Work by hand: published models, kernels of the theory, grids, drafts and padding; and properties of any step."""

import random
from dataclasses import replace
from functools import cache

import pytest
from cases import slow_except
from hypothesis import given
from hypothesis import strategies as st
from loaded import walked
from small_models import small_model

from profiler.counting.attention import AttentionCore
from profiler.counting.cache import counted_model
from profiler.counting.count import count
from profiler.counting.floor import expected_tokens, pays_from, verifying
from profiler.counting.grid_count import count_grid
from profiler.counting.kernels import causal_pairs
from profiler.counting.model_numbers import ModelNumbers, model_numbers
from profiler.counting.operators import Experts, Linear, ModelWork, padded_work
from profiler.counting.walk import walk
from profiler.data.ceiling_set import ceilings_called
from profiler.errors import RequestError
from profiler.facts.operators import Cause
from profiler.facts.step import ExecutionPath, Step, Work
from profiler.grid.cells import CellKey, Phase
from profiler.grid.ragged import Ragged, Request
from profiler.grid.ranges import make_grid
from profiler.loading.source import resolve
from profiler.theory import attention_steps, combined, fused_attention, matmul

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
    assert mistral.work(step).executed_bytes == pytest.approx(27.15e9, rel=0.01), (
        "by a trace with fake tensors and sdpa"
    )
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
    assert work.executed_bytes == pytest.approx(14.448e9, rel=0.001), "by such a trace"


def test_kv_traffic_of_eager_attention_as_a_multiple_of_the_minimum(mistral: ModelWork) -> None:
    """The cache is copied and each of 8 KV heads repeated 4 times: both are written and read."""
    work = mistral.work(Step(1, 1, 512), ExecutionPath(attention="eager"))
    minimum = work.kv_read_bytes + work.kv_write_bytes
    extra = work.redundant_bytes[Cause.CACHE_COPIES] + work.redundant_bytes[Cause.REPEATED_HEADS]
    assert (minimum + extra) / minimum == pytest.approx(11.0, rel=0.005)


NAMES = ("mistral-7b-v0.1", "mixtral-8x7b", "gemma-2-9b", "deepseek-v2-lite")
PATHS = (
    ExecutionPath(),
    ExecutionPath(attention="eager", all_logits=True),
    ExecutionPath(cache="static", static_cache_len=40_000),
)


@cache
def work_of(name: str) -> ModelWork:
    return counted_model(resolve(name)).work


steps = st.builds(Step, st.integers(1, 64), st.integers(1, 512), st.integers(0, 8192))


@given(st.sampled_from(NAMES), steps, st.sampled_from(PATHS))
def test_model_work_is_at_most_executed_work(name: str, step: Step, path: ExecutionPath) -> None:
    work = work_of(name).work(step, path)
    assert work.model_flops <= work.executed_flops
    assert work.model_bytes <= work.executed_bytes


@given(st.sampled_from(NAMES), steps)
def test_flops_are_linear_in_batch_and_monotone_in_context(name: str, step: Step) -> None:
    model = work_of(name)
    one = model.work(Step(1, step.query, step.context))
    many = model.work(step)
    assert many.model_flops == step.batch * one.model_flops
    assert many.kv_read_bytes == step.batch * one.kv_read_bytes
    longer = model.work(Step(step.batch, step.query, step.context + 1))
    assert longer.model_flops >= many.model_flops
    assert longer.kv_read_bytes >= many.kv_read_bytes


@given(st.integers(1, 300), st.integers(0, 300), st.one_of(st.none(), st.integers(1, 400)), st.sampled_from([1, 4]))
def test_pairs_are_the_sum_over_queries(query: int, context: int, window: int | None, rate: int) -> None:
    """Each query sees the cache, earlier queries and itself, or their complete blocks, or a window of them."""
    expected = sum(min((context + i) // rate, window or context + i) for i in range(1, query + 1))
    assert causal_pairs(query, context, window, rate=rate) == expected


def test_one_head_written_out_stays_below_any_ridge() -> None:
    """d = 128, N = 4096, fp16: QK^T is 4,294,967,296 FLOPs over 35,651,584 bytes; all three steps 62.7 FLOP/byte.

    (4d + 5) / (2 x 4) = 64.6 is the limit for d = 128 in 16 bits at any sequence length.
    """
    scores, softmax, output = attention_steps(4096, 4096, 128, "float16")
    assert (scores.flops, scores.bytes) == (4_294_967_296, 35_651_584)
    steps = (scores, softmax, output)
    assert sum(s.flops for s in steps) / sum(s.bytes for s in steps) == pytest.approx(62.7, abs=0.05)
    whole = combined("all", *attention_steps(65536, 65536, 128, "float16"))
    assert whole.intensity == pytest.approx((4 * 128 + 5) / 8, rel=0.01)
    assert whole.attainable_flops_per_s(989.4e12, 3.35e12) < 0.25 * 989.4e12


def test_latent_attention_is_expanded_again_at_every_step() -> None:
    """DeepSeek-V2-Lite caches 576 elements per token, and transformers runs kv_b_proj (512 -> 16 x 256) over all.

    Its 16 heads then multiply keys of 192 and values of 128, instead of latents of 576 and 512.
    """
    work = work_of("deepseek-v2-lite").work(Step(1, 1, 1000))
    assert (work.kv_read_bytes, work.kv_write_bytes) == (1000 * 576 * 27 * 2, 576 * 27 * 2)
    expanding, spared = 2 * 512 * 16 * 256 * 1000, 2 * 16 * (576 + 512 - 192 - 128) * 1001
    assert work.redundant_flops["latent expanded again"] == 27 * (expanding - spared)


def test_the_intensity_of_absorbed_latents() -> None:
    """2 x 16 x (576 + 512) FLOPs per position over its 1,152 bytes are 30 FLOP/byte in decode.

    With V3's 128 heads they are 242, above an H200's 206. A prompt is expanded once: 2 x 16 x (192 + 128) per pair.
    """
    [core] = [op for op in work_of("deepseek-v2-lite").operators if isinstance(op, AttentionCore)]
    decode = core.each(Step(4, 1, 8192), ExecutionPath())
    assert decode.model_flops == 4 * 8193 * 2 * 16 * (576 + 512)
    assert decode.model_flops / decode.kv_read_bytes == pytest.approx(30.2, abs=0.1)
    of_v3 = replace(core, query_heads=128, kv_heads=128).each(Step(4, 1, 8192), ExecutionPath())
    assert of_v3.model_flops / of_v3.kv_read_bytes == pytest.approx(242, abs=1)
    prefill = core.each(Step(2, 512, 0), ExecutionPath())
    assert prefill.model_flops == 2 * (512 * 513 // 2) * 2 * 16 * (192 + 128)
    # 128 tokens after 4096 are absorbed (24,576 more FLOPs per pair, or 4.19 million to expand a token), 512 expanded.
    few, many = (core.each(Step(1, query, 4096), ExecutionPath()) for query in (128, 512))
    assert few.model_flops == (128 * 4096 + 128 * 129 // 2) * 2 * 16 * 1088
    assert many.model_flops == (512 * 4096 + 512 * 513 // 2) * 2 * 16 * 320 + 4096 * 2 * 512 * 16 * 256
    for work, pairs in ((decode, 4 * 8193), (few, 128 * 4096 + 128 * 129 // 2)):
        unmasked = work.executed_flops - work.redundant_flops[Cause.MASKED_SCORES]
        assert unmasked == pairs * 2 * 16 * 320, "executed work is that of transformers"


def test_a_linear_layer_of_4096() -> None:
    """I = BNK / (BK + BN + NK) is 1.0 at one token, and 682.7 at 1024. It is never half of that."""
    assert matmul(1, 4096, 4096, "float16").intensity == pytest.approx(1.0, abs=1e-3)
    assert matmul(1024, 4096, 4096, "float16").intensity == pytest.approx(682.67, abs=0.01)
    # 2 FLOPs over 4.5 bits are 3.56 FLOP/byte; activations in 16 bits lower that to 3.55.
    assert matmul(1, 4096, 4096, "float16", weights="nf4").intensity == pytest.approx(3.55, abs=0.005)


def test_attention_in_one_kernel() -> None:
    """With one query head per KV head, intensity is N/2 for the full square and N/4 if causal."""
    full = fused_attention(2048, 0, 32, 32, 128, "float16", causal=False)
    causal = fused_attention(2048, 0, 32, 32, 128, "float16")
    assert full.intensity == pytest.approx(1024)
    assert causal.intensity == pytest.approx(512, rel=1e-3)
    # One query over a long cache: the intensity is the number of query heads per KV head.
    assert fused_attention(1, 100_000, 32, 32, 128, "float16").intensity == pytest.approx(1.0, rel=1e-3)
    assert fused_attention(1, 100_000, 32, 8, 128, "float16").intensity == pytest.approx(4.0, rel=1e-3)
    in_8_bits = fused_attention(1, 100_000, 32, 32, 128, "float16", cache="float8_e4m3fn")
    assert in_8_bits.intensity == pytest.approx(2.0, rel=1e-3)


MODELS = ("smollm2-135m", "mixtral-8x7b", "gemma-2-9b", "deepseek-v2-lite")


@pytest.mark.parametrize("model", slow_except(MODELS[:2], MODELS))
def test_each_point_is_the_count_of_its_step(model: str) -> None:
    """Dense, windowed, latent and mixture-of-experts models, at sizes drawn at random."""
    rng = random.Random(model)
    batches, lens = rng.sample(range(1, 65), 2), rng.sample(range(1, 2000), 2)
    sizes = {"batch_sizes": batches, "prompt_lens": lens, "context_lens": lens}
    grid = count_grid(model, counted_model(resolve(model)), "none", **sizes)
    for n in rng.sample(range(len(grid)), 3):
        batch, depth = int(grid.batch_size[n]), int(grid.depth[n])
        step = count(model, phase=grid.phases[n], batch=batch, prompt=depth)
        assert grid.model_flops[n] == pytest.approx(float(step.work.model_flops), rel=1e-12)
        assert grid.model_bytes[n] == pytest.approx(float(step.work.model_bytes), rel=1e-12)


@pytest.fixture(scope="module")
def llama() -> ModelNumbers:
    ceilings = (ceilings_called("H100 SXM"), ceilings_called("T4"))
    return model_numbers(counted_model(resolve("llama-2-7b")), 512, ceilings)


def test_numbers_of_llama_2_7b(llama: ModelNumbers) -> None:
    """Widths of arXiv:2307.09288: 32 layers, width 4096, 32 heads of 128, feed-forward 11008, vocabulary 32000."""
    widths = llama.architecture
    assert (widths.layers, widths.hidden_size, widths.query_heads, widths.kv_heads) == (32, 4096, 32, 32)
    assert (widths.head_dim, widths.vocabulary, widths.experts) == (128, 32000, 0)
    projections, mlp, head = 32 * 4 * 4096**2, 32 * 3 * 4096 * 11008, 4096 * 32000
    assert llama.params_by_group["attention_proj"] == projections
    assert llama.params_by_group["mlp"] == mlp
    assert llama.params_by_group["lm_head"] == head
    assert sum(llama.params_by_group.values()) == 6_738_415_616
    assert llama.kv_bytes_per_token == 2 * 32 * 4096 * 2
    assert llama.kv_bytes_per_sequence == 512 * llama.kv_bytes_per_token
    assert llama.kv_equals_weights_at == -(-2 * 6_738_415_616 // llama.kv_bytes_per_token)
    # 2 FLOPs per weight, and 4 x width FLOPs per cached token and layer (the new token is one of them).
    assert llama.attention_is_half_at == pytest.approx(2 * (projections + mlp + head) / (4 * 4096 * 32), abs=1)


def test_cached_latents_are_compute_bound_from_two_sequences() -> None:
    """34,816 FLOPs for the 1,152 bytes of a latent are 30.2 per byte, and an M1 Max has 10.6 TFLOP/s and 400 GB/s."""
    counted = counted_model(resolve("deepseek-v2-lite"), rented=True)
    [m1] = model_numbers(counted, 131_072, (ceilings_called("M1 Max"),)).gpus
    assert m1.compute_bound_from_batch == 2


def test_what_gpus_allow_llama_2_7b(llama: ModelNumbers) -> None:
    """Linears are compute-bound from 989 x 2 / (2 x 3.35) = 295 rows; the cache of all heads outweighs them."""
    h100, t4 = llama.gpus
    assert h100.linears_compute_bound_from_batch == pytest.approx(295, abs=3)
    assert h100.compute_bound_from_batch is None
    assert h100.tokens_per_s_at_most == pytest.approx(3.35e12 / (13.2e9 + 0.27e9), rel=0.02)
    # A sequence needs its cache, a copy of one layer's, and three MLP tensors of 11008 and three of 4096 per token.
    room = 0.98 * (14.56 * 2**30 - 450e6)
    sequence = 513 * llama.kv_bytes_per_token * 33 / 32 + 512 * (3 * 11008 + 3 * 4096) * 2
    assert t4.largest_batch == int((room - 2 * 6_738_415_616) / sequence)


@pytest.mark.parametrize(
    ("cost", "drafted", "acceptance"),
    [
        (1.0, 4, 0.0),
        (1.25, 1, 0.25),
        (1.75, 2, 0.5),
        (3.3616, 4, 0.8),
        (6.8619, 10, 0.9),
        (5.0, 4, 1.0),
        (5.01, 4, None),
    ],
)
def test_it_pays_where_expected_tokens_are_worth_the_step(cost: float, drafted: int, acceptance: float | None) -> None:
    """They are (1 - a^(k+1)) / (1 - a), by hand; with one draft 1 + a, so that a cost of 1.25 pays from a quarter."""
    assert pays_from(cost, drafted) == (acceptance and pytest.approx(acceptance, abs=1e-5))


def test_it_is_a_prefill_of_its_tokens_with_all_logits() -> None:
    """k + 1 tokens after a context, and the LM head on each of them: 2 x 4096 x 128,256 FLOPs a token."""
    work = counted_model(resolve("llama-3.1-8b")).work
    verified, prefill = work.work(verifying(2, 4, 1000)), work.work(Step(2, 5, 1000))
    assert verified.model_flops - prefill.model_flops == 2 * 4 * 2 * 4096 * 128_256
    assert verified.logits_bytes == 5 * prefill.logits_bytes
    assert verified.weight_bytes == prefill.weight_bytes == work.work(Step(2, 1, 1000)).weight_bytes
    assert vars(work.work(verifying(2, 0, 1000))) == vars(work.work(Step(2, 1, 1000)))


def test_a_mixture_reads_the_experts_of_all_drafts() -> None:
    """Mixtral uses 2 of 8 experts a token; five tokens use 8 (1 - (3/4)^5) = 6.10, three times as many."""
    [experts] = counted_model(resolve("mixtral-8x7b")).work.of_kind(Experts)
    one, five = (experts.work(verifying(1, drafted, 512), ExecutionPath()).weight_bytes for drafted in (0, 4))
    assert five / one == pytest.approx(8 * (1 - 0.75**5) / 2)
    assert [round(float(experts.touched(tokens)), 2) for tokens in (1, 2, 4, 8)] == [2.0, 3.5, 5.47, 7.2]


def test_on_a_gpu() -> None:
    """A dense model of 8 B streams its weights either way; a mixture of experts must accept most drafts."""
    [dense], [mixture] = (
        count(model, verify=4, gpu_names=gpu).gpus
        for model, gpu in (("llama-3.1-8b", "H100 SXM"), ("mixtral-8x7b", "H200 SXM"))
    )
    costs = [row.floor_s / row.one_token_floor_s for row in (dense, mixture)]  # type: ignore[operator]
    worth = [expected_tokens(row.pays_from, 4) for row in (dense, mixture)]  # type: ignore[arg-type]
    assert worth == pytest.approx(costs)
    assert 1 < costs[0] < 1.02
    assert 2.5 < costs[1] < 3.05
    [plain] = count("llama-3.1-8b", gpu_names="H100 SXM").gpus
    assert plain.floor_s == dense.one_token_floor_s
    assert plain.one_token_floor_s is None
    with pytest.raises(RequestError, match="leave out --phase"):
        count("llama-3.1-8b", phase="prefill", verify=4)


LENS = (64, 128, 64, 128)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_half_as_long_is_half_of_the_work(phase: Phase) -> None:
    """Two of four prompts are half as long. Model work is that of separate prompts, executed work that of the batch."""
    model = walk(small_model("Llama", num_key_value_heads=4))
    ragged = Ragged("made", tuple(Request(length, 8) for length in LENS))
    key = CellKey(phase, make_grid(ragged, [4], 8).cells[0])
    path = ExecutionPath(masks=True)
    whole = model.work(Step.of(key), path)
    found = sum((padded_work(operator, key, ragged.requests, path) for operator in model.operators), Work())

    def step_of(length: int) -> Step:
        return Step(1, length, 0) if phase == "prefill" else Step(1, 1, key.context_len - (128 - length))

    each = [model.work(step_of(length), path) for length in LENS]
    assert found.model_flops == sum(work.model_flops for work in each)
    assert found.kv_read_bytes + found.kv_write_bytes == sum(work.kv_read_bytes + work.kv_write_bytes for work in each)
    assert found.weight_bytes == each[0].weight_bytes
    assert found.executed_flops == whole.executed_flops
    linears = [padded_work(op, key, ragged.requests, path) for op in model.of_kind(Linear) if op.rows == "tokens"]
    share = sum(w.redundant_flops[Cause.PADDING] for w in linears) / sum(w.executed_flops for w in linears)
    # A linear sees every position of a prompt, and a quarter is padding. A step sees one token of each prompt.
    assert share == (0.25 if phase == "prefill" else 0)
    if phase == "decode":
        # A row has 128 + 4 cached positions, and 64 are padding in two of four rows: keys and values of 2 layers.
        assert found.redundant_bytes[Cause.PADDING] == 2 * 64 * 2 * 64 * 2 * 4
