"""Capture a step's own calls as the model makes them, so that each can be repeated by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from profiler.counting.attention import AttentionCore
from profiler.counting.operators import Experts, ModelWork, Operator
from profiler.counting.walk import called_modules
from profiler.device.machine import Machine
from profiler.engines.base import DecodeState
from profiler.engines.caches import emptied, static_cache, unwindowed
from profiler.engines.transformers import EagerEngine, StaticEngine
from profiler.facts.step import Step
from profiler.grid.cells import CellKey
from profiler.measure.subject import Subject
from profiler.measure.visit import seeded_prompts
from profiler.quant.storage import is_linear, stored

CapturedCall = Callable[[], object]

# As many layers as keep operands from staying in a cache from one call to the next, if there is room for so many.
_MOST_LAYERS = 8
_LEAST_LAYERS = 2
_ROOM_SHARE = 0.05


class _CaughtError(Exception):
    """All that was wanted has been seen: the rest of the step is not needed."""


def caught_calls(
    modules: Mapping[Operator, Sequence[nn.Module]], step: Callable[[], object]
) -> dict[Operator, list[CapturedCall]]:
    """The calls that a step makes of each operator's modules, one a module, in the order in which it makes them.

    Of an attention module it is the call of its attention function (transformers' `AttentionInterface`) with the very
    queries, keys, values and mask: windows, sinks, repeated heads and the slots of a static cache come as the model
    hands them over. Of a bank of experts it is the module's own call with what the router chose. The step ends as soon
    as all were seen. An operator whose modules call no such function is left out.
    """
    owners = {module: operator for operator, several in modules.items() for module in several}
    found: dict[Operator, list[CapturedCall]] = {}
    waiting = set(owners)

    def keep(module: nn.Module, call: CapturedCall) -> None:
        if module in waiting:
            waiting.remove(module)
            found.setdefault(owners[module], []).append(call)
            if not waiting:
                raise _CaughtError

    banks = [module for module, operator in owners.items() if isinstance(operator, Experts)]
    with torch.inference_mode(), _heard_attention(keep), _heard_modules(banks, keep), suppress(_CaughtError):
        step()
    return found


@contextmanager
def _heard_attention(keep: Callable[[nn.Module, CapturedCall], None]) -> Iterator[None]:
    """Within, each call of an attention function is told before it is made."""
    from transformers import AttentionInterface

    plain = AttentionInterface.get_interface

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = plain(self, name, default)

        def heard(module: nn.Module, *args: Any, **options: Any) -> Any:
            keep(module, partial(function, module, *args, **options))
            return function(module, *args, **options)

        return heard

    AttentionInterface.get_interface = get_interface
    try:
        yield
    finally:
        AttentionInterface.get_interface = plain


@contextmanager
def _heard_modules(modules: Sequence[nn.Module], keep: Callable[[nn.Module, CapturedCall], None]) -> Iterator[None]:
    """Within, each call of these modules is told before it is made."""

    def hear(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        keep(module, partial(module, *args, **options))

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(hear, with_kwargs=True).remove)
        yield


@contextmanager
def answered(model: nn.Module, modules: Mapping[Operator, Sequence[nn.Module]]) -> Iterator[None]:
    """Within, a step runs its small kernels alone: linears, attention functions and experts give zeros at once.

    The first time that a shape is asked for it is computed, to learn the form of the answer; modules of one shape
    share theirs.
    """
    from transformers import AttentionInterface

    answers: dict[object, Any] = {}

    def once(key: object, call: Callable[[], Any]) -> Any:
        if key not in answers:
            answers[key] = _emptied(call())
        return answers[key]

    plain = AttentionInterface.get_interface

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = plain(self, name, default)
        # A cache grows from step to step, and the form of the answer does not.
        return lambda module, q, *args, **options: once(
            (type(module), q.shape), partial(function, module, q, *args, **options)
        )

    banks = [module for operator, several in modules.items() if isinstance(operator, Experts) for module in several]
    quick = [*banks, *(module for module in model.modules() if is_linear(module))]

    def forward(
        module: nn.Module, plain_forward: Callable[..., Any], x: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        return once((*kind_of(module), x.shape), partial(plain_forward, x, *args, **options))

    def kind_of(module: nn.Module) -> tuple[object, ...]:
        held = stored(module) if is_linear(module) else None
        return (type(module), held and (held.in_features, held.out_features))

    AttentionInterface.get_interface = get_interface
    for module in quick:
        module.forward = partial(forward, module, module.forward)
    try:
        yield
    finally:
        AttentionInterface.get_interface = plain
        for module in quick:
            del module.forward


def _emptied(answer: Any) -> Any:
    """A copy of the arguments with zeros for tensors."""
    if isinstance(answer, torch.Tensor):
        return torch.zeros_like(answer)
    return tuple(_emptied(part) for part in answer) if isinstance(answer, tuple) else answer


def callable_modules(model: Any, work: ModelWork, room_bytes: float, step: Step) -> dict[Operator, list[nn.Module]]:
    """The modules behind each attention core and bank of experts whose calls are worth catching.

    Operands of a core are kept until they are replayed: as many layers as fit into a share of the room. Experts differ
    in their weights, and all of them are called.
    """
    found = called_modules(model, work)
    return {
        operator: modules[: _layers(operator, room_bytes, step)] if isinstance(operator, AttentionCore) else modules
        for operator, modules in found.items()
    }


def _layers(core: AttentionCore, room_bytes: float, step: Step) -> int:
    operands = step.batch * (
        step.query * core.query_heads * core.qk_dim
        + (step.query + step.context) * core.kv_heads * (core.qk_dim + core.v_dim)
    )
    fitting = int(_ROOM_SHARE * room_bytes / max(1, float(operands) * core.itemsize))
    return min(_MOST_LAYERS, max(_LEAST_LAYERS, fitting))


class ReusedCache(StaticEngine):
    """A static cache that is emptied before each prefill. To make one copies numbers to the card, a wait that no
    capture holds."""

    def __init__(self, model: Any, machine: Machine) -> None:
        super().__init__(model, machine)
        self._kept: Any = None

    def _slots(self, batch: int, slots: int) -> Any:
        if self._kept is None:
            self._kept = super()._slots(batch, slots)
        else:
            self._kept.reset()
        return self._kept


class CapturableCache(ReusedCache):
    """A static cache whose length the host answers at a prefill: 0.

    transformers reads it from the device, for which the host waits. In a capture it cannot, and passes a mask that the
    real step does not have (5.23, masking_utils.py, `_ignore_causal_mask_sdpa`).
    """

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        cache = self._slots(ids_BS.shape[0], slots)
        names = [name for name in ("get_seq_length", "get_query_offset") if hasattr(cache, name)]
        for name in names:
            setattr(cache, name, lambda *_, **__: 0)
        try:
            return self._prefill(ids_BS, cache)
        finally:
            for name in names:
                delattr(cache, name)


class UsedCache(CapturableCache):
    """As graphs and compiled code keep theirs: it was filled before, and emptied."""

    def prepare(self, batch: int, slots: int) -> None:
        self._kept = unwindowed(static_cache(self._model, slots), slots)
        self._prefill(torch.zeros(batch, 1, dtype=torch.long, device=self._model.device), self._kept)


class EmptiedCache(EagerEngine):
    """A growing cache that is emptied before each prefill, where it can be. A new one with windows copies their length
    to the card (transformers' cache_utils.py, `DynamicSlidingWindowLayer`), a wait that no capture holds."""

    def __init__(self, model: Any, machine: Machine) -> None:
        super().__init__(model, machine)
        self._kept: Any = None

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        state = self._prefill(ids_BS, emptied(self._kept))
        self._kept = state.cache
        return state


def _ready_engine(subject: Subject, key: CellKey) -> type[EagerEngine]:
    """What takes the steps of a cell on its kind of cache, one that needs nothing of the host any more."""
    if subject.path_of(key).cache != "static":
        return EmptiedCache
    return UsedCache if subject.engines[key.cell.engine].keeps_cache else CapturableCache


def step_of(subject: Subject, key: CellKey) -> Callable[[], object]:
    """One step of a cell, ready to be run: the modules' own Python, on the kind of cache that the cell's engine has.

    Raises RequestError where a cache of that depth cannot be had without a prefill.
    """
    cell, machine = key.cell, subject.machine
    engine = subject.engines[cell.engine]
    if not engine.pads:
        engine = _ready_engine(subject, key)(subject.loaded.module, machine)
        with torch.inference_mode():
            engine.prepare(cell.batch_size, cell.slots)
    engine.announce(cell, None)
    if key.phase == "prefill":
        ids = seeded_prompts(cell, subject.vocab_size).to(machine.device)
        return lambda: engine.prefill(ids, cell.slots)
    with torch.inference_mode():
        state = engine.fill(cell.batch_size, key.context_len, cell.slots)
    return lambda: engine.decode(state)
