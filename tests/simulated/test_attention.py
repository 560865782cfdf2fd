"""Attention on simulated cards: the kernel, cuDNN's plans, and the memory and traffic of the math path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from profiler.store.folder import Run
from profiler.units import duration

from .held import REST
from .native import why_not
from .oracle import pairs
from .scenario import Scenario, said, so
from .truth import A100, H100, T4, Truth
from .world import World, simulated

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

PLAN_S = 22e-3
"""Reported for one card (GB10); other cards take up to 440 ms."""
B200 = H100.but(name="NVIDIA B200", capability=(10, 0))
RTX_5090 = H100.but(name="NVIDIA GeForce RTX 5090", capability=(12, 0))


def heads(count: int, tokens: int, width: int = 128, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Return [batch, heads, tokens, width] for two sequences."""
    return torch.zeros(2, count, tokens, width, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("truth", "asked", "backend"),
    [
        (H100, {}, 3),
        (B200, {}, 3),
        (A100, {}, 1),
        (RTX_5090, {}, 1),
        (T4, {}, 0),
        (H100, {"dtype": torch.float32}, 0),
        (H100, {"width": 256}, 1),
        (H100, {"masked": True}, 3),
        (A100, {"masked": True}, 0),
        (H100, {"keys": 1}, 1),
    ],
)
def test_the_backend_is_torchs(truth: Truth, asked: dict[str, Any], backend: int) -> None:
    """For one query and grouped heads; 0 math, 1 flash, 2 memory-efficient, 3 cuDNN (torch.nn.attention.SDPBackend)."""
    tokens, masked = asked.get("keys", 40), asked.get("masked", False)
    shape = {name: value for name, value in asked.items() if name in ("width", "dtype")}
    with simulated(truth):
        query, key = heads(8, 1, **shape), heads(2, tokens, **shape)
        mask = torch.ones(2, 1, 1, tokens, dtype=torch.bool, device="cuda") if masked else None
        assert torch._fused_sdp_choice(query, key, key, attn_mask=mask, enable_gqa=True) == backend
    assert int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION) == 3


@pytest.mark.parametrize("within", [torch.inference_mode, torch.no_grad])
def test_the_kernel_is_the_same_without_gradients(within: Any) -> None:
    with simulated(A100) as world, within():
        query, key = heads(8, 1), heads(2, 40)
        world.card.log = log = []
        scaled_dot_product_attention(query, key, key, enable_gqa=True)
        world.card.log = None
    assert [kernel.work.name for kernel in log] == ["flash attention float16"]


def test_cudnn_plans_each_shape_once() -> None:
    """Plans differ by lengths, batch, mask, strides and the causal flag."""
    with simulated(H100.but(plan_s=PLAN_S)) as world, torch.inference_mode():

        def plans(*operands: torch.Tensor, **options: Any) -> int:
            began_s = world.host.now_s
            scaled_dot_product_attention(*operands, **options)
            return round((world.host.now_s - began_s) / PLAN_S)

        query, short, long = heads(2, 1), heads(2, 40), heads(2, 41)
        assert [plans(query, key, key) for key in (short, long, short, long)] == [1, 1, 0, 0]
        assert plans(query, long[:, :, :40], long[:, :, :40]) == 1, "other strides"
        mask = torch.ones(2, 1, 1, 40, dtype=torch.bool, device="cuda")
        assert [plans(query, short, short, attn_mask=mask) for _ in range(2)] == [1, 0]
        assert [plans(short, short, short, is_causal=causal) for causal in (True, False, True)] == [1, 1, 0]


def decode(world: World, model: Any) -> list[float]:
    """Return the host's seconds for each of eight steps on a growing cache, after a prefill."""
    with torch.inference_mode():
        token = torch.zeros(1, 1, dtype=torch.long, device="cuda")
        cache = model(torch.zeros(1, 16, dtype=torch.long, device="cuda"), use_cache=True).past_key_values
        times = []
        for _ in range(8):
            began_s = world.host.now_s
            model(token, past_key_values=cache, use_cache=True)
            times.append(world.host.now_s - began_s)
    return times


@pytest.mark.parametrize(("truth", "planned"), [(H100, 1), (A100, 0)], ids=["H100", "A100"])
def test_a_decode_loop_pays_for_each_new_length(truth: Truth, planned: int) -> None:
    """It pays once for all layers, and only the first time."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=3, num_attention_heads=2, vocab_size=64
    )
    with simulated(truth.but(plan_s=PLAN_S)) as world:
        model = LlamaForCausalLM(config).to(torch.float16).to("cuda").eval()
        first, second = decode(world, model), decode(world, model)
    for new, known in zip(first, second, strict=True):
        assert new - known == pytest.approx(planned * PLAN_S, abs=1e-9)
        assert known < PLAN_S / 10


@pytest.mark.slow
def test_plans_are_not_part_of_a_steps_time(tmp_path: Path) -> None:
    """A server plans once for each length, and then never again."""
    truth = H100.but(plan_s=PLAN_S)
    scenario = Scenario("mistral-7b-v0.3", 2, prompt_lens=[128, 512], batch_sizes=[1, 4])
    run, _ = said(scenario, [truth], tmp_path)
    for phase, row in pairs(so(scenario, truth, tmp_path), run.cells):
        assert row["latency_s"] == pytest.approx(phase.latency_s, rel=REST)
        assert row["confidence"] != "unusable"
    [warning] = [line for line in run.document.warnings if line.startswith("each KV length costs")]
    assert duration(PLAN_S) in warning


class Moments(list[Any]):
    """A card's log that also records the allocated bytes at each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[int] = []

    def append(self, kernel: Any) -> None:
        super().append(kernel)
        self.allocated.append(torch.cuda.memory_allocated())


def attend(world: World, new: int, held: int) -> tuple[Moments, int]:
    """Return the kernels of the second call of attention with grouped heads, and the bytes allocated before."""
    with torch.inference_mode():
        query, keys = heads(32, new), heads(8, held)
        scaled_dot_product_attention(query, keys, keys, is_causal=new > 1, enable_gqa=True)
        before = torch.cuda.memory_allocated()
        world.card.log = log = Moments()
        scaled_dot_product_attention(query, keys, keys, is_causal=new > 1, enable_gqa=True)
        world.card.log = None
    return log, before


def test_the_math_path_needs_nine_bytes_per_score_and_copies_in_float32() -> None:
    """The scores, their softmax and a mask of -inf values exist at once.

    Next to them are two copies of the queries, and the causal mask. Keys and values each have a copy and a repeated
    copy. All copies are in float32, and so is the causal mask.

    Source: aten/src/ATen/native/transformers/attention.cpp (2.13), `_safe_softmax`; since PR #139613, in 2.6, `where`
    reuses the softmax's memory.
    """
    tokens, groups = 1024, 4
    with simulated(T4) as world:
        log, before = attend(world, tokens, tokens)
    scores = 2 * 32 * tokens * tokens
    queries, keys = 2 * 32 * tokens * 128, 2 * 8 * tokens * 128
    expected = 9 * scores + 4 * (2 * queries + 2 * keys * (1 + groups) + tokens * tokens)
    assert max(log.allocated) - before == pytest.approx(expected, rel=0.01)
    names = [kernel.work.name for kernel in log]
    peak = names[log.allocated.index(max(log.allocated))]
    assert "isneginf" in peak or "all" in peak or "scalar_tensor" in peak or "where" in peak


def test_the_math_path_moves_a_cache_often() -> None:
    """This counts one query and g query heads per key, in units of the cache's 16-bit bytes.

    Keys and values are read, written as float32 and read again (1 + 2 + 2), then repeated (2g). The keys are scaled
    (g + g), and two products read both (2g).
    """
    tokens, groups = 4096, 4
    with simulated(T4) as world:
        log, _ = attend(world, 1, tokens)
    moved = sum(size for kernel in log for _, size in (*kernel.work.reads, *kernel.work.writes))
    live = 2 * 2 * 2 * 8 * tokens * 128
    assert moved / live == pytest.approx(5 + 6 * groups, rel=0.02)


LONG = Scenario("mistral-7b-v0.3", 2, prompt_lens=[2048], batch_sizes=[4])


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("long")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return said(LONG, [T4], folder)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "least_share"), [("prefill", 0.7), ("decode", 0.9)])
def test_the_copies_of_the_math_path_are_named_first(phase: str, least_share: float, long_run: Run) -> None:
    """All kernels of this card reach their roof. Most of attention's loss is work that a fused kernel would not do."""
    [row] = [row for row in long_run.cells.to_dict("records") if row["phase"] == phase]
    [item] = [item for item in long_run.document.evidence if item.phase == phase]
    assert item.levers[0].change == "a fused attention kernel"
    assert least_share * row["kernel_s"] < item.levers[0].saves_s <= row["kernel_s"]


@pytest.mark.slow
def test_the_peak_of_the_math_path_is_predicted(long_run: Run, tmp_path: Path) -> None:
    [known, _] = so(LONG, T4, tmp_path)
    [prefill] = [item for item in long_run.document.evidence if item.phase == "prefill"]
    assert prefill.predicted_peak_memory_bytes == pytest.approx(known.peak_bytes, rel=REST)
