"""Each cell's kernels run alone: linears, attention cores, and what only converts between formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from profiler.grid import Cell, Grid, Phase
from profiler.loading import ModelRequest
from profiler.machine.clock import NOTHING, Clock, Timing
from profiler.probes.replay import replay_attention, replay_calls, replay_linears
from profiler.probes.subject import Context, path_of, step_of
from profiler.work.attention import AttentionCore
from profiler.work.conversions import conversion_call
from profiler.work.operators import Linear, Operator
from profiler.work.step import Step
from profiler.work.walk import LinearKey, ModelWork, linear_key, linear_modules

_CORES_SHARE = 0.25
# Kernels that only convert are few, and are run inside the linears as well.
_CONVERSIONS_SHARE = 0.3
_REPLAYED_LAYERS = 8


@dataclass(frozen=True)
class _Linears:
    operators: dict[LinearKey, Linear]
    modules: dict[LinearKey, list[nn.Module]]


def replayable_linears(work: ModelWork, modules: dict[LinearKey, list[nn.Module]]) -> _Linears:
    operators = {linear_key(op): op for op in work.operators if isinstance(op, Linear) and linear_key(op) in modules}
    return _Linears(operators, {key: modules[key] for key in operators})


def replayable_cores(work: ModelWork) -> list[AttentionCore]:
    """Attention cores that run as one plain call; a window or a latent cache runs another one."""
    return [
        op for op in work.operators if isinstance(op, AttentionCore) and op.window is None and op.latent_dim is None
    ]


def core_alone(core: AttentionCore, step: Step, request: ModelRequest, budget_s: float, clock: Clock) -> Timing:
    return replay_attention(
        batch=int(step.batch),
        query=int(step.query),
        context=int(step.context),
        query_heads=core.query_heads,
        kv_heads=core.kv_heads,
        qk_dim=core.qk_dim,
        v_dim=core.v_dim,
        layers=min(core.count, _REPLAYED_LAYERS),
        device=request.device,
        dtype=request.dtype,
        budget_s=budget_s,
        clock=clock,
    )


def replay_kernels(
    context: Context, cells: Sequence[Cell], grid: Grid, clock: Clock, budget_s: float
) -> dict[tuple[Phase, Cell], dict[Operator, Alone]]:
    """Each linear and attention core of each cell run alone, all their instances together.

    Of a linear that converts between formats, those kernels are run on their own as well. Cells of the same shape share
    one replay. `budget_s` is for all of them; each is visited once in any case.
    """
    request = context.loaded.request
    linears = replayable_linears(context.work, linear_modules(context.loaded.module))
    shapes: dict[tuple[int, int], list[tuple[Phase, Cell]]] = {}
    for cell in cells:
        shapes.setdefault((cell.batch_size, cell.batch_size), []).append(("decode", cell))
        if cell.prompt_len:
            shapes.setdefault((cell.batch_size * cell.prompt_len, cell.batch_size), []).append(("prefill", cell))
    results: dict[tuple[Phase, Cell], dict[Operator, Alone]] = {}
    for (tokens, last), users in shapes.items():
        rows = {key: last if op.rows == "last" else tokens for key, op in linears.operators.items()}
        sliced = [key for key, op in linears.operators.items() if op.rows == "last" and tokens != last]
        share_s = budget_s * (1 - _CORES_SHARE) / len(shapes)
        converting = conversions(linears, rows, request)
        times = replay_linears(
            linears.modules,
            rows,
            device=request.device,
            dtype=request.dtype,
            budget_s=share_s * (1 - _CONVERSIONS_SHARE if converting else 1),
            clock=clock,
            sliced=sliced,
        )
        converted = replay_calls(
            converting, device=request.device, budget_s=share_s * _CONVERSIONS_SHARE if converting else 0, clock=clock
        )
        for user in users:
            results[user] = {
                op: Alone(times[key].times(op.count), converted.get(key, NOTHING).times(op.count))
                for key, op in linears.operators.items()
            }
    cores = replayable_cores(context.work)
    each_s = budget_s * _CORES_SHARE / max(1, len(results) * len(cores))
    for (phase, cell), totals in results.items():
        path = path_of(context, phase, cell, grid)
        if path.attention != "sdpa" or path.cache != "dynamic":
            continue
        for core in cores:
            alone = core_alone(core, step_of(phase, cell, grid), request, each_s, clock)
            totals[core] = Alone(alone.times(core.count))
    return results


def conversions(
    linears: _Linears, rows: dict[LinearKey, int], request: ModelRequest
) -> dict[LinearKey, list[Callable[[], object]]]:
    """What each linear runs to convert between formats, one call a layer; those that convert nothing are left out."""
    found: dict[LinearKey, list[Callable[[], object]]] = {}
    for key, modules in linears.modules.items():
        calls = [conversion_call(module, rows[key], request.dtype) for module in modules]
        if all(calls):
            found[key] = [call for call in calls if call is not None]
    return found


@dataclass(frozen=True)
class Alone:
    """An operator's kernels run alone, all its instances together."""

    whole: Timing
    conversion: Timing = NOTHING
    """The part of it that only converts between formats."""


Replayed = Mapping[tuple[Phase, Cell], Mapping[Operator, Alone]]
"""The operators that were run alone, by phase and cell."""
