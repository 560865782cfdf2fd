"""The calls of a step, captured as the model makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import recorded
import torch
from machines import HOST
from small_models import SIZES, small_model
from subjects import subject_of
from torch.utils.flop_counter import FlopCounterMode

from profiler.counting.attention import AttentionCore
from profiler.counting.operators import Experts
from profiler.counting.walk import walk
from profiler.engines.caches import rewind
from profiler.engines.registry import ENGINES
from profiler.facts.step import Step
from profiler.measure.captured_calls import answered, callable_modules, caught_calls, masks_of_uncaptured_steps, step_of

pytestmark = pytest.mark.cpu


def decode_step(model: Any, context: int, batch: int = 2) -> Callable[[], Any]:
    ids = torch.randint(0, 128, (batch, context), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        cache = model(ids, use_cache=True).past_key_values
    return partial(model, ids[:, -1:], past_key_values=cache, use_cache=True)


def test_a_window_is_handed_over_as_the_model_hands_it() -> None:
    """After 20 tokens a window of 8 gives the kernel 8 keys of 2 heads; a prefill of 20 gives all keys and a mask."""
    model = small_model("Mistral", num_hidden_layers=3, sliding_window=8)
    step = Step(2, 1, 20)
    modules = callable_modules(model, walk(model), 1e9, step)
    [calls] = caught_calls(modules, decode_step(model, 20)).values()
    assert len(calls) == 3
    for call in calls:
        _, q, k, *_ = call.args  # type: ignore[attr-defined]
        assert (q.shape, k.shape) == ((2, 4, 1, 16), (2, 2, 8, 16))
        output, _ = call()  # type: ignore[misc]
        assert output.shape == (2, 1, 4, 16)
    [calls] = caught_calls(modules, partial(model, torch.zeros(2, 20, dtype=torch.long))).values()
    _, q, k, _, mask = calls[0].args  # type: ignore[attr-defined]
    assert (q.shape[2], k.shape[2]) == (20, 20)
    assert mask.sum() == sum(min(i + 1, 8) for i in range(20)) * mask.shape[0]


def test_experts_are_called_with_what_their_router_chose() -> None:
    model = small_model("Qwen3Moe", num_hidden_layers=3, num_experts=8)
    step = decode_step(model, 5, batch=3)
    calls = caught_calls(callable_modules(model, walk(model), 1e9, Step(3, 1, 5)), step)
    kinds = {type(operator): several for operator, several in calls.items()}
    assert set(kinds) == {AttentionCore, Experts}
    for call in kinds[Experts]:
        hidden, chosen, weights = call.args  # type: ignore[attr-defined]
        assert hidden.shape == (3, 64)
        assert chosen.shape == weights.shape == (3, 2)
    assert len(kinds[Experts]) == 3


def test_a_step_ends_with_the_last_call_that_is_wanted_and_leaves_nothing_behind() -> None:
    model = small_model("Mistral", num_hidden_layers=3, sliding_window=8)
    ids = torch.zeros(1, 4, dtype=torch.long)
    with torch.inference_mode():
        before = model(ids).logits
    heads: list[int] = []
    hook = model.lm_head.register_forward_pre_hook(lambda *_: heads.append(1))
    caught_calls(callable_modules(model, walk(model), 1e9, Step(1, 4, 0)), partial(model, ids))
    hook.remove()
    assert not heads
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("kind", ["Mistral", "Qwen3Moe"])
def test_between_the_calls_no_product_is_left(kind: str) -> None:
    """By torch's own counter, a step has products; with its calls answered, only rotary angles are multiplied."""
    model = small_model(kind)
    modules = callable_modules(model, walk(model), 1e9, Step(2, 1, 6))
    run = decode_step(model, 6)
    with torch.inference_mode():
        with FlopCounterMode(display=False) as whole:
            run()
        with answered(model, modules):
            run()
            with FlopCounterMode(display=False) as small:
                run()
        router = 2 * 2 * 64 * 4 * 2 if kind == "Qwen3Moe" else 0  # hidden x experts, for two tokens in two layers
        assert whole.get_total_flops() > 100_000
        assert small.get_total_flops() <= router + 2 * 8 * 2 * 2
        assert run().logits.abs().sum() > 0


@pytest.mark.parametrize("engine", ["static", "eager"])
def test_a_decode_step_is_replayed_any_number_of_times(
    engine: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A static cache of 6 + 4 tokens has 10 slots; each replay of the captured step writes to the same one.

    Without a reset of the cache, the fifth replay writes to slot 10. This error in `index_copy_` ends a CUDA context.
    """
    machine = recorded.machine(monkeypatch)
    subject, _ = subject_of(str(tiny_folder), prompt_lens=[6], batch_sizes=[2], new_tokens=4, engine=engine)
    [cell] = subject.grid.cells
    [key] = [key for key in cell.keys if key.phase == "decode"]
    step = step_of(replace(subject, machine=machine), key)
    with torch.inference_mode():
        step()
        replay = machine.capture(step)
        for _ in range(64):
            replay()


def test_a_moving_window_is_set_back_on_the_host_too() -> None:
    """A window of 8 in 24 slots is filled with 12 tokens; after each of 32 steps it has seen 13."""
    model: Any = small_model("Mistral", sliding_window=8)
    engine = ENGINES["static"](model, HOST)
    with torch.inference_mode():
        state = engine.fill(2, 12, 24)
        set_back = rewind(state.cache, 12)
        for _ in range(32):
            set_back()
            engine.decode(state)
            assert {layer.cumulative_length_int for layer in state.cache.layers} == {13}


@pytest.mark.parametrize(("kind", "phase"), [("dynamic", "prefill"), ("dynamic", "decode"), ("static", "prefill")])
def test_a_capture_of_small_kernels_makes_no_mask_of_its_own(
    kind: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without padding, these three steps need no mask. transformers 5.17 makes one in a capture.

    The length of a static cache is on the device, so the host's 0 replaces it, as in `CapturableCache`.
    """
    from transformers import DynamicCache, LlamaConfig, StaticCache
    from transformers.masking_utils import create_causal_mask

    config = LlamaConfig(**SIZES, attn_implementation="sdpa")
    cache: Any = StaticCache(config=config, max_cache_len=32) if kind == "static" else DynamicCache(config=config)
    if phase == "decode":
        for layer in range(2):
            cache.update(torch.zeros(1, 2, 16, 16), torch.zeros(1, 2, 16, 16), layer)
    elif kind == "static":
        for name in ("get_seq_length", "get_query_offset"):
            monkeypatch.setattr(cache, name, lambda *_, **__: 0, raising=False)
    inputs = torch.zeros(1, 16 if phase == "prefill" else 1, 64)
    asked: Any = {"config": config, "inputs_embeds": inputs, "attention_mask": None, "past_key_values": cache}
    assert create_causal_mask(**asked) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if kind == "static":
        length_on_device = StaticCache(config=config, max_cache_len=32)
        length_on_device.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)
        length_on_device.reset()
        assert create_causal_mask(**asked | {"past_key_values": length_on_device}) is not None, "a capture has a mask"
        with masks_of_uncaptured_steps():
            assert create_causal_mask(**asked | {"past_key_values": length_on_device}) is None
    with masks_of_uncaptured_steps():
        assert create_causal_mask(**asked) is None
