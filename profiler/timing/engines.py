"""Engines: how a model is stepped. Each prefills a batch of prompts and then decodes one token a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from profiler.errors import RequestError, first_line
from profiler.kineto import recorded

_WARM_STEPS = 3
"""Decode steps before a capture or after a compilation: kernels are chosen and workspaces taken in the first ones."""

_COMPILED_REGION = "Torch-Compiled Region"
"""What torch's profiler calls each entry into compiled code (torch/_dynamo/convert_frame.py)."""


@dataclass
class DecodeState:
    """What one decode step hands to the next; stays on the device."""

    cache: Any
    token_B1: torch.Tensor  # noqa: N815  shape suffix: [batch, 1], the last greedy token


class Engine(Protocol):
    """One way to run a causal LM. `slots` is the number of tokens that a cache will have to hold."""

    name: str
    cache: Literal["dynamic", "static"]
    keeps_last_logits: bool
    """Whether the LM head runs on the last position alone in a prefill."""

    def prepare(self, batch: int, slots: int) -> None:
        """Do once what this shape needs before it can be timed: compile, capture."""

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        """Run the prompts [batch, tokens] and give the state with the first new token."""

    def fill(self, batch: int, context: int, slots: int) -> DecodeState:
        """A state `context` tokens deep without the prefill for it: its cache holds random keys and values."""

    def decode(self, state: DecodeState) -> DecodeState:
        """Run one step: one new token for each sequence."""


class EagerEngine:
    """transformers as it comes: eager dispatch and the cache that the model makes for itself (DynamicCache)."""

    name = "eager"
    cache: Literal["dynamic", "static"] = "dynamic"

    def __init__(self, model: Any) -> None:
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        self.keeps_last_logits = "logits_to_keep" in parameters
        self._prefill_options = {"logits_to_keep": 1} if self.keeps_last_logits else {}

    def prepare(self, batch: int, slots: int) -> None:
        return None

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        return self._prefill(ids_BS, None)

    def fill(self, batch: int, context: int, slots: int) -> DecodeState:
        ids = torch.zeros(batch, 1, dtype=torch.long, device=self._model.device)
        state = self.prefill(ids, slots)
        _deepen(state.cache, context)
        return state

    def decode(self, state: DecodeState) -> DecodeState:
        output = self._model(input_ids=state.token_B1, past_key_values=state.cache, use_cache=True)
        return DecodeState(_cache(output), _greedy(output))

    def _prefill(self, ids_BS: torch.Tensor, cache: Any) -> DecodeState:  # noqa: N803
        given = {} if cache is None else {"past_key_values": cache}
        output = self._model(input_ids=ids_BS, use_cache=True, **given, **self._prefill_options)
        return DecodeState(_cache(output), _greedy(output))


class StaticEngine(EagerEngine):
    """Eager dispatch on transformers' StaticCache: one buffer of all slots, written in place and read to its end."""

    name = "static"
    cache: Literal["dynamic", "static"] = "static"

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        return self._prefill(ids_BS, self._slots(ids_BS.shape[0], slots))

    def _slots(self, batch: int, slots: int) -> Any:
        """An empty cache for this shape."""
        return static_cache(self._model, slots)


class CompileEngine(StaticEngine):
    """torch.compile of the decode step on a static cache; prefills stay eager, as in transformers' `generate`.

    On CUDA in the mode `reduce-overhead`, which is what `generate` compiles with: fused kernels, replayed as a graph.
    """

    name = "compile"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        torch._dynamo.reset()  # compiled code is kept by function, not by model: nothing of another engine may stay
        # Past the limit of recompilations torch would run the step uncompiled without a word.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        mode = "reduce-overhead" if model.device.type == "cuda" else None
        self._step: Callable[[torch.Tensor, Any], torch.Tensor] = torch.compile(self._token, mode=mode)
        self._caches: dict[tuple[int, int], Any] = {}
        self.graph_breaks = 0
        """How often a step leaves its compiled code for Python and comes back; 0 is one whole graph."""

    def prepare(self, batch: int, slots: int) -> None:
        """Compile for this shape; its cache is kept, because the compiled code holds its address."""
        if (batch, slots) in self._caches:
            return
        self._caches[batch, slots] = static_cache(self._model, slots)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 + 2 * len(self._caches))
        try:
            state = self.prefill(torch.zeros(batch, 1, dtype=torch.long, device=self._model.device), slots)
            for _ in range(_WARM_STEPS):
                state = self.decode(state)
            self.graph_breaks = max(self.graph_breaks, self._pieces(state) - 1)
        except Exception:
            del self._caches[batch, slots]
            raise

    def _pieces(self, state: DecodeState) -> int:
        """Compiled pieces that one step enters. One break in a layer makes several: every caller of it is split too."""
        with recorded(cuda=False) as profile:
            self.decode(state)
        return sum(event.name.startswith(_COMPILED_REGION) for event in profile.events())

    def decode(self, state: DecodeState) -> DecodeState:
        torch.compiler.cudagraph_mark_step_begin()
        # A graph's output lives in the graph's own memory, which the next replay overwrites.
        return DecodeState(state.cache, self._step(state.token_B1, state.cache).clone())

    def _slots(self, batch: int, slots: int) -> Any:
        cache = self._caches[batch, slots]
        cache.reset()
        return cache

    def _token(self, token_B1: torch.Tensor, cache: Any) -> torch.Tensor:  # noqa: N803
        return _greedy(self._model(input_ids=token_B1, past_key_values=cache, use_cache=True))


class GraphEngine(StaticEngine):
    """The decode step captured once as a CUDA graph: the host submits one launch a step instead of hundreds."""

    name = "graph"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._shape: tuple[int, int] | None = None
        self._graph: Any = None
        self._kept: Any = None
        self._token_B1 = torch.empty(0)

    def prepare(self, batch: int, slots: int) -> None:
        """Capture the step of this shape. Raises RequestError when the model's step cannot be captured."""
        if self._shape == (batch, slots):
            return
        self._shape = self._graph = self._kept = None
        self._kept = unwindowed(static_cache(self._model, slots), slots)
        self._token_B1 = torch.zeros(batch, 1, dtype=torch.long, device=self._model.device)
        self._prefill(self._token_B1, self._kept)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_STEPS):
                self._advance()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._advance()
        except RuntimeError as error:
            raise RequestError(f"the decode step cannot be captured as a CUDA graph: {first_line(error)}.") from error
        self._shape, self._graph = (batch, slots), graph

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        state = super().prefill(ids_BS, slots)
        self._token_B1.copy_(state.token_B1)
        return DecodeState(state.cache, self._token_B1)

    def decode(self, state: DecodeState) -> DecodeState:
        self._graph.replay()
        return state

    def _slots(self, batch: int, slots: int) -> Any:
        self._kept.reset()
        return self._kept

    def _advance(self) -> None:
        output = self._model(input_ids=self._token_B1, past_key_values=self._kept, use_cache=True)
        self._token_B1.copy_(_greedy(output))


ENGINES: dict[str, Callable[[Any], Engine]] = {
    engine.name: engine for engine in (EagerEngine, StaticEngine, CompileEngine, GraphEngine)
}


def check_engine(name: str, device: torch.device, config: Any, longest_context: int) -> None:
    """Refuse an engine that cannot work here, before anything is loaded. Raises RequestError."""
    if name not in ENGINES:
        raise RequestError(f"--engine {name!r} is unknown; use {', '.join(ENGINES)}, or several: eager,static.")
    if name != GraphEngine.name:
        return
    if device.type != "cuda":
        raise RequestError(
            "--engine graph captures CUDA graphs, and this device is a CPU; use eager, static or compile."
        )
    window = getattr(config.get_text_config(), "sliding_window", None)
    if window is not None and window < longest_context and getattr(config, "use_sliding_window", True):
        raise RequestError(
            f"--engine graph: a window of {window} tokens moves within {longest_context}, steered by the host,"
            " which no graph can hold; use static or compile, or shorter prompts."
        )


def greedy_tokens(engine: Engine, ids_BS: torch.Tensor, new_tokens: int) -> torch.Tensor:  # noqa: N803
    """`new_tokens` greedy tokens for each prompt, [batch, new_tokens], through the same calls that are timed."""
    batch, prompt = ids_BS.shape
    with torch.inference_mode():
        engine.prepare(batch, prompt + new_tokens)
        state = engine.prefill(ids_BS, prompt + new_tokens)
        tokens = [state.token_B1.clone()]
        for _ in range(new_tokens - 1):
            state = engine.decode(state)
            tokens.append(state.token_B1.clone())
    return torch.cat(tokens, dim=1)


def static_cache(model: Any, slots: int) -> Any:
    """transformers' StaticCache for this model. Raises RequestError for a model that it does not serve."""
    from transformers import StaticCache

    try:
        return StaticCache(config=model.config, max_cache_len=slots)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise RequestError(f"this model has no static cache in transformers: {first_line(error)}.") from error


def unwindowed(cache: Any, slots: int) -> Any:
    """The same cache of `slots` tokens with plain layers where a window is as long as the cache.

    A windowed layer counts its tokens on the host (cache_utils.py, `StaticSlidingWindowLayer.cumulative_length_int`),
    which a captured graph cannot replay; a window that never moves needs no such layer.
    """
    from transformers.cache_utils import StaticLayer

    cache.layers = [
        StaticLayer(max_cache_len=slots) if layer.is_sliding and layer.max_cache_len == slots else layer
        for layer in cache.layers
    ]
    return cache


def _deepen(cache: Any, context: int) -> None:
    """Let a cache that holds one token hold `context` random ones; recurrent states have no depth and stay.

    Raises RequestError for a cache that is not made of layers.
    """
    if not hasattr(cache, "layers"):
        raise RequestError("this model's cache cannot be filled directly; use --prompt-lens instead of --context-lens.")
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor) or keys.dim() != 4:
            continue
        if getattr(layer, "max_cache_len", None):
            held = min(context, layer.max_cache_len)
            keys[:, :, :held].normal_()
            values[:, :, :held].normal_()
            layer.cumulative_length.fill_(context)
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = context
            continue
        window = getattr(layer, "sliding_window", None)
        held = context if window is None else min(context, window - 1)
        layer.keys, layer.values = _random_like(keys, held), _random_like(values, held)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = context


def _random_like(held_BHSD: torch.Tensor, tokens: int) -> torch.Tensor:  # noqa: N803
    batch, heads, _, width = held_BHSD.shape
    return torch.randn(batch, heads, tokens, width, dtype=held_BHSD.dtype, device=held_BHSD.device)


def _cache(output: Any) -> Any:
    """The cache a model hands back: `past_key_values`, or the state of a recurrent model."""
    cache = getattr(output, "past_key_values", None)
    return cache if cache is not None else getattr(output, "cache_params", None)


def _greedy(output: Any) -> torch.Tensor:
    tokens: torch.Tensor = output.logits[:, -1:].argmax(dim=-1)
    return tokens
