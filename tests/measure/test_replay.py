"""Calls of a step, captured as the model makes them, and their replays; the overhead model of the model."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import recorded
import torch
from cases import slow_except
from greedy import random_prompt
from machines import CPU, HOST, FakeClock, ceiling, small
from small_models import SIZES, small_model
from subjects import subject_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from traffic import Traffic

from profiler.counting.walk import walk
from profiler.engines.caches import rewind
from profiler.engines.registry import ENGINES
from profiler.engines.transformers import EagerEngine
from profiler.facts.ceilings import READ, Ceilings, CurvePoint
from profiler.facts.measurements import Replay, Replays
from profiler.facts.overhead import overhead_of
from profiler.facts.step import Step
from profiler.loading.config import config_from, load_config
from profiler.loading.load import load
from profiler.loading.meta_model import from_config
from profiler.loading.request import ModelRequest
from profiler.loading.source import resolve
from profiler.measure import overhead
from profiler.measure.captured_calls import answered, callable_modules, caught_calls, masks_of_uncaptured_steps, step_of
from profiler.measure.kernels import replay_calls, replay_kernels, replay_linears
from profiler.measure.overhead import overhead_model_config
from profiler.measure.short_model import shortened

pytestmark = pytest.mark.cpu


class Seen(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shape, self.strides = tuple(x.shape), x.stride()
        return super().forward(x)


def test_the_last_positions_come_as_a_slice_of_hidden_states() -> None:
    """transformers passes `hidden_states[:, -1:, :]` to the LM head; torch may use another kernel for such strides."""
    layer, head = Seen(8, 8), Seen(8, 16)
    linears, rows = {"layer": [layer], "head": [head]}, {"layer": 12, "head": 3}
    found = replay_linears(linears, rows, HOST, dtype=torch.float32, budget_s=0.01, sliced=["head"])
    assert min(found["layer"]) > 0
    assert (layer.shape, layer.strides) == ((1, 12, 8), (96, 8, 1))
    states = torch.empty(3, 5, 8)[:, -1:, :]
    assert head.shape == tuple(states.shape)
    assert head.strides[0] > states.shape[-1], "the stride skips the earlier positions"


def test_page_faults_are_taken_off_the_call_that_took_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock adds one second per call: with 20 fresh pages at 20 ms, 0.6 s remain; without pages, 1 s remains."""
    faults = [0]
    monkeypatch.setattr("profiler.measure.kernels.page_faults", lambda: faults[0])

    def call(pages: int) -> None:
        faults[0] += pages

    calls = {"fresh": [lambda: call(20)] * 2, "plain": [lambda: call(0)] * 2}
    found = replay_calls(calls, small(clock=FakeClock()), budget_s=0.1, page_fault_s=0.02)
    assert found["fresh"] == pytest.approx([0.6] * len(found["fresh"]))
    assert found["plain"] == pytest.approx([1.0] * len(found["plain"]))


def test_what_is_called_in_between_is_made_in_every_pass_and_not_timed() -> None:
    """Two layers of two operators of 1 s each by the clock, and 5 s between them in each layer."""
    made, clock = list[str](), FakeClock()

    def between() -> None:
        made.append("between")
        clock.now += 5.0

    calls = {name: [lambda name=name: made.append(name)] * 2 for name in ("first", "second")}
    found = replay_calls(calls, small(clock=clock), budget_s=0.05, between=[between, between])
    assert set(found) == {"first", "second"}
    assert {seconds for of_calls in found.values() for seconds in of_calls} == {1.0}
    warm, passes = made[:2], made[2:]
    assert warm == ["first", "second"]
    assert passes[:6] == ["first", "second", "between"] * 2


SLOW = 2 << 20
"""The least size that is read as slowly as memory; smaller ones are read ten times as fast."""


@pytest.fixture
def replays(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, Replays]]:
    """The replays of 36 steps in their order, those of linears with the bytes that are read between two of them."""
    grid: dict[str, Any] = {"prompt_lens": [16, 50, 200], "batch_sizes": [1, 8, 64], "new_tokens": 8}
    subject, _ = subject_of(str(tiny_folder), **grid, engine="eager,static")
    given: list[int | None] = []

    def replay_linears(linears: Any, *_: Any, between_bytes: int, **__: Any) -> dict[Any, tuple[float, ...]]:
        given.append(between_bytes)
        return dict.fromkeys(linears, (1e-3,))

    def replay_calls(*_: Any) -> Iterator[Replay]:
        given.append(None)
        return iter(())

    monkeypatch.setattr("profiler.measure.kernels.replay_linears", replay_linears)
    monkeypatch.setattr("profiler.measure.kernels.replay_single_calls", replay_calls)
    curve = tuple(CurvePoint(1 << power, 1e11 if 1 << power < SLOW else 1e10) for power in range(16, 24))
    ceilings = Ceilings({}, {READ: ceiling(1e10)}, 1 << 23, beyond_cache=True, curve=curve)
    found = list(replay_kernels(subject, subject.grid.cells, ceilings, 1.0))
    return list(zip(given, found, strict=True))


def test_decode_steps_read_bytes_of_their_cache_between_matmuls(replays: list[tuple[int | None, Replays]]) -> None:
    """Caches of batches of 1, 8 and 64 after prompts of 16, 50 and 200 tokens; prefills read nothing in between.

    A token has keys and values of 2 layers, 2 heads of 16 and 4 bytes. A step reads those of its middle context, and a
    cache that grows by copies writes and reads them again. The bytes are rounded to a quarter of the 362 kB of weights,
    and no more than twice a size that is past all caches.
    """
    given = [(nbytes, replay.keys) for nbytes, replay in replays if nbytes is not None]
    found = {key: nbytes for nbytes, keys in given for key in keys}
    assert len(found) == 36
    for key, nbytes in found.items():
        context = key.cell.prompt_len + 4
        tokens = key.cell.batch_size * (2 * context + 1 if key.cell.engine == "eager" else context)
        expected = 0 if key.phase == "prefill" else min(tokens * 2 * 2 * 2 * 16 * 4, 2 * SLOW)
        assert nbytes == pytest.approx(expected, abs=362_000 / 8), key
    assert len(given) < len(found), "cells with equal values share their replay"


def test_steps_that_an_answer_names_are_replayed_whole_first(replays: list[tuple[int | None, Replays]]) -> None:
    """The time may reach only two of the steps: the smallest decode step and the largest prefill."""
    named = {("decode", 1, 16), ("prefill", 64, 200)}
    of_linears, of_calls = (
        {(key.phase, key.cell.batch_size, key.cell.prompt_len) for _, replay in part for key in replay.keys}
        for part in (replays[:2], replays[2:4])
    )
    assert [nbytes is None for nbytes, _ in replays[:4]] == [False, False, True, True]
    assert of_calls == named <= of_linears


def decode_step(model: Any, context: int) -> Callable[[], Any]:
    ids = random_prompt(2, context)
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


@pytest.mark.parametrize("kind", ["Mistral", "Qwen3Moe"])
def test_between_the_calls_no_matmul_is_left(kind: str) -> None:
    """By torch's own counter, a step has matmuls; with its calls answered, only rotary angles are multiplied."""
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
def test_a_step_is_replayed_as_often_as_needed(engine: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("name", "filled"), [("static", 12), ("eager", 5)])
def test_a_cache_is_set_back_on_the_host_too(name: str, filled: int) -> None:
    """A moving window of 8 in 24 slots has seen one token more after each step, and so has a growing cache."""
    model: Any = small_model("Mistral", sliding_window=8 if name == "static" else 16)
    engine = ENGINES[name](model, HOST)
    with torch.inference_mode():
        state = engine.fill(2, filled, 24)
        set_back = rewind(state.cache, filled, growing=name == "eager")
        for _ in range(3):
            set_back()
            engine.decode(state)
            assert state.cache.get_seq_length() == filled + 1
            counted = {getattr(layer, "cumulative_length_int", filled + 1) for layer in state.cache.layers}
            assert counted == {filled + 1}


def test_a_capture_of_small_kernels_makes_no_mask_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt into an empty static cache needs no mask; in a capture transformers would make one."""
    from transformers import LlamaConfig, StaticCache
    from transformers.masking_utils import create_causal_mask

    config = LlamaConfig(**SIZES, attn_implementation="sdpa")
    cache: Any = StaticCache(config=config, max_cache_len=32)
    cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)
    cache.reset()
    arguments: Any = {"config": config, "inputs_embeds": torch.zeros(1, 16, 64), "attention_mask": None}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert create_causal_mask(**arguments, past_key_values=cache) is not None
    with masks_of_uncaptured_steps():
        assert create_causal_mask(**arguments, past_key_values=cache) is None


def decode_operators(name: str, config) -> tuple[list[str], int]:  # type: ignore[no-untyped-def]
    loaded = load(ModelRequest(resolve(name), CPU, torch.bfloat16), config)
    engine = EagerEngine(loaded.module, HOST)
    with torch.inference_mode():
        state = engine.prefill(torch.arange(6)[None], 16)
        with Traffic() as operators:
            engine.decode(state)
    return operators.names, walk(loaded.module).params


@pytest.mark.parametrize("name", slow_except(("gpt2",), ["qwen2.5-0.5b", "gemma-2-9b", "gpt2", "mixtral-8x7b"]))
def test_same_operators_as_the_model(name: str) -> None:
    """Operators are compared on 2 layers of the true width, so the model fits on any machine."""
    config = shortened(load_config(resolve(name)), 2)
    text = config.get_text_config()
    for key in ("vocab_size", "intermediate_size"):
        if getattr(text, key, None):
            setattr(text, key, 512)
    text.pad_token_id = None
    overhead_model, overhead_model_params = decode_operators(name, overhead_model_config(config))
    model, model_params = decode_operators(name, config)
    if name == "mixtral-8x7b":  # the experts of a token depend on its values, and so does the number of their matmuls
        overhead_model, model = sorted(set(overhead_model)), sorted(set(model))
    assert overhead_model == model
    assert overhead_model_params < model_params / 20


def test_layers_with_other_heads_keep_their_grouping() -> None:
    """Gemma-4-31B has 2 query heads per key in windowed layers, 8 in global ones; the overhead model has 4 of them."""
    layers = {
        "model_type": "gemma4_text", "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }  # fmt: skip
    overhead_model = from_config(overhead_model_config(config_from(layers, "model")), torch.float32, None)
    assert [layer.self_attn.num_key_value_groups for layer in overhead_model.model.layers] == [2] * 5 + [4]
    assert sum(parameter.numel() for parameter in overhead_model.parameters()) < 1_000_000
    assert overhead_model(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits.shape[1] == 3


@pytest.mark.timing
@pytest.mark.ci
def test_weights_that_stream_by_are_taken_off_step_by_step(tiny_folder: Path) -> None:
    """Linears take 0 to 8 ms per call, 4 ms on average; the overhead model's own part does not depend on their sum."""
    subject, config = subject_of(str(tiny_folder))
    linears = [module for module in subject.loaded.module.modules() if isinstance(module, torch.nn.Linear)]
    draw = random.Random(0)

    def stream(*_: object) -> None:
        until_s = time.perf_counter() + draw.uniform(0, 8e-3)
        while time.perf_counter() < until_s:
            pass

    for linear in linears:
        linear.register_forward_pre_hook(stream)
    measured = overhead.measure_overhead(subject.loaded, config, HOST, [1], ["eager"], 2.0)
    decode = next(item for item in measured if item.phase == "decode")
    streamed_s = 4e-3 * len(linears)
    found = overhead_of(decode)
    assert 0 < found.in_kernels_s < found.step_s < 0.5 * streamed_s
