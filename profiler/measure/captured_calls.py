"""Capture the calls that a model makes in a step, so that each can be repeated in isolation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from profiler.counting.attention import AttentionCore
from profiler.counting.operators import Experts, ModelWork, Operator
from profiler.counting.walk import called_modules
from profiler.engines.base import DecodeState
from profiler.engines.caches import emptied, rewind, static_cache, unwindowed
from profiler.engines.registry import ENGINES
from profiler.engines.transformers import EagerEngine, StaticEngine
from profiler.facts.step import Step
from profiler.grid.cells import CellKey
from profiler.measure.subject import Subject
from profiler.patching import patched
from profiler.quant.storage import is_linear, stored

CapturedCall = Callable[[], object]
Modules = Mapping[Operator, Sequence[nn.Module]]

# With several layers, operands do not stay in a cache between calls; the least number is used if memory is short.
_LEAST_LAYERS, _MOST_LAYERS = 2, 8
_MEMORY_SHARE = 0.05


class _CaughtError(Exception):
    """All calls were captured; the rest of the step is not needed."""


def caught_calls(modules: Modules, step: Callable[[], object]) -> dict[Operator, list[CapturedCall]]:
    """Return the calls that a step makes of each operator's modules, one per module, in the order of the step.

    Of an attention module it is the call of its attention function (transformers' `AttentionInterface`) with the step's
    own queries, keys, values and mask. Windows, sinks, repeated heads and the slots of a static cache are therefore the
    model's. Of a bank of experts it is the module's own call, with the router's choice. The step ends as soon as all
    calls were captured. An operator whose modules call no such function is left out.
    """
    owners = {module: operator for operator, group in modules.items() for module in group}
    calls: dict[Operator, list[CapturedCall]] = {}
    missing = set(owners)

    def record(module: nn.Module, call: CapturedCall) -> None:
        if module in missing:
            missing.remove(module)
            calls.setdefault(owners[module], []).append(call)
            if not missing:
                raise _CaughtError

    banks = [module for module, operator in owners.items() if isinstance(operator, Experts)]

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **options: Any) -> Any:
            record(module, partial(function, module, *args, **options))
            return function(module, *args, **options)

        return call

    def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        record(module, partial(module, *args, **options))

    with torch.inference_mode(), _wrapped_attention(recorded), ExitStack() as hooks, suppress(_CaughtError):
        for bank in banks:
            hooks.callback(bank.register_forward_pre_hook(hook, with_kwargs=True).remove)
        step()
    return calls


def _wrapped_attention(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[None]:
    """Context manager in which models get `wrap(function)` for each attention function that they look up."""
    from transformers import AttentionInterface

    plain = AttentionInterface.get_interface

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return wrap(plain(self, name, default))

    return patched(AttentionInterface, get_interface=get_interface)


@contextmanager
def answered(model: nn.Module, modules: Modules, *, attends: bool = False) -> Iterator[None]:
    """Context manager in which a step runs only its small kernels: linears, attention and experts return zeros.

    With `attends` it also runs its attention, which finds in a cache what the kernels before it wrote.

    The first call of each shape is computed, to learn the structure of its result; modules of one shape share it.
    """
    results: dict[object, Any] = {}

    def once(key: object, call: Callable[[], Any]) -> Any:
        if key not in results:
            results[key] = tree_map_only(torch.Tensor, torch.zeros_like, call())
        return results[key]

    def attention(function: Callable[..., Any]) -> Callable[..., Any]:
        # Keyed by the query: a cache grows from step to step, and the shape of the result does not.
        return lambda module, q, *args, **options: once(
            (type(module), q.shape), partial(function, module, q, *args, **options)
        )

    banks = [module for operator, group in modules.items() if isinstance(operator, Experts) for module in group]
    skipped = [*banks, *(module for module in model.modules() if is_linear(module))]

    def forward(module: nn.Module, plain: Callable[..., Any], x: torch.Tensor, *args: Any, **options: Any) -> Any:
        weight = stored(module) if is_linear(module) else None
        widths = weight and (weight.in_features, weight.out_features)
        return once((type(module), widths, x.shape), partial(plain, x, *args, **options))

    with nullcontext() if attends else _wrapped_attention(attention), ExitStack() as patches:
        for module in skipped:
            patches.enter_context(patched(module, forward=partial(forward, module, module.forward)))
        yield


def callable_modules(model: Any, work: ModelWork, room_bytes: float, step: Step) -> dict[Operator, list[nn.Module]]:
    """Return the modules of each attention core and bank of experts whose calls are to be captured.

    A core's operands stay in memory until they are replayed, so only the layers that fit into a share of `room_bytes`
    are used. Experts differ in their weights, so all of them are called.
    """
    called: dict[Operator, list[nn.Module]] = {}
    for op, modules in called_modules(model, work).items():
        layers = len(modules)
        if isinstance(op, AttentionCore):
            keys_and_values = (step.query + step.context) * op.kv_heads * (op.qk_dim + op.v_dim)
            operands = step.batch * (step.query * op.query_heads * op.qk_dim + keys_and_values)
            fitting = int(_MEMORY_SHARE * room_bytes / max(1, float(operands) * op.itemsize))
            layers = min(_MOST_LAYERS, max(_LEAST_LAYERS, fitting))
        called[op] = modules[:layers]
    return called


def masks_of_uncaptured_steps() -> AbstractContextManager[None]:
    """Context manager in which a capture makes only the attention masks that the same step makes without a capture.

    transformers takes a capture for a trace, in which it never leaves a mask out (masking_utils.py,
    `_ignore_causal_mask_sdpa`: 5.17 with every cache, 5.23 with static ones).
    """
    from transformers import masking_utils  # which imports torch._dynamo, of 70 MB

    return patched(masking_utils, is_tracing=lambda *_: False)


class ReusedCache(StaticEngine):
    """A static cache, emptied before each prefill: making one copies numbers to the GPU, which no capture allows."""

    _reused: Any = None

    def _slots(self, batch: int, slots: int) -> Any:
        if self._reused is None:
            self._reused = super()._slots(batch, slots)
        else:
            self._reused.reset()
        return self._reused


class CapturableCache(ReusedCache):
    """A static cache whose length is 0 on the host in a prefill.

    transformers reads the length from the device, for which the host waits. In a capture it cannot, and passes a mask
    that the real step does not have (5.23, masking_utils.py, `_ignore_causal_mask_sdpa`).
    """

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        cache = self._slots(ids_BS.shape[0], slots)
        names = [name for name in ("get_seq_length", "get_query_offset") if hasattr(cache, name)]
        with patched(cache, **dict.fromkeys(names, lambda *_, **__: 0)):
            return self._prefill(ids_BS, cache)


class UsedCache(CapturableCache):
    """A static cache that was filled before and then emptied, like those of graphs and compiled code."""

    def prepare(self, batch: int, slots: int) -> None:
        self._reused = unwindowed(static_cache(self._model, slots), slots)
        self._prefill(torch.zeros(batch, 1, dtype=torch.long, device=self._model.device), self._reused)


class EmptiedCache(EagerEngine):
    """A growing cache, emptied before each prefill if possible: a new one with windows copies lengths to the GPU."""

    _reused: Any = None

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        state = self._prefill(ids_BS, emptied(self._reused))
        self._reused = state.cache
        return state


def step_of(subject: Subject, key: CellKey) -> Callable[[], object]:
    """Return a function that runs one step of a cell with the modules' own Python, on its engine's kind of cache.

    It may be called any number of times: a decode step first sets back a static cache, whose slots would run out.
    Raises RequestError if a cache of that depth cannot be filled without a prefill.
    """
    cell, machine = key.cell, subject.machine
    engine = subject.engines[cell.engine]
    if not engine.pads:  # the cell's kind of cache, without waiting for the device
        ready: type[EagerEngine] = EmptiedCache
        if engine.cache_format is not None:
            ready = ENGINES[cell.engine]
        elif subject.path_of(key).cache == "static":
            ready = UsedCache if engine.keeps_cache else CapturableCache
        engine = ready(subject.loaded.module, machine)
        with torch.inference_mode():
            engine.prepare(cell.batch_size, cell.slots)
    engine.announce(cell, 0)
    if key.phase == "prefill":
        ids = subject.prompts.of(cell).to(machine.device)
        return lambda: engine.prefill(ids, cell.slots)
    with torch.inference_mode():
        state = engine.fill(cell.batch_size, key.context_len, cell.slots)
        # Latent keys are few, but all of them are expanded again: their number must not change between two steps.
        latent = any(isinstance(op, AttentionCore) and op.latent_dim is not None for op in subject.work.operators)
        set_back = rewind(state.cache, key.context_len, growing=latent)

    def decode() -> None:
        set_back()
        engine.decode(state)

    return decode
