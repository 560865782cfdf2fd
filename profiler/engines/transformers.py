"""Engines that step a transformers model: eager, static cache, CUDA graph, compiled, generate, tensor parallel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import torch

from profiler.device.machine import Machine
from profiler.device.memory import storage_bytes
from profiler.device.process_group import ProcessGroup
from profiler.device.torch_profiler import recorded
from profiler.engines.base import DecodeState
from profiler.engines.caches import deepen, greedy_token, moving_window, static_cache, unwindowed
from profiler.facts.scheduler import OwnedModel, Scheduled
from profiler.grid.cells import PHASES, Cell, Phase
from profiler.loading.cache_argument import argument_name, cache_of

StepFunction = Callable[[torch.Tensor, Any], torch.Tensor]

_WARM_STEPS = 3
"""Decode steps before a capture or after a compilation: kernels are chosen and workspaces taken in the first ones."""

_KEPT_SHARE = 0.05
"""Of free memory that graphs and compiled code of other shapes may hold with their caches: what a prediction of a
cell's need is unsure of. Those that need more are captured, or prepared, anew at every visit."""

_COMPILED_REGION = "Torch-Compiled Region"
"""What torch's profiler calls each entry into compiled code (torch/_dynamo/convert_frame.py)."""


class EagerEngine:
    """transformers as it comes: eager dispatch and the cache that the model makes for itself (DynamicCache)."""

    name: ClassVar[str] = "eager"
    cache: ClassVar[Literal["dynamic", "static", "paged"]] = "dynamic"
    hookable: ClassVar[bool] = True
    eager_phases: ClassVar[tuple[Phase, ...]] = PHASES
    replays_as_graph: ClassVar[bool] = False
    keeps_cache: ClassVar[bool] = False
    owns_model: ClassVar[bool] = False
    pads: ClassVar[bool] = False
    whole_calls: ClassVar[bool] = False
    taxes: ClassVar[bool] = False
    kept_bytes: int = 0
    beside: Sequence[int] = ()
    graph_breaks: int | None = None
    graph_skips: int | None = None
    owned: OwnedModel | None = None
    scheduled: tuple[Scheduled, ...] = ()
    cache_used_bytes: int | None = None

    def __init__(self, model: Any, machine: Machine) -> None:
        self._model = model
        self._machine = machine
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = argument_name(model)
        self.keeps_last_logits = "logits_to_keep" in parameters
        self._prefill_options = {"logits_to_keep": 1} if self.keeps_last_logits else {}

    def prepare(self, batch: int, slots: int) -> None:
        return None

    def announce(self, cell: Cell, steps: int | None) -> None:
        return None

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        return self._prefill(ids_BS, None)

    def fill(self, batch: int, context: int, slots: int) -> DecodeState:
        # Sequences that differ: a router would send equal ones to the same experts.
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

    def _prefill(self, ids_BS: torch.Tensor, cache: Any) -> DecodeState:  # noqa: N803
        given = {} if cache is None else {self._cache_name: cache}
        output = self._model(input_ids=ids_BS, use_cache=True, **given, **self._prefill_options)
        return DecodeState(cache_of(output), greedy_token(output))


class StaticEngine(EagerEngine):
    """Eager dispatch on transformers' StaticCache: one buffer of all slots, written in place and read to its end."""

    name = "static"
    cache = "static"

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        return self._prefill(ids_BS, self._slots(ids_BS.shape[0], slots))

    def _slots(self, batch: int, slots: int) -> Any:
        """An empty cache for this shape."""
        return static_cache(self._model, slots)


class CompileEngine(StaticEngine):
    """torch.compile of the decode step on a static cache; prefills stay eager, as in transformers' `generate`.

    On CUDA in the mode `reduce-overhead`, which is what `generate` compiles with: fused kernels, replayed as a graph.
    Every shape is compiled as a static one (`dynamic=False`), as for a user who has only that shape: from the second
    shape on torch would otherwise compile other code, with symbolic sizes.
    """

    name = "compile"
    hookable = False
    keeps_cache = True
    eager_phases = ("prefill",)

    def __init__(self, model: Any, machine: Machine) -> None:
        super().__init__(model, machine)
        torch._dynamo.reset()  # compiled code is kept by function, not by model: nothing of another engine may stay
        # Past the limit of recompilations torch would run the step uncompiled without a word.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        mode = "reduce-overhead" if machine.captures else None
        self._compiled: StepFunction = torch.compile(self._token, dynamic=False, mode=mode)
        # A window that moves is counted by the host: that number must not be compiled in, nor captured.
        self._compiled_moving: StepFunction = torch.compile(self._token_moving)
        self._caches: dict[tuple[int, int], Any] = {}
        """By shape, the latest last."""
        self._prepared = 0
        self.graph_breaks: int = 0
        self.graph_skips: int | None = 0 if machine.captures else None

    def prepare(self, batch: int, slots: int) -> None:
        """Compile for this shape; its cache is kept, because the compiled code holds its address.

        Those of other shapes are kept as graphs' are, the latest of them: where one is let go, its shape is prepared
        anew.
        """
        own = self._caches.pop((batch, slots), None)
        while self._held_bytes() > _KEPT_SHARE * self._machine.available_bytes():
            del self._caches[next(iter(self._caches))]
        self.kept_bytes = self._held_bytes()
        if own is not None:
            self._caches[batch, slots] = own
            return
        self._caches[batch, slots] = unwindowed(static_cache(self._model, slots), slots)
        self._prepared += 1
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 + 2 * self._prepared)
        skips_before = _graph_skips()
        try:
            state = self.prefill(torch.zeros(batch, 1, dtype=torch.long, device=self._model.device), slots)
            for _ in range(_WARM_STEPS):
                state = self.decode(state)
            self.graph_breaks = max(self.graph_breaks, self._pieces(state) - 1)
            if self.graph_skips is not None:
                self.graph_skips += _graph_skips() - skips_before
        except Exception:
            del self._caches[batch, slots]
            raise

    def _held_bytes(self) -> int:
        return sum(map(_bytes_of, self._caches.values()))

    def _pieces(self, state: DecodeState) -> int:
        """Compiled pieces that one step enters. One break in a layer makes several: every caller of it is split too."""
        with recorded(cuda=False) as profile:
            self.decode(state)
        return sum(event.name.startswith(_COMPILED_REGION) for event in profile.events())

    def decode(self, state: DecodeState) -> DecodeState:
        torch.compiler.cudagraph_mark_step_begin()
        step = self._compiled_moving if moving_window(state.cache) else self._compiled
        # A graph's output lives in the graph's own memory, which the next replay overwrites.
        return DecodeState(state.cache, step(state.token_B1, state.cache).clone())

    def _slots(self, batch: int, slots: int) -> Any:
        cache = self._caches[batch, slots]
        cache.reset()
        return cache

    def _token(self, token_B1: torch.Tensor, cache: Any) -> torch.Tensor:  # noqa: N803
        return greedy_token(self._model(input_ids=token_B1, use_cache=True, **{self._cache_name: cache}))

    def _token_moving(self, token_B1: torch.Tensor, cache: Any) -> torch.Tensor:  # noqa: N803
        """Compile `forward` under a separate name: torch keeps compiled code by function."""
        return self._token(token_B1, cache)


def _graph_skips() -> int:
    """Compiled pieces in this process so far that inductor runs without a CUDA graph; it logs the reasons."""
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])


def _bytes_of(cache: Any) -> int:
    return storage_bytes(
        tensor for layer in cache.layers for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
    )


@dataclass(frozen=True)
class _Recorded:
    """A decode step of one shape as a graph."""

    state: DecodeState
    """The memory that it reads and writes."""
    replay: Callable[[], object]


class GraphEngine(StaticEngine):
    """The decode step captured once as a CUDA graph: the host submits one launch a step instead of hundreds.

    Graphs of other shapes are kept, as far as their caches are small beside what is free: a sweep comes back to each.
    """

    name = "graph"
    hookable = False
    replays_as_graph = True
    keeps_cache = True

    def __init__(self, model: Any, machine: Machine) -> None:
        super().__init__(model, machine)
        self._shape: tuple[int, int] | None = None
        self._recorded: dict[tuple[int, int], _Recorded] = {}

    def prepare(self, batch: int, slots: int) -> None:
        """Capture the step of this shape. Raises CaptureError where the model's step cannot be captured."""
        shape = batch, slots
        if self._shape == shape:
            return
        if self._shape and self._held_bytes() > _KEPT_SHARE * self._machine.available_bytes():
            del self._recorded[self._shape]
        self._shape, self.kept_bytes = None, self._held_bytes()
        if shape in self._recorded:
            self.kept_bytes -= _bytes_of(self._recorded[shape].state.cache)
        else:
            self._recorded[shape] = self._record(batch, slots)
        self._shape = shape

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        own = self._now.state
        own.token_B1.copy_(super().prefill(ids_BS, slots).token_B1)
        return own

    def decode(self, state: DecodeState) -> DecodeState:
        self._now.replay()
        return state

    @property
    def _now(self) -> _Recorded:
        assert self._shape is not None, "prepare() captures the step"
        return self._recorded[self._shape]

    def _held_bytes(self) -> int:
        return sum(_bytes_of(step.state.cache) for step in self._recorded.values())

    def _record(self, batch: int, slots: int) -> _Recorded:
        cache = unwindowed(static_cache(self._model, slots), slots)
        state = DecodeState(cache, torch.zeros(batch, 1, dtype=torch.long, device=self._model.device))
        self._prefill(state.token_B1, cache)
        step = partial(self._advance, state)
        with self._machine.on_side_stream():
            for _ in range(_WARM_STEPS):
                step()
        return _Recorded(state, self._machine.capture(step))

    def _slots(self, batch: int, slots: int) -> Any:
        cache = self._now.state.cache
        cache.reset()
        return cache

    def _advance(self, state: DecodeState) -> None:
        output = self._model(input_ids=state.token_B1, use_cache=True, **{self._cache_name: state.cache})
        state.token_B1.copy_(greedy_token(output))


class GenerateEngine(EagerEngine):
    """`model.generate` with greedy tokens, its own checks, masks and copies.

    Its single steps (`prefill`, `decode`) are the eager engine's: what `generate` adds to them is what is asked for.
    """

    name = "generate"
    hookable = False
    whole_calls = True
    taxes = True

    def call(
        self,
        ids_BS: torch.Tensor,  # noqa: N803
        new_tokens: int,
        mark: Callable[[], object],
        streamer: Any = None,
    ) -> torch.Tensor:
        forwards = 0

        def begun(_module: object, _inputs: object) -> None:
            nonlocal forwards
            forwards += 1
            if forwards > 1:
                mark()

        hook = self._model.register_forward_pre_hook(begun)
        mark()
        try:
            tokens: torch.Tensor = self._model.generate(
                ids_BS,
                attention_mask=torch.ones_like(ids_BS),
                max_new_tokens=new_tokens,
                do_sample=False,
                num_beams=1,
                # A token that no model has: the end is looked for at every step, as ever, and never found.
                eos_token_id=self._model.config.get_text_config().vocab_size,
                pad_token_id=0,
                streamer=streamer,
            )
        finally:
            hook.remove()
        mark()
        if forwards != new_tokens:
            raise RuntimeError(f"generate ran {forwards} forwards for {new_tokens} tokens")
        return tokens[:, ids_BS.shape[1] :]


class Announce(Protocol):
    """Tells the other ranks what comes next: a cell with so many decode steps, or with None a prefill alone."""

    def __call__(self, cell: Cell, steps: int | None) -> None: ...


class LeadingEngine(EagerEngine):
    """Steps rank 0's share; a step that fails ends the run, since the others wait for the rest of it."""

    def __init__(self, model: Any, machine: Machine, group: ProcessGroup, announce: Announce) -> None:
        super().__init__(model, machine)
        self._group = group
        self._announce = announce
        self.beside = group.beside

    def announce(self, cell: Cell, steps: int | None) -> None:
        self._announce(cell, steps)

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        with self._group.together():
            return super().prefill(ids_BS, slots)

    def decode(self, state: DecodeState) -> DecodeState:
        with self._group.together():
            return super().decode(state)
