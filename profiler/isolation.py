"""Parts of a step measured alone: its dispatch on the hollow twin, its kernels by replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from profiler.assessment import Context, step_of
from profiler.clock import Clock
from profiler.diagnosis.step_time import Dispatch
from profiler.grid import Cell, Grid, Phase
from profiler.hardware.hollow import hollow_config
from profiler.hardware.replay import replay_attention, replay_linears
from profiler.loading import LoadedModel, ModelRequest, load
from profiler.timing.engines import ENGINES
from profiler.work.attention import AttentionCore
from profiler.work.operators import Linear, Operator
from profiler.work.step import Step
from profiler.work.walk import LinearKey, ModelWork, linear_key, linear_modules, walk

_TWIN_STEPS = 24
_TWIN_PROMPT = 8
_TWIN_REPLAY_S = 0.3
_CORES_SHARE = 0.25
_REPLAYED_LAYERS = 8


def measure_dispatch(request: ModelRequest, config: Any, clock: Clock) -> dict[Phase, Dispatch | None]:
    """What it costs to dispatch a prefill and a decode step, on the hollow twin; None where it cannot be built.

    A low quantile of many steps: what slows one down is the machine's noise, not more dispatch.
    """
    try:
        twin = load(replace(request, weights="random"), hollow_config(config, request.quant))
        engine = ENGINES["eager"](twin.module)
        ids = torch.zeros(1, _TWIN_PROMPT, dtype=torch.long, device=request.device)
        prefills: list[float] = []
        decodes: list[float] = []
        with torch.inference_mode():
            for _ in range(4):
                marks = [clock.mark()]
                state = engine.prefill(ids)
                marks.append(clock.mark())
                for _ in range(_TWIN_STEPS // 2):
                    state = engine.decode(state)
                    marks.append(clock.mark())
                clock.synchronize()
                prefill_s, *decode_s = clock.seconds(marks)
                prefills.append(prefill_s)
                decodes += decode_s[1:]
        # On CUDA a replayed kernel's launch hides behind the one before it, so nothing is paid twice.
        on_host = request.device.type == "cpu"
        decode_calls_s = _calls_alone_s(twin, clock, query=1, context=_TWIN_PROMPT) if on_host else 0.0
        prefill_calls_s = _calls_alone_s(twin, clock, query=_TWIN_PROMPT, context=0) if on_host else 0.0
    except Exception:
        return {"prefill": None, "decode": None}
    return {
        "prefill": Dispatch(min(prefills), prefill_calls_s),
        "decode": Dispatch(sorted(decodes)[len(decodes) // 4], decode_calls_s),
    }


def _calls_alone_s(twin: LoadedModel, clock: Clock, *, query: int, context: int) -> float:
    """Seconds of the twin's own linears and attention cores, replayed as the model's are: next to nothing but calls."""
    work = walk(twin.module)
    request = twin.request
    linears = _replayable(work, linear_modules(twin.module))
    times = replay_linears(
        linears.modules,
        dict.fromkeys(linears.operators, query),
        device=request.device,
        dtype=request.dtype,
        budget_s=_TWIN_REPLAY_S,
        clock=clock,
    )
    total_s = sum(each_s * linears.operators[key].count for key, each_s in times.items())
    for core in _replayable_cores(work):
        step = Step(1, query, context)
        total_s += core.count * _core_alone_s(core, step, request, _TWIN_REPLAY_S, clock)
    return total_s


@dataclass(frozen=True)
class _Linears:
    operators: dict[LinearKey, Linear]
    modules: dict[LinearKey, list[nn.Module]]


def _replayable(work: ModelWork, modules: dict[LinearKey, list[nn.Module]]) -> _Linears:
    operators = {linear_key(op): op for op in work.operators if isinstance(op, Linear) and linear_key(op) in modules}
    return _Linears(operators, {key: modules[key] for key in operators})


def _replayable_cores(work: ModelWork) -> list[AttentionCore]:
    """Attention cores that run as one plain call; a window or a latent cache runs another one."""
    return [
        op for op in work.operators if isinstance(op, AttentionCore) and op.window is None and op.latent_dim is None
    ]


def _core_alone_s(core: AttentionCore, step: Step, request: ModelRequest, budget_s: float, clock: Clock) -> float:
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
) -> dict[tuple[Phase, Cell], dict[Operator, float]]:
    """Seconds of each linear and attention core of each cell, run alone, all their instances together.

    Cells of the same shape share one replay. `budget_s` is for all of them; each is visited once in any case.
    """
    request = context.loaded.request
    linears = _replayable(context.work, linear_modules(context.loaded.module))
    shapes: dict[tuple[int, int], list[tuple[Phase, Cell]]] = {}
    for cell in cells:
        shapes.setdefault((cell.batch_size, cell.batch_size), []).append(("decode", cell))
        shapes.setdefault((cell.batch_size * cell.prompt_len, cell.batch_size), []).append(("prefill", cell))
    results: dict[tuple[Phase, Cell], dict[Operator, float]] = {}
    for (tokens, last), users in shapes.items():
        times = replay_linears(
            linears.modules,
            {key: last if op.rows == "last" else tokens for key, op in linears.operators.items()},
            device=request.device,
            dtype=request.dtype,
            budget_s=budget_s * (1 - _CORES_SHARE) / len(shapes),
            clock=clock,
        )
        for user in users:
            results[user] = {
                linears.operators[key]: each_s * linears.operators[key].count for key, each_s in times.items()
            }
    if context.paths["decode"].attention != "sdpa":
        return results
    cores = _replayable_cores(context.work)
    each_s = budget_s * _CORES_SHARE / max(1, len(results) * len(cores))
    for (phase, cell), totals in results.items():
        for core in cores:
            totals[core] = core.count * _core_alone_s(core, step_of(phase, cell, grid), request, each_s, clock)
    return results
