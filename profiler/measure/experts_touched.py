"""Distinct experts that the tokens of a cell use, in a separate pass under module hooks."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from statistics import fmean
from typing import Any

import torch

from profiler.counting.operators import Experts
from profiler.counting.walk import collapse_numbers
from profiler.facts.measurements import ExpertsTouched
from profiler.grid.cells import Cell, CellKey
from profiler.measure.subject import Subject

_STEPS = 8


def experts_touched(subject: Subject, cell: Cell) -> list[ExpertsTouched]:
    """Return how many distinct experts each phase of a cell uses, by layer and step on average.

    Empty without experts, or if none is told the router's choice as a tensor (remote code, fused kernels).
    """
    engine, device = subject.engines[cell.engine], subject.machine.device
    operators = {operator.name: operator for operator in subject.work.of_kind(Experts)}
    if not operators or not engine.hookable or not cell.prompt_len:
        return []
    seen: list[tuple[int, float, int]] = []
    touched = []
    with torch.inference_mode(), ExitStack() as hooks:
        for name, module in subject.loaded.module.named_modules():
            if (operator := operators.get(collapse_numbers(name))) is not None:
                note = partial(_note, operator, seen)
                hooks.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        engine.announce(cell, None)
        engine.prepare(cell.batch_size, cell.slots)
        state = engine.prefill(subject.prompts.of(cell).to(device), cell.slots)
        touched += _mean(CellKey("prefill", cell), seen)
        seen.clear()
        for _ in range(min(_STEPS, cell.decode_steps)):
            state = engine.decode(state)
        touched += _mean(CellKey("decode", cell), seen)
    return touched


def _note(
    operator: Experts, seen: list[tuple[int, float, int]], module: object, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Add (distinct experts, their expected number, all experts) of one call: [tokens, k] indices are an argument."""
    for value in (*args, *named.values()):
        if isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim() == 2:
            real = value[(value >= 0) & (value < operator.num_experts)]
            expected = float(operator.touched(value.shape[0]))
            seen.append((real.unique().numel(), expected, operator.num_experts))
            return


def _mean(key: CellKey, seen: list[tuple[int, float, int]]) -> list[ExpertsTouched]:
    if not seen:
        return []
    touched, expected, experts = zip(*seen, strict=True)
    return [ExpertsTouched(key, fmean(touched), fmean(expected), max(experts))]
