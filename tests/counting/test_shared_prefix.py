"""A prefix that all prompts share: what its prefill saves, and what is kept and read once."""

from __future__ import annotations

import pytest
import torch

from profiler.counting.attention import AttentionCore, Compressor, Indexer
from profiler.counting.cache import counted_model
from profiler.counting.count import count
from profiler.counting.grid_count import count_grid
from profiler.counting.memory_need import cache_bytes, memory_need, state_bytes
from profiler.counting.model_numbers import model_numbers
from profiler.counting.operators import ModelWork, RecurrentState
from profiler.data.roof_set import roofs_called
from profiler.errors import RequestError
from profiler.facts.operators import Cause
from profiler.facts.step import ExecutionPath, Step
from profiler.loading.source import resolve

BATCH, PREFIX, PROMPT = 8, 512, 256
PATH = ExecutionPath()


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
    assert step.avoidable_bytes[Cause.SHARED_READS] == 0
    # At 5,000 the window begins at token 905, so it holds 1,095 tokens of the prefix.
    step = work.work(Step(BATCH, 1, 5_000, 2_000))
    assert step.kv_read_bytes == (1_095 + BATCH * 3_000) * 131_072
    assert step.avoidable_bytes[Cause.SHARED_READS] == (BATCH - 1) * 1_095 * 131_072


def test_plain_kernels_read_it_once_per_sequence() -> None:
    """What is read once and what is read again are together what sequences with their own copies read."""
    for name in ("smollm2-135m", "deepseek-v2-lite", "gemma-2-9b"):
        work = work_of(name)
        shared, apart = work.work(Step(BATCH, 1, 700, PREFIX)), work.work(Step(BATCH, 1, 700))
        again = shared.avoidable_bytes[Cause.SHARED_READS]
        assert shared.kv_read_bytes + again == apart.kv_read_bytes
        assert shared.executed_bytes == apart.executed_bytes
        assert shared.kv_write_bytes == apart.kv_write_bytes
        assert again > 0


def test_chosen_keys_and_blocks() -> None:
    """An indexer reads all keys; of each cache at most `top_k` are read, which may all be of different tokens."""
    step = Step(4, 1, 1000, 600)
    core = AttentionCore("c", torch.float16, 8, 8, 64, 64, top_k=500)
    token = core.cached_elements * 2
    assert core.work(step, PATH).kv_read_bytes == min(4 * 500, 600 + 4 * 400) * token == 2000 * token
    few = AttentionCore("c", torch.float16, 8, 8, 64, 64, top_k=900)
    assert few.work(step, PATH).kv_read_bytes == (600 + 4 * 400) * token
    index = Indexer("i", torch.float16, 4, 128, 2, kept_elements=128)
    assert index.work(step, PATH).kv_read_bytes == (600 + 4 * 400) * 256
    blocks = Compressor("b", torch.float16, 512, 128, 1)
    # Four complete blocks of 128 are in the prefix, seven in the cache; the waiting tokens are each sequence's own.
    with_prefix, without = blocks.work(step, PATH), blocks.work(Step(4, 1, 1000), PATH)
    assert without.kv_read_bytes - with_prefix.kv_read_bytes == 3 * 4 * 512 * 2
    assert blocks.kept_bytes(1000) - blocks.kept_bytes(1000, shared=600) == 4 * 512 * 2 == blocks.shared_bytes(600)


def test_a_state_is_each_sequences_own() -> None:
    state = RecurrentState("s", torch.float32, 1024, 5, 4)
    work = ModelWork((state,), params=0, understood_params=0, unknown=())
    assert cache_bytes(work, BATCH, 900, shared=500) == BATCH * state_bytes(work) == BATCH * 1024 * 4


def test_a_grid_and_its_memory() -> None:
    """A prefill of P after N on a grid is the step of P; many more sequences fit next to one copy of a long prefix."""
    counted, roofs = counted_model(resolve("llama-3.1-8b")), roofs_called("H100 SXM")
    grid = count_grid(
        "m", counted, "none", batch_sizes=[1, 4], prompt_lens=[768], context_lens=[800], prefix=512, gpus=[roofs]
    )
    assert grid.model_flops[1] == counted.work.work(Step(4, 256, 512, 512)).model_flops
    assert list(grid.tokens) == [256, 4 * 256, 1, 4]
    assert grid.cache_bytes[1] == cache_bytes(counted.work, 4, 768, shared=512)
    with pytest.raises(RequestError, match=r"--prefix 768 .* use 0 to 767"):
        count_grid("m", counted, "none", batch_sizes=[1], prompt_lens=[768], context_lens=[], prefix=768)
    [plain], [shared] = (model_numbers(counted, 8192, (roofs,), prefix).gpus for prefix in (0, 8000))
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
    for options, words in (
        ({"phase": "prefill", "prefix": 768}, "use 0 to 767"),
        ({"phase": "prefill", "prefix": 8, "context": 8}, "leave out --context"),
        ({"prefix": -1}, "--prefix -1"),
    ):
        with pytest.raises(RequestError, match=words):
            count("llama-3.1-8b", prompt=768, **options)
