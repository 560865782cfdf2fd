"""Engines: the tokens of transformers' own generate, also padded and on a quantised cache; when they compile."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from unittest.mock import Mock

import pytest
import recorded
import torch
from cases import slow_except
from greedy import greedy_tokens, random_prompt, tokens_of_generate
from machines import CPU, HOST, small
from small_models import small_model
from transformers import GPT2Config, GPT2LMHeadModel, QuantizedCache

from profiler.device.machine import CudaMachine, Machine
from profiler.engines import transformers
from profiler.engines.base import Engine
from profiler.engines.names import CACHES, ENGINE_NAMES
from profiler.engines.registry import ENGINES, OWNING, check_engine, engines_of_caches
from profiler.engines.transformers import CompileEngine, EagerEngine, PaddedEngine
from profiler.errors import CaptureError, RequestError
from profiler.facts.cache_format import CACHE_FORMATS
from profiler.grid.cells import Cell
from profiler.grid.ragged import Request
from profiler.grid.ranges import make_grid
from profiler.loading.config import load_config
from profiler.loading.source import resolve

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("name", slow_except(("eager", "static", "generate"), filter(ENGINES.get, ENGINE_NAMES)))
def test_an_engine_gives_the_tokens_of_generate(short_model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph engine's code is replayed with the rules of a CUDA graph."""
    if name == "compile" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    prompt = torch.tensor([[504, 3575, 282, 4649, 314]])  # "The capital of France is"
    engine = ENGINES[name](short_model, recorded.machine(monkeypatch) if name == "graph" else HOST)
    assert torch.equal(greedy_tokens(engine, prompt, 16), tokens_of_generate(short_model, prompt, 16))


@pytest.mark.parametrize("name", ["eager", "generate"])
def test_a_whole_call_has_a_mark_before_it_and_after_each_token(name: str) -> None:
    """Four tokens, five marks; after the n-th token the model has run n forwards, and starts no more."""
    model, marks = small_model("Mistral"), []
    forwards: list[int] = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    tokens = ENGINES[name](model, HOST).call(torch.ones(2, 5, dtype=torch.long), 4, lambda: marks.append(len(forwards)))
    assert tokens.shape == (2, 4)
    assert marks == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_call_that_fails_at_a_mark_leaves_the_model_without_hooks(failing: int) -> None:
    """A remaining hook would add a mark to each later forward of every engine."""
    model = small_model("Mistral")
    mark = Mock(side_effect=[*[None] * failing, RuntimeError("CUDA error: unspecified launch failure")])
    with pytest.raises(RuntimeError, match="launch failure"):
        ENGINES["generate"](model, HOST).call(torch.ones(1, 5, dtype=torch.long), 4, mark)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(("free_bytes", "captures"), [(1 << 40, 2), (1 << 16, 3)])
def test_a_shape_is_captured_once_if_its_graph_can_be_kept(
    free_bytes: int, captures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape is used, then another, then the first again. Its graph still uses its cache, if both can be kept."""
    captured: list[object] = []
    capture = CudaMachine.capture
    monkeypatch.setattr(CudaMachine, "capture", lambda *args: captured.append(args) or capture(*args))
    monkeypatch.setattr(CudaMachine, "available_bytes", lambda _machine: free_bytes)
    model = small_model("Mistral")
    engine, eager = ENGINES["graph"](model, recorded.machine(monkeypatch)), ENGINES["eager"](model, HOST)
    for batch, seed in ((2, 1), (1, 2), (2, 3)):
        prompt = random_prompt(batch, 6, seed)
        assert torch.equal(greedy_tokens(engine, prompt, 8), greedy_tokens(eager, prompt, 8))
    assert len(captured) == captures


@pytest.mark.slow
@pytest.mark.parametrize(("room", "left", "made"), [(9, 4, 4), (5, 2, 5), (0, 1, 5)])
def test_caches_of_compiled_code_are_freed_the_oldest_first(
    room: int, left: int, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are 1, 2, 3, 4 and 1 again; the tokens are always those of eager.

    A sequence of 12 slots takes 2 layers x 2 x 2 heads x 12 x 16 x 4 = 6,144 bytes. Next to the current batch there is
    room for 9, 5 or no sequences. With room for 5, the first batch is freed for the fourth. The second and third are
    freed for the first again, so 4 sequences remain.
    """
    compiler, static = torch.compile, transformers.static_cache
    caches: list[weakref.ref[Any]] = []

    def tracked(model: Any, slots: int) -> Any:
        cache = static(model, slots)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(torch, "compile", lambda step, **_: compiler(step, backend="eager"))
    monkeypatch.setattr(transformers, "static_cache", tracked)
    model, machine = small_model("Mistral"), small()
    monkeypatch.setattr(machine, "available_bytes", lambda: round((room + 0.5) * 6144 / 0.05))
    engine, eager = ENGINES["compile"](model, machine), ENGINES["eager"](model, HOST)
    for batch in (1, 2, 3, 4, 1):
        prompt = random_prompt(batch, 4, seed=batch)
        assert torch.equal(greedy_tokens(engine, prompt, 8), greedy_tokens(eager, prompt, 8))
    gc.collect()
    assert len(caches) == made
    assert sum(cache() is not None for cache in caches) == left
    assert engine.kept_bytes == {9: 9, 5: 4, 0: 0}[room] * 6144


def test_a_recorded_graph_cannot_replay_a_moving_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host counts the position of the window. A replay does not: on a GPU it would write outside the cache."""
    model, prompt = small_model("Mistral"), random_prompt(2, 10)
    engine = ENGINES["graph"](model, recorded.machine(monkeypatch))
    within_16_slots = greedy_tokens(engine, prompt, 6)
    assert torch.equal(within_16_slots, tokens_of_generate(model, prompt, 6)), "the window need not move"
    with pytest.raises(CaptureError, match="the host moves a window within 22 tokens"):
        greedy_tokens(engine, prompt, 12)


@pytest.mark.parametrize("kind", ["Mistral", "Gemma2", "DeepseekV2"])
@pytest.mark.parametrize("name", ["eager", "static"])
def test_windows_and_latents_past_their_edge(kind: str, name: str) -> None:
    """20 tokens and 8 more cross a window of 16 in the prefill; 10 and 12 more cross it while decoding."""
    model = small_model(kind)
    engine = ENGINES[name](model, HOST)
    for prompt_len, new_tokens in ((20, 8), (10, 12)):
        prompt = random_prompt(2, prompt_len)
        tokens = greedy_tokens(engine, prompt, new_tokens)
        assert torch.equal(tokens, tokens_of_generate(model, prompt, new_tokens))
    check_filled(engine, lambda layer: layer.keys)


def check_filled(engine: Engine, keys_of: Callable[[Any], torch.Tensor]) -> None:
    """Check that a cache that is filled with 30 tokens is as large as one of a prefill, then and three steps later."""
    with torch.inference_mode():
        filled, prefilled = engine.fill(2, 30, 40), engine.prefill(torch.zeros(2, 30, dtype=torch.long), 40)
        for tokens in (30, 31, 32, 33):
            shapes = [[keys_of(layer).shape for layer in state.cache.layers] for state in (filled, prefilled)]
            assert shapes[0] == shapes[1]
            assert [int(state.cache.get_seq_length()) for state in (filled, prefilled)] == [tokens, tokens]
            filled, prefilled = engine.decode(filled), engine.decode(prefilled)


@pytest.mark.slow
def test_graph_breaks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fully compiled step has none; a layer that cannot be compiled makes some, and two layers more."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))

    def breaks(broken: int) -> int:
        model = small_model("Mistral")
        for layer in model.model.layers[:broken]:
            layer.mlp.forward = torch._dynamo.disable(layer.mlp.forward)
        engine: Any = ENGINES["compile"](model, HOST)
        with torch.inference_mode():
            engine.prepare(1, 12)
        return int(engine.graph_breaks)

    counts = [breaks(broken) for broken in (0, 1, 2)]
    assert counts[0] == 0 < counts[1] < counts[2]


def test_graphs_are_refused_with_a_moving_window() -> None:
    config = load_config(resolve("mistral-7b-v0.1"))
    with pytest.raises(RequestError, match="a window of 4096 tokens within 5000"):
        check_engine("graph", make_grid([4992], [1], 8), config, on_cuda=True)
    check_engine("graph", make_grid([4088], [1], 8), config, on_cuda=True)


def test_the_names_of_engines_are_those_that_exist() -> None:
    assert {*ENGINE_NAMES, *CACHES.values(), "padded"} == {*ENGINES, *OWNING}


LENS = (3, 12, 7)
NEW = 6
GPT2 = GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=128, initializer_range=0.5)


@pytest.mark.parametrize(
    "model",
    [small_model("Llama"), small_model("Mistral", sliding_window=8), GPT2LMHeadModel(GPT2).eval()],
    ids=lambda model: model.config.model_type,
)
def test_a_padded_batch_has_the_tokens_of_each_prompt_and_masks_a_filled_cache(model: Any) -> None:
    cell = Cell(len(LENS), max(LENS), NEW, engine="padded")
    padded = PaddedEngine(model, HOST, {cell: tuple(Request(length, NEW) for length in LENS)}.get)
    padded.announce(cell, 0)
    prompts = [torch.randint(1, 64, (1, length)) for length in LENS]
    ids = torch.full((len(LENS), max(LENS)), 63)
    for row, prompt in enumerate(prompts):
        ids[row, max(LENS) - LENS[row] :] = prompt
    with torch.inference_mode():
        tokens = padded.call(ids, NEW, lambda: None)
        singles = [EagerEngine(model, HOST).call(prompt, NEW, lambda: None) for prompt in prompts]
        # Without the mask the short prompts give other tokens, so the mask is effective.
        unmasked = EagerEngine(model, HOST).call(ids, NEW, lambda: None)
        filled = padded.fill(len(LENS), 15, 20)
        assert padded.decode(filled).mask_BS.shape == (3, 16)
    assert torch.equal(tokens, torch.cat(singles))
    assert not torch.equal(unmasked, tokens)
    assert filled.mask_BS.sum(-1).tolist() == [15 - (12 - length) for length in LENS]


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model("Llama", hidden_size=256, intermediate_size=256)


@pytest.mark.parametrize("backend", CACHE_FORMATS)
def test_a_quantised_cache_has_the_tokens_of_generate_on_the_same_one(model: Any, backend: str) -> None:
    engine, prompt = ENGINES[CACHES[backend]](model, HOST), random_prompt(2, 20)
    try:
        tokens = greedy_tokens(engine, prompt, 8)
    except RequestError as error:
        pytest.skip(str(error))
    cache = QuantizedCache(backend, model.config)
    assert torch.equal(tokens, tokens_of_generate(model, prompt, 8, past_key_values=cache))
    check_filled(engine, lambda layer: layer._dequantize(layer._quantized_keys))


def test_a_cache_is_an_engine(model: Any) -> None:
    assert engines_of_caches(["eager"], [], model.config) == ["eager"]
    assert engines_of_caches(["eager"], ["dynamic", "fp8"], model.config) == ["eager", "fp8-cache"]
    assert engines_of_caches(["eager"], ["quantized"], model.config) == ["fp8-cache"]
    with pytest.raises(RequestError, match="--cache works only with --engine eager, not graph"):
        engines_of_caches(["graph"], ["fp8"], model.config)


WINDOW = 16


class Capturing(Machine):
    """This CPU, as if it captured graphs."""

    captures = True


@dataclass
class Recorded:
    """The mode of each compilation, and all inputs that are numbers instead of tensors."""

    skips: int = 0
    """Skipped CUDA graphs per compilation."""
    compilations: list[str] = field(default_factory=list)
    numbers: list[object] = field(default_factory=list)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Replace inductor, and CUDA graphs in the mode that records them."""
    record = Recorded()
    compile_for_real = torch.compile

    def compile_(function: Callable[..., Any], mode: str | None = None, dynamic: bool | None = None) -> Any:
        def backend(module: Any, inputs: Any) -> Any:
            record.compilations.append(mode or "default")
            # As inductor counts a piece that it runs without a CUDA graph (torch/_inductor/compile_fx.py).
            torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] += record.skips
            record.numbers += [each for each in inputs if not isinstance(each, torch.Tensor)]
            return module.forward

        return compile_for_real(function, backend=backend, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", compile_)
    return record


def _repetitions(engine: CompileEngine, prompt: int, slots: int, repetitions: int = 2) -> None:
    with torch.inference_mode():
        for _ in range(repetitions):
            engine.prepare(2, slots)
            state = engine.prefill(torch.ones(2, prompt, dtype=torch.long), slots)
            for _ in range(6):
                state = engine.decode(state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "slots", "mode", "pieces"),
    [
        ("Llama", WINDOW, "reduce-overhead", 1), ("Mistral", WINDOW, "reduce-overhead", 1),
        ("Mixtral", WINDOW, "reduce-overhead", None), ("Mistral", WINDOW + 8, "default", None),
    ],
)  # fmt: skip
def test_a_shape_is_compiled_once_and_no_position_is_an_input(
    kind: str, slots: int, mode: str, pieces: int | None, compiled: Recorded
) -> None:
    """A number that changes would be one more CUDA graph each time; for a moving window nothing is captured."""
    engine = CompileEngine(small_model(kind), Capturing(CPU))
    _repetitions(engine, prompt=slots - 10, slots=slots, repetitions=1)
    first = len(compiled.compilations)
    assert pieces in (None, first)
    assert set(compiled.compilations) == {mode}
    assert compiled.numbers == [] or slots > WINDOW
    for prompt in (slots - 10, slots - 12):
        _repetitions(engine, prompt=prompt, slots=slots)
        assert len(compiled.compilations) == first, "later repetitions and other depths reuse the compiled code"


@pytest.mark.slow
@pytest.mark.parametrize("skips", [0, 1])
def test_every_shape_is_compiled_by_itself_and_pieces_without_a_cuda_graph_count(
    skips: int, compiled: Recorded
) -> None:
    """By default, torch makes sizes symbolic inputs of the compiled code from the second shape on.

    The user's limit of one recompilation does not count for them, and holds again for the user's own functions.
    """
    compiled.skips, config = skips, cast(Any, torch._dynamo.config)
    with config.patch(recompile_limit=1, fail_on_recompile_limit_hit=False):
        engine = CompileEngine(small_model("Llama"), Capturing(CPU))
        for slots in (16, 24, 32):
            _repetitions(engine, prompt=6, slots=slots, repetitions=1)
        assert (config.recompile_limit, config.fail_on_recompile_limit_hit) == (1, False)
    assert engine.graph_skips == skips * len(compiled.compilations) == 3 * skips
    assert len(compiled.compilations) == 3
    assert compiled.numbers == []
