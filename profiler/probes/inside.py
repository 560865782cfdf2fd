"""Inside a step: the time of each group of operators, in a pass of its own under module hooks, never while timing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from profiler.engines.base import Engine
from profiler.engines.transformers import EagerEngine, StaticEngine
from profiler.grid import Cell, Grid, Phase
from profiler.loading import dtype_name
from profiler.machine.clock import Clock
from profiler.probes.kernels import Alone
from profiler.probes.subject import Context, path_of, step_of
from profiler.record.run import CELL_KEY
from profiler.timing.visit import seeded_prompts
from profiler.work.operators import Operator
from profiler.work.recognise import is_attention
from profiler.work.step import Work
from profiler.work.walk import ModelWork, collapse_numbers

_STEPS = 6
BETWEEN = "between modules"
"""Time in no module that the count knows: residual additions, rotary embeddings, the cache's bookkeeping, Python."""


def break_down(
    context: Context, engine: Engine, cells: Sequence[Cell], grid: Grid, clock: Clock
) -> list[dict[str, Any]]:
    """Seconds, FLOPs and bytes of each group in each phase of `cells`; one record a group.

    A step is cut at the entry and the exit of every known module, and each piece is given to the innermost one; the
    pieces add up to the hooked step by construction. What the hooks themselves add is the difference to the time that
    was measured without them, which the reader is shown (`step_s` beside the cell's own).
    """
    if engine.name not in (EagerEngine.name, StaticEngine.name):
        return []  # hooks would change compiled code, and a graph runs none
    groups = _group_of_module(context.loaded.module, context.work)
    vocab_size = context.loaded.config.get_text_config().vocab_size
    records = []
    for cell in cells:
        for phase, pieces in _measured(context, engine, cell, grid, groups, clock, vocab_size):
            records += _records(context, phase, cell, grid, pieces)
    return records


def carriers(
    context: Context,
    engine: Engine,
    cell: Cell,
    phase: Phase,
    grid: Grid,
    clock: Clock,
    alone: Mapping[Operator, Alone],
) -> dict[str, float]:
    """Seconds of a cell's step that nothing explains, by group, the largest first.

    A group's time under hooks, less its operators' own (replayed, or at their roof with their traffic), and less its
    share of dispatch by the number of its operators. Empty where the engine's code cannot be hooked.
    """
    records = [item for item in break_down(context, engine, [cell], grid, clock) if item["phase"] == phase]
    step, path = step_of(phase, cell, grid), path_of(context, phase, cell, grid)
    explained: dict[str, float] = {}
    calls: dict[str, int] = {}
    for operator in context.work.operators:
        group = BETWEEN if operator.group in ("other", "embedding") else str(operator.group)
        part = operator.work(step, path)
        traffic_s = float(part.activation_bytes + sum(part.avoidable_bytes.values()))
        traffic_s /= context.ceilings.memory_bytes_per_s
        own_s = _roof_s(context, operator, part) + traffic_s
        if operator in alone:
            own_s = alone[operator].whole.median_s
        explained[group] = explained.get(group, 0.0) + own_s
        calls[group] = calls.get(group, 0) + operator.count
    dispatch = context.dispatch.get((cell.engine, phase, cell.batch_size))
    host_s = dispatch.step_s if dispatch and not context.info.overlaps_dispatch else 0.0
    excess = {
        item["group"]: item["time_s"]
        - explained.get(item["group"], 0.0)
        - host_s * calls.get(item["group"], 0) / sum(calls.values())
        for item in records
    }
    return dict(sorted(excess.items(), key=lambda item: -item[1]))


def _roof_s(context: Context, operator: Operator, part: Work) -> float:
    return max(
        float(part.model_flops) / context.ceilings.compute_flops_per_s(dtype_name(operator.dtype)),
        float(part.model_bytes) / context.ceilings.memory_bytes_per_s,
    )


def _group_of_module(model: nn.Module, work: ModelWork) -> dict[nn.Module, str]:
    """Every module whose time has a name: those behind an operator, and the attention modules around their cores."""
    by_name: dict[str, str] = {operator.name: str(operator.group) for operator in work.operators}
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if is_attention(module):
            found[module] = "attention"
        elif (group := by_name.get(collapse_numbers(name))) is not None:
            found[module] = group
    return found


class Pieces:
    """Marks at every entry and exit, and whose time lies between two of them."""

    def __init__(self, clock: Clock, *, ranges: bool) -> None:
        self._clock = clock
        self._ranges = ranges
        """Whether each group is an NVTX range as well, which Nsight's tools show."""
        self._stack = [BETWEEN]
        self.marks: list[Any] = []
        self.owners: list[str] = []

    def start(self) -> None:
        self.marks, self.owners = [self._clock.mark()], []

    def enter(self, group: str) -> None:
        if self._ranges:
            torch.cuda.nvtx.range_push(group)
        self._cut()
        self._stack.append(group)

    def leave(self) -> None:
        self._cut()
        self._stack.pop()
        if self._ranges:
            torch.cuda.nvtx.range_pop()

    def finish(self) -> dict[str, float]:
        """Seconds by group since `start`."""
        self._cut()
        self._clock.synchronize()
        total: dict[str, float] = {}
        for owner, seconds in zip(self.owners, self._clock.seconds(self.marks), strict=True):
            total[owner] = total.get(owner, 0.0) + seconds
        return total

    def _cut(self) -> None:
        self.owners.append(self._stack[-1])
        self.marks.append(self._clock.mark())


@contextmanager
def _hooked(groups: dict[nn.Module, str], pieces: Pieces) -> Iterator[None]:
    hooks = []
    for module, group in groups.items():
        hooks.append(module.register_forward_pre_hook(lambda *_, group=group: pieces.enter(group)))
        hooks.append(module.register_forward_hook(lambda *_: pieces.leave()))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _measured(
    context: Context,
    engine: Engine,
    cell: Cell,
    grid: Grid,
    groups: dict[nn.Module, str],
    clock: Clock,
    vocab_size: int,
) -> Iterator[tuple[Phase, dict[str, float]]]:
    """Median seconds by group of a prefill and of a decode step."""
    device, slots = context.loaded.request.device, cell.depth + grid.new_tokens
    pieces = Pieces(clock, ranges=device.type == "cuda")
    with torch.inference_mode():
        engine.prepare(cell.batch_size, slots)
        if cell.prompt_len:
            ids = seeded_prompts(cell, vocab_size).to(device)
            state = engine.prefill(ids, slots)
            with _hooked(groups, pieces):
                pieces.start()
                state = engine.prefill(ids, slots)
                yield "prefill", pieces.finish()
        else:
            state = engine.fill(cell.batch_size, cell.context_len, slots)
        with _hooked(groups, pieces):
            steps = []
            for _ in range(min(_STEPS, grid.decode_steps)):
                pieces.start()
                state = engine.decode(state)
                steps.append(pieces.finish())
    yield "decode", {group: statistics.median(step.get(group, 0.0) for step in steps[1:]) for group in steps[0]}


def _records(context: Context, phase: Phase, cell: Cell, grid: Grid, pieces: dict[str, float]) -> list[dict[str, Any]]:
    step, path = step_of(phase, cell, grid), path_of(context, phase, cell, grid)
    work: dict[str, list[float]] = {}
    for operator in context.work.operators:
        part = operator.work(step, path)
        flops, bytes_ = float(part.model_flops), float(part.model_bytes)
        roof_s = _roof_s(context, operator, part)
        sums = work.setdefault(str(operator.group), [0.0, 0.0, 0.0])
        for index, value in enumerate((flops, bytes_, roof_s)):
            sums[index] += value
    key = dict(zip(CELL_KEY, (phase, cell.batch_size, cell.prompt_len, int(step.context), cell.engine), strict=True))
    step_s = sum(pieces.values())
    return [
        {
            **key,
            "group": group,
            "time_s": seconds,
            "share": seconds / step_s,
            "flops": work.get(group, [0.0] * 3)[0],
            "bytes": work.get(group, [0.0] * 3)[1],
            "roof_s": work.get(group, [0.0] * 3)[2],
            "step_s": step_s,
        }
        for group, seconds in sorted(pieces.items(), key=lambda item: -item[1])
    ]
