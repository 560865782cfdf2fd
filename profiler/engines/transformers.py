"""Engines that step a transformers model: eager, static cache, CUDA graph, compiled, generate, padded."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from profiler.device.machine import Machine, Recording, recorded
from profiler.device.memory import block_bytes, storage_bytes
from profiler.engines.base import DecodeState, Engine
from profiler.engines.caches import deepen, greedy_token, moving_window, quantized_cache, static_cache, unwindowed
from profiler.errors import CaptureError, RequestError
from profiler.facts.cache_format import CacheFormat
from profiler.grid.cells import Cell
from profiler.grid.ragged import PADDED_ENGINE, Batch
from profiler.loading.cache_argument import argument_name, cache_of, keeps_last_logits

_WARM_STEPS = 3
"""Decode steps before a capture or after a compilation; the first ones select kernels and allocate workspaces."""

_KEPT_SHARE = 0.05
"""Share of free memory for the caches of other shapes' graphs and compiled code; predictions of peak memory are no
more precise. Shapes beyond it are captured or prepared again at every repetition."""


class EagerEngine(Engine):
    """transformers without changes: eager launches and the model's default cache (DynamicCache)."""

    name: ClassVar[str] = "eager"

    def __init__(self, model: Any, machine: Machine) -> None:
        self._model = model
        self._machine = machine
        self._cache_name = argument_name(model)
        self.keeps_last_logits = keeps_last_logits(model)
        self._prefill_options = {"logits_to_keep": 1} if self.keeps_last_logits else {}

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        return self._prefill(ids_BS, self._slots(ids_BS.shape[0], slots))

    def fill(self, batch: int, context: int, slots: int) -> DecodeState:
        # The sequences differ, since a router would send equal ones to the same experts.
        ids = torch.arange(batch, device=self._model.device)[:, None] % self._model.config.get_text_config().vocab_size
        state = self.prefill(ids, slots)
        deepen(state.cache, context)
        return state

    def decode(self, state: DecodeState) -> DecodeState:
        output = self._model(input_ids=state.token_B1, use_cache=True, **{self._cache_name: state.cache})
        return DecodeState(cache_of(output), greedy_token(output))

    def call(self, ids_BS: torch.Tensor, new_tokens: int, mark: Callable[[], object]) -> torch.Tensor:  # noqa: N803
        slots = ids_BS.shape[1] + new_tokens
        self.prepare(ids_BS.shape[0], slots)
        mark()
        state = self.prefill(ids_BS, slots)
        mark()
        tokens = [state.token_B1.clone()]
        for _ in range(new_tokens - 1):
            state = self.decode(state)
            mark()
            tokens.append(state.token_B1.clone())
        return torch.cat(tokens, dim=1)

    def _slots(self, batch: int, slots: int) -> Any:
        """Return an empty cache for this shape; None for the model's default."""
        return None

    def _prefill(self, ids_BS: torch.Tensor, cache: Any) -> DecodeState:  # noqa: N803
        caches = {} if cache is None else {self._cache_name: cache}
        output = self._model(input_ids=ids_BS, use_cache=True, **caches, **self._prefill_options)
        return DecodeState(cache_of(output), greedy_token(output))


class StaticEngine(EagerEngine):
    """Eager launches on transformers' StaticCache: one buffer of all slots, written in place and read to its end."""

    name = "static"
    cache = "static"

    def _slots(self, batch: int, slots: int) -> Any:
        return static_cache(self._model, slots)


class QuantizedEngine(EagerEngine):
    """Eager launches on transformers' QuantizedCache, which converts the whole cache in every step."""

    cache = "quantized"
    cache_format: ClassVar[CacheFormat]

    def _slots(self, batch: int, slots: int) -> Any:
        return quantized_cache(self._model.config, self.cache_format)


class CompileEngine(StaticEngine):
    """torch.compile of the decode step on a static cache; prefills stay eager, as in transformers' `generate`.

    On CUDA the mode is `reduce-overhead`, as there: replayed as a graph. Every shape is compiled as a static one, as
    for a user with only that shape; from the second on, torch would make sizes symbolic.
    """

    name = "compile"
    hookable = False
    keeps_cache = True
    eager_phases = ("prefill",)

    def __init__(self, model: Any, machine: Machine) -> None:
        super().__init__(model, machine)
        torch._dynamo.reset()  # compiled code is cached by function, not by model: drop that of other engines
        self._compiled: Callable[..., torch.Tensor] = torch.compile(
            self._token, dynamic=False, mode="reduce-overhead" if machine.captures else None
        )
        # The host counts the position of a moving window; that number must be neither compiled in nor captured. The
        # step has a function of its own there, since torch caches compiled code by function.
        self._compiled_moving: Callable[..., torch.Tensor] = torch.compile(lambda *step: self._token(*step))
        self._caches: dict[tuple[int, int], Any] = {}
        """By shape, the latest last."""
        self._prepared = 0
        self.graph_breaks: int = 0
        self.graph_skips: int | None = 0 if machine.captures else None

    def prepare(self, batch: int, slots: int) -> None:
        """Compile for this shape, whose cache's address is in the code; other caches are kept within _KEPT_SHARE."""
        cache = self._caches.pop((batch, slots), None)
        while self.held_bytes > _KEPT_SHARE * self._machine.available_bytes():
            del self._caches[next(iter(self._caches))]
        self.kept_bytes = self.held_bytes
        if cache is not None:
            self._caches[batch, slots] = cache
            return
        self._caches[batch, slots] = unwindowed(static_cache(self._model, slots), slots)
        self._prepared += 1
        skips_before = _graph_skips()
        try:
            with self._never_uncompiled():
                state = self.prefill(torch.zeros(batch, 1, dtype=torch.long, device=self._model.device), slots)
                for _ in range(_WARM_STEPS):
                    state = self.decode(state)
                with recorded(cuda=False) as profile:
                    self.decode(state)
                # Each entry into compiled code has this name (torch/_dynamo/convert_frame.py). A break in a layer makes
                # several compiled pieces, since it splits its callers too.
                pieces = sum(event.name.startswith("Torch-Compiled Region") for event in profile.events())
                self.graph_breaks = max(self.graph_breaks, pieces - 1)
            if self.graph_skips is not None:
                self.graph_skips += _graph_skips() - skips_before
        except Exception:
            del self._caches[batch, slots]
            raise

    @property
    def held_bytes(self) -> int:
        return sum(map(_bytes_of, self._caches.values()))

    def decode(self, state: DecodeState) -> DecodeState:
        torch.compiler.cudagraph_mark_step_begin()
        if moving_window(state.cache):  # whose code may be compiled again when it is full
            with self._never_uncompiled():
                token_B1 = self._compiled_moving(state.token_B1, state.cache)  # noqa: N806
        else:
            token_B1 = self._compiled(state.token_B1, state.cache)  # noqa: N806
        # A graph's output is in the graph's memory, which the next replay overwrites.
        return DecodeState(state.cache, token_B1.clone())

    def _never_uncompiled(self) -> AbstractContextManager[None]:
        """A context in which all shapes may be compiled; beyond it torch raises instead of running uncompiled."""
        config: Any = torch._dynamo.config
        limit = max(config.recompile_limit, 8 + 2 * self._prepared)
        patch: AbstractContextManager[None] = config.patch(fail_on_recompile_limit_hit=True, recompile_limit=limit)
        return patch

    def _slots(self, batch: int, slots: int) -> Any:
        cache = self._caches[batch, slots]
        cache.reset()
        return cache

    def _token(self, token_B1: torch.Tensor, cache: Any) -> torch.Tensor:  # noqa: N803
        return greedy_token(self._model(input_ids=token_B1, use_cache=True, **{self._cache_name: cache}))


def _graph_skips() -> int:
    """Number of compiled pieces in this process that inductor runs without a CUDA graph; it logs the reasons."""
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])


def _bytes_of(cache: Any) -> int:
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(block_bytes(storage_bytes([tensor])) for tensor in tensors)


@dataclass(frozen=True)
class _Recorded:
    state: DecodeState
    """The memory that the graph reads and writes."""
    replay: Recording


class GraphEngine(StaticEngine):
    """The decode step as a CUDA graph: one launch. Graphs of other shapes stay within _KEPT_SHARE of free memory."""

    name = "graph"
    hookable = False
    replays_as_graph = True
    keeps_cache = True

    def __init__(self, model: Any, machine: Machine) -> None:
        super().__init__(model, machine)
        self._shape: tuple[int, int] | None = None
        self._recorded: dict[tuple[int, int], _Recorded] = {}

    @property
    def held_bytes(self) -> int:
        return sum(_bytes_of(step.state.cache) for step in self._recorded.values())

    def prepare(self, batch: int, slots: int) -> None:
        """Capture the step of this shape. Raises CaptureError if the model's step cannot be captured."""
        shape = batch, slots
        if self._shape == shape:
            return
        # A graph's pool has a workspace of cuBLAS: 8 MiB, 32 on Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp).
        held_bytes = self.held_bytes + sum(step.replay.pool_bytes for step in self._recorded.values())
        if self._shape and held_bytes > _KEPT_SHARE * self._machine.available_bytes():
            del self._recorded[self._shape]
        self._shape = None
        if shape not in self._recorded:
            self._recorded[shape] = self._record(batch, slots)
        step = self._recorded[shape]
        self.kept_bytes = self.held_bytes - _bytes_of(step.state.cache) - step.replay.workspace_bytes
        self._shape = shape

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        state = self._current.state
        state.token_B1.copy_(super().prefill(ids_BS, slots).token_B1)
        return state

    def decode(self, state: DecodeState) -> DecodeState:
        self._current.replay()
        return state

    @property
    def _current(self) -> _Recorded:
        assert self._shape is not None, "prepare() captures the step"
        return self._recorded[self._shape]

    def _record(self, batch: int, slots: int) -> _Recorded:
        cache = unwindowed(static_cache(self._model, slots), slots)
        if moving_window(cache):
            # Replayed past its edge, the graph would write outside the cache, and the device would be lost.
            raise CaptureError(f"the host moves a window within {slots} tokens, which a CUDA graph cannot replay.")
        state = DecodeState(cache, torch.zeros(batch, 1, dtype=torch.long, device=self._model.device))
        self._prefill(state.token_B1, cache)
        decode_eagerly = super().decode

        def step() -> None:
            state.token_B1.copy_(decode_eagerly(state).token_B1)

        with self._machine.on_side_stream():
            for _ in range(_WARM_STEPS):
                step()
        return _Recorded(state, self._machine.capture(step))

    def _slots(self, batch: int, slots: int) -> Any:
        cache = self._current.state.cache
        cache.reset()
        return cache


def greedy_tokens(model: Any, ids_BS: torch.Tensor, new_tokens: int, **options: Any) -> torch.Tensor:  # noqa: N803
    """Return the new tokens [batch, new] of a greedy `generate`; `options` are further arguments of it."""
    tokens = model.generate(
        ids_BS,
        attention_mask=torch.ones_like(ids_BS),
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
        **options,
    )
    return tokens[:, ids_BS.shape[1] :]


def unreached_end(model: Any) -> dict[str, int]:
    """Return an end that is checked at every step, as usual, but never reached, since no model has this token."""
    return {"eos_token_id": model.config.get_text_config().vocab_size}


class GenerateEngine(EagerEngine):
    """`model.generate`, greedy, with its checks, masks and copies; single steps are those of the eager engine."""

    name = "generate"
    hookable = False
    whole_calls = True
    calls_generate = True

    def call(
        self,
        ids_BS: torch.Tensor,  # noqa: N803
        new_tokens: int,
        mark: Callable[[], object],
        streamer: Any = None,
    ) -> torch.Tensor:
        forwards = 0

        def count(_module: object, _inputs: object) -> None:
            nonlocal forwards
            forwards += 1
            if forwards > 1:
                mark()

        with self._model.register_forward_pre_hook(count):
            mark()
            tokens = greedy_tokens(self._model, ids_BS, new_tokens, **unreached_end(self._model), streamer=streamer)
        mark()
        if forwards != new_tokens:
            raise RuntimeError(f"generate ran {forwards} forwards for {new_tokens} tokens")
        return tokens


@dataclass
class PaddedState(DecodeState):
    mask_BS: torch.Tensor  # noqa: N815  [batch, cached], 0 at padding
    position_B1: torch.Tensor  # noqa: N815  [batch, 1], of the last token


class PaddedEngine(EagerEngine):
    """Eager steps with a mask and position ids, as in `generate`; in shapes not announced one prompt is halved."""

    name = PADDED_ENGINE
    pads = True

    def __init__(self, model: Any, machine: Machine, batch_of: Callable[[Cell], Batch | None] | None = None) -> None:
        super().__init__(model, machine)
        parameters = inspect.signature(model.forward).parameters
        if "attention_mask" not in parameters:
            raise RequestError(f"{type(model).__name__} takes no attention mask, so its prompts cannot be padded.")
        self._takes_positions = "position_ids" in parameters
        self._batch_of = batch_of
        self._lens: tuple[int, ...] = ()

    def announce(self, cell: Cell, steps: int) -> None:
        batch = self._batch_of(cell) if self._batch_of else None
        self._lens = tuple(request.prompt_len for request in batch or ())

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> PaddedState:  # noqa: N803
        mask_BS = self._mask(*ids_BS.shape)  # noqa: N806
        position_BS = (mask_BS.cumsum(-1) - 1).clamp(min=0)  # noqa: N806
        return self._step(ids_BS, mask_BS, position_BS, self._prefill_options)

    def fill(self, batch: int, context: int, slots: int) -> PaddedState:
        state = super().fill(batch, 1, slots)
        deepen(state.cache, context)
        mask_BS = self._mask(batch, max(1, *self._lens) if len(self._lens) == batch else context)  # noqa: N806
        mask_BS = torch.cat([mask_BS, mask_BS.new_ones(batch, max(0, context - mask_BS.shape[1]))], dim=1)  # noqa: N806
        return PaddedState(state.cache, state.token_B1, mask_BS[:, :context], mask_BS.sum(-1, keepdim=True) - 1)

    def decode(self, state: DecodeState) -> PaddedState:
        assert isinstance(state, PaddedState)
        mask_BS = torch.cat([state.mask_BS, state.mask_BS.new_ones(state.mask_BS.shape[0], 1)], dim=1)  # noqa: N806
        return self._step(state.token_B1, mask_BS, state.position_B1 + 1, {self._cache_name: state.cache})

    def _step(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, options: Mapping[str, Any]
    ) -> PaddedState:
        at = {"position_ids": positions} if self._takes_positions else {}
        output = self._model(input_ids=ids, attention_mask=mask, use_cache=True, **options, **at)
        return PaddedState(cache_of(output), greedy_token(output), mask, positions[:, -1:])

    def _mask(self, batch: int, tokens: int) -> torch.Tensor:
        """1 where a prompt of [batch, tokens] has a token, 0 where it is padded."""
        announced = len(self._lens) == batch and max(self._lens) == tokens
        lens = self._lens if announced else (tokens - tokens // 2, *[tokens] * (batch - 1))
        device = self._model.device
        padding_B1 = tokens - torch.tensor(lens, device=device)[:, None]  # noqa: N806
        return (torch.arange(tokens, device=device)[None, :] >= padding_B1).long()
