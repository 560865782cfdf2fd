"""Parts of a step measured alone: its dispatch on the hollow twin, its kernels by replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from profiler.assessment import Context, step_of
from profiler.clock import Clock
from profiler.grid import Cell, Grid, Phase
from profiler.hardware.hollow import hollow_config
from profiler.hardware.replay import replay_attention, replay_linears
from profiler.loading import (
    ModelRequest,
    load,
)
from profiler.timing.engines import ENGINES
from profiler.work.attention import AttentionCore
from profiler.work.operators import Linear, Operator
from profiler.work.walk import linear_key, linear_modules


def measure_dispatch(request: ModelRequest, config: Any, clock: Clock) -> dict[Phase, float | None]:
    """Seconds to dispatch a prefill and a decode step, on the hollow twin; None where the twin cannot be built.

    The fastest of many steps: what slows one down is the machine's noise, not more dispatch.
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
    except Exception:
        return {"prefill": None, "decode": None}
    return {"prefill": min(prefills), "decode": sorted(decodes)[len(decodes) // 4]}


def replay_kernels(
    context: Context, cells: Sequence[Cell], grid: Grid, clock: Clock
) -> dict[tuple[Phase, Cell], dict[Operator, float]]:
    """Seconds of each linear and attention core of each cell, run alone, all their instances together.

    Cells of the same shape share one replay.
    """
    device, dtype = context.loaded.request.device, context.loaded.request.dtype
    modules = linear_modules(context.loaded.module)
    linears = {
        linear_key(op): op for op in context.work.operators if isinstance(op, Linear) and linear_key(op) in modules
    }
    shapes: dict[tuple[int, int], list[tuple[Phase, Cell]]] = {}
    for cell in cells:
        shapes.setdefault((cell.batch_size, cell.batch_size), []).append(("decode", cell))
        shapes.setdefault((cell.batch_size * cell.prompt_len, cell.batch_size), []).append(("prefill", cell))
    results: dict[tuple[Phase, Cell], dict[Operator, float]] = {}
    for (tokens, last), users in shapes.items():
        times = replay_linears(
            {key: modules[key] for key in linears},
            {key: last if op.rows == "last" else tokens for key, op in linears.items()},
            device=device,
            dtype=dtype,
            budget_s=_REPLAY_BUDGET_S / len(shapes),
            clock=clock,
        )
        for user in users:
            results[user] = {linears[key]: each_s * linears[key].count for key, each_s in times.items()}
    if context.paths["decode"].attention == "sdpa":
        _replay_cores(context, results, grid, clock)
    return results


def _replay_cores(
    context: Context, results: Mapping[tuple[Phase, Cell], dict[Operator, float]], grid: Grid, clock: Clock
) -> None:
    """Add the attention cores' times; layers with a window or a latent cache run another call and are left out."""
    request = context.loaded.request
    cores = [
        op
        for op in context.work.operators
        if isinstance(op, AttentionCore) and op.window is None and op.latent_dim is None
    ]
    for (phase, cell), times in results.items():
        step = step_of(phase, cell, grid)
        for core in cores:
            each_s = replay_attention(
                batch=cell.batch_size,
                query=int(step.query),
                context=int(step.context),
                query_heads=core.query_heads,
                kv_heads=core.kv_heads,
                qk_dim=core.qk_dim,
                v_dim=core.v_dim,
                layers=min(core.count, _REPLAYED_LAYERS),
                device=request.device,
                dtype=request.dtype,
                budget_s=_REPLAY_BUDGET_S / 4 / max(1, len(results) * len(cores)),
                clock=clock,
            )
            times[core] = each_s * core.count


_TWIN_STEPS = 24


_TWIN_PROMPT = 8


_REPLAY_BUDGET_S = 12.0


_REPLAYED_LAYERS = 8
