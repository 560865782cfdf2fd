"""Separate passes under module hooks: the time of each operator group within a step, and the experts that it uses."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import nn

from profiler.counting.module_kinds import is_attention
from profiler.counting.operators import Experts
from profiler.counting.walk import collapse_numbers
from profiler.device.machine import Machine
from profiler.facts.measurements import BETWEEN_MODULES, ExpertsTouched, HookedStep
from profiler.grid.cells import Cell, CellKey
from profiler.measure.subject import Subject
from profiler.measure.sweep import refuse_impossible_times

_STEPS = 6
_ROUTED_STEPS = 8


def hook_cell(subject: Subject, cell: Cell) -> list[HookedStep]:
    """Return the seconds of each group in each phase of a cell; empty if the engine's code cannot be hooked.

    A step is cut at the entry and the exit of every known module, and each piece counts for the innermost one. The
    pieces add up to the hooked step by construction.
    """
    engine = subject.engines[cell.engine]
    if not engine.hookable:
        return []
    # The groups of operators, and the attention modules around the cores.
    group_by_name: dict[str, str] = {operator.name: str(operator.group) for operator in subject.work.operators}
    groups: dict[nn.Module, str] = {}
    for name, module in subject.loaded.module.named_modules():
        if is_attention(module):
            groups[module] = "attention"
        elif (group := group_by_name.get(collapse_numbers(name))) is not None:
            groups[module] = group
    pieces = Pieces(subject.machine)
    hooked = []
    with torch.inference_mode():
        fill = subject.start(cell)
        state = fill()
        if cell.prompt_len:
            with _hooked(groups, pieces):
                pieces.start()
                state = fill()
                hooked.append(_by_group(CellKey("prefill", cell), [pieces.finish()]))
        with _hooked(groups, pieces):
            steps = []
            for _ in range(min(_STEPS, cell.decode_steps)):
                pieces.start()
                state = engine.decode(state)
                steps.append(pieces.finish())
        hooked.append(_by_group(CellKey("decode", cell), steps[1:]))
    return hooked


def _by_group(key: CellKey, steps: list[dict[str, float]]) -> HookedStep:
    return HookedStep(key, {group: tuple(step.get(group, 0.0) for step in steps) for group in steps[0]})


class Pieces:
    """Clock marks at every entry and exit, and the group that owns the time between two of them, also a NVTX range."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._clock = machine.clock
        self._stack = [BETWEEN_MODULES]

    def start(self) -> None:
        self.marks, self.owners = [self._clock.mark()], list[str]()

    def enter(self, group: str, *_: object) -> None:
        self._machine.push_range(group)
        self._cut()
        self._stack.append(group)

    def leave(self, *_: object) -> None:
        self._cut()
        self._stack.pop()
        self._machine.pop_range()

    def finish(self) -> dict[str, float]:
        """Return the seconds by group since `start`. Raises RuntimeError if the clock gives impossible times."""
        self._cut()
        self._clock.synchronize()
        total: dict[str, float] = {}
        for owner, seconds in zip(self.owners, self._clock.seconds(self.marks), strict=True):
            if not seconds >= 0:  # a clock went back, or gave no number
                raise RuntimeError(f"the clock gave a part of a step {seconds:g} s")
            total[owner] = total.get(owner, 0.0) + seconds
        refuse_impossible_times([sum(total.values())])
        return total

    def _cut(self) -> None:
        self.owners.append(self._stack[-1])
        self.marks.append(self._clock.mark())


@contextmanager
def _hooked(groups: dict[nn.Module, str], pieces: Pieces) -> Iterator[None]:
    with ExitStack() as hooks:
        for module, group in groups.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(pieces.enter, group)))
            hooks.enter_context(module.register_forward_hook(pieces.leave))
        yield


def experts_touched(subject: Subject, cell: Cell) -> list[ExpertsTouched]:
    """Return how many distinct experts each phase of a cell uses, by layer and step on average.

    Empty without experts, or if none is told the router's choice as a tensor (remote code, fused kernels).
    """
    engine = subject.engines[cell.engine]
    operators = {operator.name: operator for operator in subject.work.of_kind(Experts)}
    if not operators or not engine.hookable or not cell.prompt_len:
        return []
    seen, touched = list[tuple[int, float, int]](), list[ExpertsTouched]()

    def note(operator: Experts, module: object, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Add (distinct experts, their expected number, all experts) of a call, given [tokens, k] indices."""
        for value in (*args, *named.values()):
            if isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim() == 2:
                real = value[(value >= 0) & (value < operator.num_experts)]
                expected = float(operator.touched(value.shape[0]))
                seen.append((real.unique().numel(), expected, operator.num_experts))
                return

    with torch.inference_mode(), ExitStack() as hooks:
        for name, module in subject.loaded.module.named_modules():
            if (operator := operators.get(collapse_numbers(name))) is not None:
                hooks.enter_context(module.register_forward_pre_hook(partial(note, operator), with_kwargs=True))
        state = subject.start(cell)()
        touched += _mean(CellKey("prefill", cell), seen)
        seen.clear()
        for _ in range(min(_ROUTED_STEPS, cell.decode_steps)):
            state = engine.decode(state)
        touched += _mean(CellKey("decode", cell), seen)
    return touched


def _mean(key: CellKey, seen: list[tuple[int, float, int]]) -> list[ExpertsTouched]:
    if not seen:
        return []
    touched, expected, experts = zip(*seen, strict=True)
    return [ExpertsTouched(key, fmean(touched), fmean(expected), max(experts))]
