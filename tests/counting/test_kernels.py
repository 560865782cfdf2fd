"""Counts of the walk match the execution in transformers and torch, by hand and by torch's counter."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import slow_except
from greedy import greedy_tokens
from loaded import loaded, on_meta, walked
from machines import CPU, HOST
from shrink import configs
from small_models import small_model
from torch.utils._python_dispatch import TorchDispatchMode
from traffic import Traffic

from profiler.counting.attention import AttentionCore
from profiler.counting.chosen_kernel import SdpaStep, attention_path, outlier_columns, sdpa_kernel
from profiler.counting.count import count
from profiler.counting.crosscheck import CounterDifference, crosscheck
from profiler.counting.operators import Linear
from profiler.counting.walk import walk
from profiler.engines.transformers import CompileEngine, EagerEngine, StaticEngine
from profiler.facts.operators import Cause
from profiler.facts.step import ExecutionPath, Step
from profiler.measure.captured_calls import ReusedCache, UsedCache
from profiler.quant.storage import stored

pytestmark = pytest.mark.cpu

# small_model("Llama")
HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 16, 2


def by_hand(batch: int, query: int, context: int) -> int:
    """Return a step's FLOPs in eager attention: each layer's matrices and full square, and the head on one position."""
    hidden = HEADS * WIDTH
    linears = hidden * (2 * HEADS + 2 * KV_HEADS) * WIDTH + 3 * hidden * 96
    square = 2 * HEADS * query * (query + context) * WIDTH
    return 2 * batch * (LAYERS * (query * linears + square) + hidden * 128)


@pytest.mark.parametrize(("batch", "query", "context"), [(2, 8, 0), (1, 1, 5)])
def test_both_counts_are_those_by_hand(batch: int, query: int, context: int) -> None:
    check = crosscheck(small_model("Llama", attn_implementation="eager"), Step(batch, query, context))
    assert check.equal, check.differences
    assert check.flops == check.walk_flops == by_hand(batch, query, context)
    # `inv_freq @ position_ids` up to transformers 5.17: [width / 2, 1] x [1, query], once for all sequences.
    assert set(check.left_out) <= {CounterDifference("model.rotary_emb", 0, 2 * query * WIDTH // 2)}


def test_a_model_without_a_choice_of_logits_computes_all_of_them(tmp_path: Path) -> None:
    """TrOCR's decoder has 20,000 words, so the peak has 4 x 64 rows of logits, their inputs and the cache."""
    [config] = configs("trocr")
    config.vocab_size, config.architectures, config.max_position_embeddings = 20_000, ["TrOCRForCausalLM"], 512
    config.save_pretrained(tmp_path)
    counted = count(
        str(tmp_path), phase="prefill", batch=4, prompt=64, dtype="bfloat16", attn="eager", gpu_names="L4",
        second_opinion=True,
    )  # fmt: skip
    assert counted.crosscheck.equal, counted.crosscheck.differences
    assert counted.work.executed_flops == counted.crosscheck.flops
    cache_bytes, logits_bytes = 4 * 64 * 4 * 2 * 64 * 2, 4 * 64 * (64 + 20_000) * 2
    assert counted.gpus[0].needs_bytes == counted.whole.weight_bytes + cache_bytes + logits_bytes


def tiny_mistral(window: int | None) -> Any:
    return small_model("Mistral", num_hidden_layers=1, sliding_window=window)


def core_of(model: Any) -> AttentionCore:
    return walk(model).of_kind(AttentionCore)[0]


Calls = list[tuple[bool, int, int]]
"""(whether it has a mask, its KV heads, its keys) of each attention call."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls that `sdpa` gets during the test."""
    calls: Calls = []
    real = F.scaled_dot_product_attention

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append((options.get("attn_mask") is not None, key.shape[1], key.shape[2]))
        return real(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return calls


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("prompt", [8, 23, 24, 40])
def test_masks_and_repeated_heads_are_those_of_transformers(calls: Calls, window: int | None, prompt: int) -> None:
    model = tiny_mistral(window)
    core = core_of(model)
    greedy_tokens(EagerEngine(model, HOST), torch.arange(prompt)[None], 3)
    steps = (Step(1, prompt, 0), Step(1, 1, prompt), Step(1, 1, prompt + 1))
    for step, (masked, key_heads, _) in zip(steps, calls, strict=True):
        path = path_on_cpu(core, step)
        assert core.masked(step, path) == masked
        repeated = core.each(step, path).redundant_bytes["repeat_kv copies"] > 0
        assert repeated == (key_heads == core.query_heads)


def path_on_cpu(core: AttentionCore, step: Step, *, compiled: bool = False) -> ExecutionPath:
    """Return the path of a step on a CPU in float32, from torch and transformers."""
    query, keys = int(step.query), int(step.query + step.context)
    return attention_path("sdpa", [core], SdpaStep(CPU, torch.float32, query, keys, compiled))


def bytes_of_repeated(calls: Calls, core: AttentionCore) -> list[int]:
    """Return the K and V bytes that `repeat_kv` wrote and the kernel read in each call, from the kernel's heads."""
    width = core.qk_dim + core.v_dim
    return [2 * keys * heads * width * 4 if heads > core.kv_heads else 0 for _, heads, keys in calls]


@pytest.mark.parametrize("cache", [ReusedCache, UsedCache])
def test_a_prompt_into_an_emptied_static_cache_gets_no_mask(calls: Calls, cache: type[ReusedCache]) -> None:
    """transformers detects the empty cache, whether or not it was filled before."""
    engine, prompt = cache(tiny_mistral(None), HOST), torch.arange(8)[None]
    with torch.inference_mode():
        engine.prepare(1, 16)
        calls.clear()
        for _ in range(2):
            engine.prefill(prompt, 16)
    assert calls == [(False, 2, 8), (False, 2, 8)]


@pytest.mark.slow
def test_a_compiled_step_repeats_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code does not use `pack_gqa` (integrations/sdpa_attention.py, 5.23), as dynamo's graph shows."""
    model = tiny_mistral(None)
    core = core_of(model)
    calls: Calls = []

    def record_graph(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        for node in module.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                shape = node.args[1].meta["example_value"].shape
                calls.append((node.kwargs["attn_mask"] is not None, int(shape[1]), int(shape[2])))
        return module.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record_graph))
    greedy_tokens(CompileEngine(model, HOST), torch.arange(8)[None], 3)
    step = Step(1, 1, 9)
    path = replace(path_on_cpu(core, step, compiled=True), cache="static", static_cache_len=11)
    assert core.masked(step, path)
    repeated_bytes = int(core.each(step, path).redundant_bytes["repeat_kv copies"])
    assert {repeated_bytes} == set(bytes_of_repeated(calls, core)) != {0}


MODELS = (("smollm2-135m", torch.float32), ("smollm2-135m", torch.bfloat16), ("deepseek-v2-lite", torch.float32))


@pytest.mark.parametrize(("model_name", "dtype"), slow_except(MODELS[:2], MODELS))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("query", slow_except([1], [1, 16]))
def test_the_kernel_named_is_the_kernel_run(model_name: str, dtype: torch.dtype, masked: bool, query: int) -> None:
    core = core_of(on_meta(model_name, dtype))
    heads = core.query_heads
    q = torch.randn(1, heads, query, core.qk_dim, dtype=dtype)
    k = torch.randn(1, heads, 16, core.qk_dim, dtype=dtype)
    v = torch.randn(1, heads, 16, core.v_dim, dtype=dtype)
    mask = torch.ones(1, 1, query, 16, dtype=torch.bool) if masked else None
    with Traffic() as recorder, torch.no_grad():
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=query > 1 and not masked)
    flash = any("flash_attention" in name for name in recorder.names)
    assert sdpa_kernel(core, SdpaStep(CPU, dtype, query, 16), masked=masked) == ("flash" if flash else "math")


def test_a_mask_makes_the_kernel_run_the_whole_rectangle() -> None:
    """40 tokens with a window of 24 need 24 * 25 / 2 + 16 * 24 = 684 pairs, and the kernel executes 1,600."""
    core = core_of(tiny_mistral(24))
    work = core.each(Step(1, 40, 0), ExecutionPath())
    flops_per_pair = 2 * 4 * (16 + 16)
    assert work.model_flops == 684 * flops_per_pair
    assert work.executed_flops == 1600 * flops_per_pair
    assert core.each(Step(1, 20, 0), ExecutionPath()).executed_flops == 210 * flops_per_pair


def test_int8_conversions_of_one_matmul() -> None:
    """10 rows of 64 in bfloat16 are cast to float16, quantised to int8 and multiplied into 128 int32 outputs.

    The cast reads 2 bytes, writes 2 and reads 2. The int8 is written and read. The result, 10 x 128 x 4 bytes, is
    written and read.
    """
    from bitsandbytes.nn import Linear8bitLt

    weight = stored(Linear8bitLt(64, 128, bias=False, has_fp16_weights=False))
    conversions = weight.conversion_bytes(10, torch.bfloat16, 0)
    assert conversions == {Cause.INT8_INPUTS: 10 * 64 * (2 + 2 + 2 + 1 + 1), Cause.INT32_RESULTS: 2 * 10 * 128 * 4}
    assert weight.conversion_bytes(10, torch.float16, 0)[Cause.INT8_INPUTS] == 10 * 64 * (1 + 1)
    assert Cause.OUTLIERS in weight.conversion_bytes(10, torch.float16, 3)
    assert weight.conversion_flops(10, 3) == {Cause.OUTLIERS: 2 * 10 * 3 * 128}


def test_outlier_columns_are_those_that_the_library_found(tiny_folder: Any) -> None:
    module: Any = loaded(tiny_folder, torch.bfloat16, quant="int8").module
    engine = EagerEngine(module, HOST)
    greedy_tokens(engine, torch.arange(16)[None], 1)
    assert outlier_columns(module) == {}
    with torch.no_grad():
        module.model.layers[0].input_layernorm.weight[[5, 9]] = 1000.0
    greedy_tokens(engine, torch.arange(16)[None], 1)
    columns = outlier_columns(module)
    for name in ("q_proj", "k_proj", "v_proj"):
        assert columns[f"model.layers.*.self_attn.{name}"] == 1.0  # two columns in one of two layers


def test_generate_upcasts_the_last_logits() -> None:
    """Mistral's 32,000 logits are read in 2 bytes, and written and read in 4."""
    [head] = [op for op in walked("mistral-7b-v0.1").of_kind(Linear) if op.group == "lm_head"]
    work = head.work(Step(1, 1, 512), ExecutionPath(upcasts_logits=True))
    assert work.redundant_bytes["logits upcast to float32"] == 32_000 * (2 + 4 + 4)
    assert "logits upcast to float32" not in head.work(Step(1, 1, 512), ExecutionPath()).redundant_bytes


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("prompt", [8, 22, 24, 40])
def test_slots_and_heads_of_a_static_cache_are_real(calls: Calls, window: int | None, prompt: int) -> None:
    """A full window is also rolled and copied back in every step, with the bytes of torch's operators.

    Up to transformers 5.17, a decode step repeats all slots of a static cache. With `pack_gqa` it does not.
    """
    model = tiny_mistral(window)
    core = core_of(model)
    slots, steps = prompt + 4, [Step(1, prompt, 0), *(Step(1, 1, prompt + done) for done in range(3))]
    path = ExecutionPath(cache="static", static_cache_len=slots)
    paths = [replace(path_on_cpu(core, step), cache="static", static_cache_len=slots) for step in steps]
    engine = StaticEngine(model, HOST)
    state, copied = None, []
    for _ in steps:
        with torch.inference_mode(), Copies() as copies:
            state = engine.prefill(torch.arange(prompt)[None], slots) if state is None else engine.decode(state)
        copied.append(copies.bytes)
    passed = [keys for _, _, keys in calls]
    # For a prompt without a mask, transformers cuts off the empty slots of the cache (sdpa_attention.py).
    assert passed == [int(core.cache(path).keys(step)) if core.masked(step, path) else step.query for step in steps]
    live = [step.query + min(step.context, (window or slots) - 1) for step in steps]
    empty = [keys - tokens for keys, tokens in zip(passed, live, strict=True)]
    unfilled = [core.each(step, path).redundant_bytes[Cause.UNFILLED_SLOTS] for step in steps]
    assert unfilled == [max(0, slots) * 2 * 2 * 16 * 4 for slots in empty]
    counted = [float(core.each(step, path).redundant_bytes.get(Cause.ROLLED_WINDOWS, 0)) for step in steps]
    assert counted == copied
    on_cpu = [core.each(step, path).redundant_bytes for step, path in zip(steps, paths, strict=True)]
    assert [bytes_[Cause.REPEATED_HEADS] for bytes_ in on_cpu] == bytes_of_repeated(calls, core)


class Copies(TorchDispatchMode):
    """Counts the bytes of `roll` and whole-window `copy_` for keys and values of [1, 2 heads, slots, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, shape = func.__name__, tuple(getattr(args[0], "shape", ())) if args else ()
        if name in ("roll.default", "copy_.default") and len(shape) == 4 and shape[1::2] == (2, 16):
            self.bytes += 2 * args[0].nbytes
        return func(*args, **(kwargs or {}))
