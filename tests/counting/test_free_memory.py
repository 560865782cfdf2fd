"""The memory that steps take, by arithmetic and by torch's allocator; all commands agree on what fits."""

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import slow_except
from shrink import configs
from small_models import small_model
from subjects import subject_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from traffic import Traffic
from transformers import AutoConfig

from profiler.counting.attention import AttentionCore
from profiler.counting.cache import counted_model
from profiler.counting.memory_need import memory_need, need_in_chunks, path_on
from profiler.counting.operators import Experts
from profiler.counting.walk import called_modules, walk
from profiler.data.datasheets import gpu_called
from profiler.data.free_memory import idle_room_bytes, room_bytes
from profiler.facts.operators import Cause
from profiler.facts.step import ExecutionPath, Heads, Step
from profiler.loading.meta_model import build_on_meta, from_config
from profiler.loading.source import resolve
from profiler.rent import RentOptions, rent

pytestmark = pytest.mark.cpu

GIB = 1 << 30
WEIGHTS = 2 * 7_241_732_096  # https://huggingface.co/mistralai/Mistral-7B-v0.1
CACHE = 640 * 2 * 32 * 8 * 128 * 2
"""Bytes per sequence: keys and values of 32 layers with 8 heads of 128, in 16 bits."""
STATES = 512 * (3 * 14336 + 4 * 4096) * 2
"""Bytes per sequence in the MLP: gate, up and their product, and four hidden states."""
LOST = 2.5 * 512 * 14336 * 2
"""Bytes per sequence of free memory that may be in pieces: 2.5 outputs of the widest matmul."""


def test_the_room_of_a_t4() -> None:
    """torch sees 14.56 of 16 GiB (CatVTON issue 133). The context takes 0.45 GB, and 2 % is lost between blocks."""
    assert gpu_called("T4").usable_bytes == pytest.approx(14.56 * GIB, rel=1e-6)
    assert gpu_called("T4").room_bytes == pytest.approx(0.98 * (14.56 * GIB - 450e6), rel=1e-6)
    assert room_bytes("cuda", 10e9) == 9.8e9
    assert idle_room_bytes("cpu", 10e9) == 9e9


GPUS = (("L4", 52, True, True), ("T4", 4, False, False), ("L4", 42, True, False), ("L4", 70, False, False))


@pytest.mark.parametrize(("gpu", "batch", "fits", "tight"), slow_except(GPUS[:1], GPUS))
def test_every_command_gives_the_same_answer(roofscope: Any, gpu: str, batch: int, fits: bool, tight: bool) -> None:
    """An L4 has room for 22.7 GB: for the tensors of 56 sequences, of which 42 run in any case."""
    need = WEIGHTS + batch * (CACHE + STATES)
    size = ("--batch-sizes", str(batch), "--prompt-lens", "512")

    def answer(command: str, *options: str) -> Any:
        return json.loads(roofscope(command, "mistral-7b-v0.1", *options, "--format", "json").out)

    forecast = answer("forecast", "--on", gpu, *size, "--new-tokens", "128")
    assert {(cell["fits"], cell["tight"]) for cell in forecast["cells"]} == {(fits, tight)}
    [counted] = answer("count", "--phase", "prefill", "--batch", str(batch), "--prompt", "512", "--gpu", gpu)["gpus"]
    assert (counted["floor_s"] is not None, counted["tight"]) == (fits, tight)
    assert counted["room_bytes"] == gpu_called(gpu).room_bytes
    if gpu == "L4":  # a T4 adds the scores of its attention
        without_new = batch * 128 * CACHE / 640
        assert counted["needs_bytes"] == pytest.approx(need - without_new, rel=0.002)
        assert counted["safe_bytes"] == pytest.approx(need + batch * LOST - without_new, rel=0.002)
    grid = answer("count", *size, "--gpu", gpu)
    assert {(row["fits"], row["tight"]) for row in grid["rows"]} == {(fits, tight)}
    [offer] = rent(RentOptions("mistral-7b-v0.1", engine="eager", price=f"{gpu}=1")).gpus
    assert (offer.batch >= batch) == (fits and not tight), "rent counts on what runs"


def test_run_skips_exactly_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama of 16 bits has 2 layers of width 64, an MLP of 96, 2 KV heads of 16, and two tables of 128 words.

    The MLP has gate, up and their product, and four hidden states. Fragmentation takes 2.5 outputs of 96.
    After loading, the weights' memory is no longer free. Two ranks on this CPU need the rest twice.
    """
    small_model("Llama", max_position_embeddings=4096).save_pretrained(tmp_path)
    subject, _ = subject_of(str(tmp_path), dtype="bfloat16", prompt_lens=[2048], batch_sizes=[8], new_tokens=32)
    [cell] = subject.grid.cells
    weights = 2 * (2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) + 64 + 2 * 128 * 64)
    cache = (2048 + 32) * 2 * 2 * 2 * 16 * 2
    need = weights + 8 * (cache + 2048 * (3 * 96 + 4 * 64 + 2.5 * 96) * 2)
    for ranks, share, skipped in ((1, 1.002, False), (1, 0.998, True), (2, 1.002, False), (2, 0.998, True)):
        subject.engines["eager"].helper_pids = (1,) * (ranks - 1)
        free = int(share * (weights + ranks * (need - weights)) / 0.9) + 1 - subject.model_bytes
        monkeypatch.setattr("profiler.device.memory.available_bytes", lambda _, free=free: free)
        assert (subject.lack_of_memory(cell) is not None) == skipped
        assert subject.fitting([8]) == ([] if skipped else [8]), "overhead is measured only where a cell fits"


SMALL = {
    "vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 128, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "layer_types": ["full_attention"] * 2, "pad_token_id": 0,
}  # fmt: skip


def most_allocated(call: Callable[[], object]) -> int:
    """Return the peak memory of `call` above the memory before it, by torch's allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {}),
        ("glm4_moe", {}),
        pytest.param("gpt_oss", {}, marks=pytest.mark.slow),
        pytest.param("nemotron_h", {"layer_types": ["moe"] * 2, "mlp_hidden_act": "relu2"}, marks=pytest.mark.slow),
        pytest.param("llama4_text", {"intermediate_size": 512, "interleave_moe_layer_step": 1}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"moe_intermediate_size": 512}, marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_real_experts(model_type: str, sizes: dict[str, Any]) -> None:
    """The router's indices add at most 2 % to these narrow experts. Llama 4 makes the rows before it calls them."""
    model = from_config(AutoConfig.for_model(model_type, **SMALL | sizes), torch.bfloat16, "eager").eval()
    [experts] = (work := walk(model)).of_kind(Experts)
    module, tokens = called_modules(model, work)[experts][0], 512
    calls: list[Any] = []
    module.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    with torch.no_grad():
        model(torch.arange(tokens)[None] % SMALL["vocab_size"], use_cache=False)
        [(args, options)] = calls
        given = most_allocated(lambda: module(*args, **options))
    counted = 2 * tokens * experts.rows_per_token * experts.row_elements
    assert counted * (0.8 if experts.runs_all else 0.98) < given < counted * 1.02


LATENT = {"kv_lora_rank": 32, "q_lora_rank": 48, "head_dim": 16, "num_key_value_heads": 4, "v_head_dim": 32}
LATENT |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 32}
INDEXED = LATENT | {"index_n_heads": 32, "index_head_dim": 32, "index_topk": 8}
INDEXED |= {"layer_types": ["indexed_attention"] * 2}


@pytest.mark.parametrize(
    ("model_type", "sizes", "batch", "prompt"),
    [("llama", {}, 64, 8), ("youtu", LATENT, 64, 8), ("gemma3_text", {}, 64, 8), ("deepseek_v32", INDEXED, 1, 1024)],
)
def test_the_peak_of_a_prefill(model_type: str, sizes: dict[str, int], batch: int, prompt: int) -> None:
    """Short prompts have few scores; hidden states of 256 are wider than some inputs. An indexer has scores too."""
    config = AutoConfig.for_model(model_type, **SMALL | {"intermediate_size": 1024} | sizes)
    model, ids = from_config(config, torch.bfloat16, "eager").eval(), torch.zeros(batch, prompt, dtype=torch.long)
    with torch.no_grad():
        given = most_allocated(lambda: model(ids, logits_to_keep=1))
    need = memory_need(walk(model), 0, Step(batch, prompt, 0), 0, ExecutionPath(attention="eager"))
    assert need.peak_bytes == pytest.approx(given, rel=0.04)


def test_the_copies_of_a_decode_step() -> None:
    """8 sequences use 2 experts each, of three matrices of 256 x 128; hidden states add at most 3 %."""
    model = from_config(AutoConfig.for_model("mixtral", **SMALL), torch.bfloat16, "eager").eval()
    model.set_experts_implementation("batched_mm")
    [experts] = walk(model).of_kind(Experts)
    step, path = Step(8, 1, 1), ExecutionPath(gathers_experts=True)
    with torch.no_grad():
        cache = model(torch.zeros(8, 1, dtype=torch.long)).past_key_values
        given = most_allocated(lambda: model(torch.arange(8)[:, None], past_key_values=cache))
    copied_bytes = 8 * 2 * 3 * 256 * 128 * 2
    assert experts.gathered_bytes(step, path) == copied_bytes
    assert copied_bytes < given < 1.03 * copied_bytes
    assert experts.gathered_bytes(Step(8, 2, 0), path) == experts.gathered_bytes(step, ExecutionPath()) == 0


def test_a_token_may_repeat_all_slots_of_a_static_cache() -> None:
    """4 sequences of 1,024 slots: K and V of 4 heads of 16 in float32, of which the cache has 2."""
    path = ExecutionPath(cache="static", masked_heads={16: "repeated"})
    need = memory_need(walk(small_model("Llama")), 0, Step(4, 1, 0), 1023, path)
    assert need.workspace_bytes == 4 * 1024 * 4 * 2 * 16 * 4


@pytest.mark.parametrize(("shared", "top_k"), [(2, 6), (3, 2)])
def test_every_token_runs_all_shared_experts(shared: int, top_k: int) -> None:
    """Inkling's shared experts are a bank too; each has three matrices of 64 x 32, of 2 bytes."""
    [config] = configs("inkling_text")
    config.n_shared_experts, config.num_experts_per_tok = shared, top_k
    work = walk(build_on_meta(config, torch.bfloat16))
    [bank] = [operator for operator in work.of_kind(Experts) if "shared" in operator.name]
    for tokens in (1, 2, 3):
        done = bank.each(Step(tokens, 1, 8), ExecutionPath())
        expected = shared * 3 * 64 * 32 * 2
        assert (done.weight_bytes, done.model_flops) == (expected, tokens * expected)


def test_the_copies_of_mixtral() -> None:
    """One token copies two of the experts that it reads anyway; 32 sequences copy 64, more than all of a layer."""
    work = counted_model(resolve("mixtral-8x7b")).work
    copied_bytes, path = 2 * 3 * 4096 * 14336 * 2, path_on(work, "sdpa", fuses_grouped_heads=True)
    [experts] = work.of_kind(Experts)
    assert experts.each(Step(1, 1, 512), path).redundant_bytes == {Cause.GATHERED_EXPERTS: 2 * copied_bytes}
    assert memory_need(work, 0, Step(32, 1, 511), 1, path).workspace_bytes == 32 * copied_bytes
    assert need_in_chunks(work, 0, 32, 1).workspace_bytes < copied_bytes


BATCH, HEADS, KV_HEADS, WIDTH = 2, 16, 4, 32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("query", "context", "masked", "handed"),
    [
        pytest.param(256, 0, False, "grouped", id="a prompt"),
        pytest.param(64, 192, True, "repeated", id="a prompt after a cache"),
        pytest.param(1, 1023, False, "grouped", id="a token"),
        pytest.param(1, 1023, True, "packed", id="a token on a static cache"),
        pytest.param(1, 1023, True, "repeated", id="the same up to transformers 5.17"),
    ],
)
def test_traffic_and_scratch_are_those_of_torch(
    dtype: torch.dtype, query: int, context: int, masked: bool, handed: Heads
) -> None:
    """Traffic is that of the recorded operators, and scratch memory is what the allocator gave."""
    keys, step = context + query, Step(BATCH, query, context)
    core = AttentionCore("core", dtype, HEADS, KV_HEADS, WIDTH, WIDTH)
    heads, rows = (KV_HEADS, HEADS // KV_HEADS) if handed == "packed" else (HEADS, query)
    kv_heads = HEADS if handed == "repeated" else KV_HEADS
    q = torch.randn(BATCH, heads, rows, WIDTH, dtype=dtype)
    k, v = (torch.randn(BATCH, kv_heads, keys, WIDTH, dtype=dtype) for _ in range(2))
    mask = torch.ones(BATCH, 1, query, keys, dtype=torch.bool) if masked else None
    options = {"attn_mask": mask, "is_causal": query > 1 and not masked, "enable_gqa": handed == "grouped"}
    call = partial(F.scaled_dot_product_attention, q, k, v, **options)
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        with Traffic() as recorded:
            call()
        given = most_allocated(call)
    path = ExecutionPath(
        kernel="math", masked_kernel="math", heads={WIDTH: handed}, masked_heads={WIDTH: handed},
        cache="static" if masked and query == 1 else "dynamic", static_cache_len=keys,
    )  # fmt: skip
    work = core.each(step, path)
    cached = BATCH * keys * core.cached_elements * dtype.itemsize
    operands = work.activation_bytes + cached
    redundant = work.redundant_bytes[Cause.ATTENTION_MATRIX] + work.redundant_bytes[Cause.REPEATED_HEADS]
    if handed == "repeated":  # `repeat_kv` read K and V once and wrote them before the call
        before = BATCH * keys * HEADS * 2 * WIDTH * dtype.itemsize
        redundant -= 2 * before
        operands += before - cached
        given += before
    assert float(operands + redundant) == pytest.approx(recorded.bytes, rel=0.03)
    assert float(core.cost(step, path).scratch_bytes) == pytest.approx(given, rel=0.03)
