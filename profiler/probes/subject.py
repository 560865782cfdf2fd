"""A loaded model on a measured device: how it is executed here, and what fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from profiler.diagnosis.step_time import Dispatch
from profiler.engines.base import Engine
from profiler.grid import Cell, Grid, Phase, decode_context
from profiler.loading import LoadedModel
from profiler.machine.device import Device
from profiler.machine.memory import available_bytes
from profiler.roofs.values import Ceilings
from profiler.timing.visit import seeded_prompts
from profiler.work.attention import AttentionCore
from profiler.work.footprint import model_storage_bytes, predicted_peak_bytes
from profiler.work.kernels import attention_path, outlier_columns
from profiler.work.step import ExecutionPath, Step
from profiler.work.walk import ModelWork


@dataclass(frozen=True)
class Context:
    """What diagnosis needs of a loaded model on a measured device."""

    loaded: LoadedModel
    work: ModelWork
    paths: Mapping[tuple[str, Phase], ExecutionPath]
    """How each engine executes each phase; `path_of` adds what a cell decides."""
    info: Device
    ceilings: Ceilings
    dispatch: Mapping[tuple[str, Phase, int], Dispatch]
    """By engine, phase and batch size; empty where it was not measured."""
    dtype: str


def execution_paths(
    loaded: LoadedModel, work: ModelWork, engines: Mapping[str, Engine], grid: Grid
) -> dict[tuple[str, Phase], ExecutionPath]:
    """How this model is executed on this device: its attention interface, the kernels that torch picks, outliers."""
    request = loaded.request
    attention = getattr(loaded.config.get_text_config(), "_attn_implementation", None) or "sdpa"
    cores = [operator for operator in work.operators if isinstance(operator, AttentionCore)]
    longest = max((*grid.prompt_lens, *grid.context_lens))
    shapes: dict[Phase, tuple[int, int]] = {"prefill": (longest, longest), "decode": (1, longest + 1)}
    asked = {
        phase: attention_path(attention, cores, request.device, request.dtype, query=query, keys=keys)
        for phase, (query, keys) in shapes.items()
    }
    paths: dict[tuple[str, Phase], ExecutionPath] = {}
    for name, engine in engines.items():
        outliers = _outliers(loaded, engine, grid) if request.quant == "int8" else {}
        for phase, path in asked.items():
            paths[name, phase] = replace(
                path,
                cache=engine.cache,
                all_logits=not engine.keeps_last_logits,
                outlier_columns=outliers.get(phase, {}),
            )
    return paths


def _outliers(loaded: LoadedModel, engine: Engine, grid: Grid) -> dict[Phase, dict[str, float]]:
    """The columns with outliers that LLM.int8() finds in the shortest prompt, and in a step behind it."""
    cell = Cell(1, min((*grid.prompt_lens, *grid.context_lens)))
    ids = seeded_prompts(cell, loaded.config.get_text_config().vocab_size).to(loaded.request.device)
    slots = cell.depth + grid.new_tokens
    with torch.inference_mode():
        engine.prepare(1, slots)
        state = engine.prefill(ids, slots)
        prefill = outlier_columns(loaded.module)
        engine.decode(state)
        return {"prefill": prefill, "decode": outlier_columns(loaded.module)}


def path_of(context: Context, phase: Phase, cell: Cell, grid: Grid) -> ExecutionPath:
    """How a cell's step is executed; a static cache is as long as the cell needs it."""
    path = context.paths[cell.engine, phase]
    return replace(path, static_cache_len=cell.depth + grid.new_tokens) if path.cache == "static" else path


def step_of(phase: Phase, cell: Cell, grid: Grid) -> Step:
    """The step that a cell's figure describes: its whole prompt, or the middle step of its decode loop."""
    if phase == "prefill":
        return Step(cell.batch_size, cell.prompt_len, 0)
    return Step(cell.batch_size, 1, decode_context(cell.depth, grid.new_tokens))


def no_room(cell: Cell, context: Context, grid: Grid) -> str | None:
    """Why a cell cannot fit into memory, or None. The weights are loaded already; the rest must still find room."""
    weights = model_storage_bytes(context.loaded.module)
    peak = predicted_peak(context, cell, grid)
    room = available_bytes(context.loaded.request.device)
    if peak - weights > room * _MEMORY_MARGIN:
        return f"needs {(peak - weights) / 1e9:.1f} GB beside the weights, {room / 1e9:.1f} GB is free"
    return None


def predicted_peak(context: Context, cell: Cell, grid: Grid) -> int:
    weights = model_storage_bytes(context.loaded.module)
    return predicted_peak_bytes(
        context.work, weights, cell.batch_size, cell.depth, grid.new_tokens, context.paths[cell.engine, "prefill"]
    )


# A cell is refused before it is tried when its predicted peak leaves less than this share of memory free.
_MEMORY_MARGIN = 0.95
