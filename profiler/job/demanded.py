"""A model's work over many steps at once, counted from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from profiler.diagnosis.columns import Array, Demanded, Heads, OperatorColumn, Shape, Steps
from profiler.grid import PHASES, Phase
from profiler.machine.links import Link, bus_share
from profiler.machine.published import EngineKind
from profiler.work.attention import AttentionCore
from profiler.work.causes import Cause
from profiler.work.footprint import predicted_peak_bytes
from profiler.work.operators import Collective, Embedding, Linear, ModelWork, Operator
from profiler.work.step import Attention, Count, ExecutionPath, Step, Work

Paths = Mapping[Phase, ExecutionPath]


def path_of(engine: EngineKind | None, attention: Attention) -> ExecutionPath:
    """How an engine runs a model on a card that is not here; `attention` is that of plain transformers."""
    return ExecutionPath(attention=attention) if engine == "eager" else ExecutionPath()


def demanded(work: ModelWork, steps: Steps, paths: Paths, weight_bytes: int, link: Link | None = None) -> Demanded:
    """What every operator of a model must do in each of `steps`, and the peak memory of each.

    Of one rank's share (`parallel.walk_rank`) the collectives take their time over `link`.
    """
    count = len(steps)
    phases = [(phase, np.flatnonzero(steps.prefill == (phase == "prefill"))) for phase in PHASES]
    parts = [(chosen, *_step(steps.at(chosen), paths[phase])) for phase, chosen in phases if len(chosen)]
    names = {op: name for op, name in work.names.items() if not isinstance(op, Collective)}
    columns = tuple(_column(operator, name, parts, count) for operator, name in names.items())
    peaks = np.zeros(count, dtype=np.float64)
    depth = np.where(steps.prompt_len > 0, steps.prompt_len, steps.context - steps.new_tokens // 2)
    for phase, chosen in phases:
        if len(chosen):
            peaks[chosen] = predicted_peak_bytes(
                work, weight_bytes, steps.batch[chosen], depth[chosen], steps.new_tokens[chosen], paths[phase]
            )
    looked_up = [columns[index].activation_bytes for index, op in enumerate(names) if isinstance(op, Embedding)]
    collective_s = None if link is None else _exchanged_s(work, parts, link, count)
    return Demanded(steps, columns, peaks, collective_s, looked_up[0] if looked_up else None)


def _exchanged_s(work: ModelWork, parts: list[tuple[Array, Step, ExecutionPath]], link: Link, count: int) -> Array:
    """Seconds of all collectives, one after the other: each waits for the operator behind it, and the next for each."""
    total = np.zeros(count)
    for operator in work.operators:
        if isinstance(operator, Collective):
            for chosen, step, path in parts:
                nbytes = np.asarray(operator.each(step, path).link_bytes, dtype=np.float64)
                carried_s = nbytes * bus_share(operator.kind, operator.ranks) / link.bus_bytes_per_s
                total[chosen] += operator.count * (link.alpha_s + carried_s)
    return total


def _step(steps: Steps, path: ExecutionPath) -> tuple[Step, ExecutionPath]:
    """The steps of one phase as they are counted; a static cache is as long as each needs it."""
    if path.cache == "static":
        filled = np.where(steps.prompt_len > 0, steps.prompt_len, steps.context - steps.new_tokens // 2)
        slots: Any = filled + steps.new_tokens
        path = replace(path, static_cache_len=slots)
    return Step(steps.batch, steps.query, steps.context), path


def _column(
    operator: Operator, name: str, parts: list[tuple[Array, Step, ExecutionPath]], count: int
) -> OperatorColumn:
    rows = np.zeros(count)
    sums = {key: np.zeros(count) for key in ("flops", "weight_bytes", "kv_bytes", "activation_bytes")}
    by_cause: tuple[dict[Cause, Array], dict[Cause, Array]] = ({}, {})
    for chosen, step, path in parts:
        work = operator.work(step, path)
        rows[chosen] = operator.executed(step, path) if isinstance(operator, Linear) else step.tokens
        for key, value in _amounts(work).items():
            sums[key][chosen] = value
        for found, causes in zip(by_cause, (work.avoidable_flops, work.avoidable_bytes), strict=True):
            for cause, amount in causes.items():
                if np.any(np.asarray(amount) != 0):
                    found.setdefault(cause, np.zeros(count))[chosen] = amount
    shape, heads = _shape(operator)
    return OperatorColumn(
        name,
        operator.group,
        operator.count,
        operator.dtype_name,
        rows,
        **sums,
        avoidable_flops=by_cause[0],
        avoidable_bytes=by_cause[1],
        last_rows=isinstance(operator, Linear) and operator.rows == "last",
        shape=shape,
        heads=heads,
    )


def _amounts(work: Work) -> dict[str, Count]:
    return {
        "flops": work.model_flops,
        "weight_bytes": work.weight_bytes + work.embedding_bytes + work.logits_bytes,
        "kv_bytes": work.kv_read_bytes + work.kv_write_bytes,
        "activation_bytes": work.activation_bytes,
    }


def _shape(operator: Operator) -> tuple[Shape | None, Heads | None]:
    if isinstance(operator, Linear):
        weight: Any = operator.weight
        return Shape(
            weight.in_features, weight.out_features, "transposed" if weight.transposed else weight.format
        ), None
    if isinstance(operator, AttentionCore):
        return None, Heads(operator.query_heads, operator.kv_heads, operator.qk_dim, operator.window)
    return None, None
