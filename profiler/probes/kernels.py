"""Each cell's kernels run alone: linears, attention cores, and what only converts between formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from profiler.diagnosis.facts import Replay, Replays
from profiler.grid import Cell, CellKey
from profiler.loading.request import ModelRequest
from profiler.machine.machine import Machine
from profiler.probes.replay import replay_attention, replay_calls, replay_linears
from profiler.probes.subject import Subject
from profiler.work.attention import AttentionCore
from profiler.work.conversions import conversion_call
from profiler.work.operators import Linear
from profiler.work.step import Step
from profiler.work.walk import LinearKey, ModelWork, linear_key, linear_modules

_CORES_SHARE = 0.25
# Kernels that only convert are few, and are run inside the linears as well.
_CONVERSIONS_SHARE = 0.3
_REPLAYED_LAYERS = 8


@dataclass(frozen=True)
class Linears:
    """The linears of a model that can be called alone, each with its modules, one a layer."""

    operators: dict[LinearKey, Linear]
    modules: dict[LinearKey, list[nn.Module]]


def replayable_linears(work: ModelWork, modules: dict[LinearKey, list[nn.Module]]) -> Linears:
    """Those of `modules` that the walk counted."""
    operators = {linear_key(op): op for op in work.operators if isinstance(op, Linear) and linear_key(op) in modules}
    return Linears(operators, {key: modules[key] for key in operators})


def replayable_cores(work: ModelWork) -> list[AttentionCore]:
    """Attention cores that run as one plain call; a window or a latent cache runs another one."""
    return [
        op for op in work.operators if isinstance(op, AttentionCore) and op.window is None and op.latent_dim is None
    ]


def core_alone(
    core: AttentionCore, step: Step, request: ModelRequest, machine: Machine, budget_s: float
) -> tuple[float, ...]:
    """Seconds of single calls of one layer's attention core at this step's shape."""
    return replay_attention(
        machine,
        batch=int(step.batch),
        query=int(step.query),
        context=int(step.context),
        query_heads=core.query_heads,
        kv_heads=core.kv_heads,
        qk_dim=core.qk_dim,
        v_dim=core.v_dim,
        layers=min(core.count, _REPLAYED_LAYERS),
        dtype=request.dtype,
        budget_s=budget_s,
    )


def replay_kernels(subject: Subject, cells: Sequence[Cell], budget_s: float) -> Iterator[Replays]:
    """Each linear and attention core of each cell run alone, shape by shape.

    Of a linear that converts between formats, those kernels are run on their own as well. Cells of the same shape share
    one replay. `budget_s` is for all of them; each is visited once in any case.
    """
    linears = replayable_linears(subject.work, linear_modules(subject.loaded.module))
    shapes: dict[tuple[int, int], list[CellKey]] = {}
    for key in (key for cell in cells for key in cell.keys):
        shapes.setdefault((key.tokens, key.cell.batch_size), []).append(key)
    for (tokens, last), users in shapes.items():
        share_s = budget_s * (1 - _CORES_SHARE) / len(shapes)
        yield Replays(tuple(users), tuple(_linears_alone(subject, linears, tokens, last, share_s)))
    cores = replayable_cores(subject.work)
    plain = [key for users in shapes.values() for key in users if _is_plain_call(subject, key)]
    each_s = budget_s * _CORES_SHARE / max(1, len(plain) * len(cores))
    for key in plain:
        step = Step.of(key)
        found = (
            Replay(subject.names[core], core_alone(core, step, subject.request, subject.machine, each_s))
            for core in cores
        )
        yield Replays((key,), tuple(found))


def _is_plain_call(subject: Subject, key: CellKey) -> bool:
    """Whether a cell's attention is one call over the tokens that its cache holds."""
    path = subject.path_of(key)
    return path.attention == "sdpa" and path.cache == "dynamic"


def _linears_alone(subject: Subject, linears: Linears, tokens: int, last: int, budget_s: float) -> Iterator[Replay]:
    """Every linear over so many rows; those on the last positions alone see `last` of them."""
    machine, request = subject.machine, subject.request
    rows = {key: last if op.rows == "last" else tokens for key, op in linears.operators.items()}
    sliced = [key for key, op in linears.operators.items() if op.rows == "last" and tokens != last]
    converting = conversions(linears, rows, request)
    conversions_s = budget_s * _CONVERSIONS_SHARE if converting else 0.0
    times = replay_linears(
        linears.modules, rows, machine, dtype=request.dtype, budget_s=budget_s - conversions_s, sliced=sliced
    )
    converted = replay_calls(converting, machine, budget_s=conversions_s)
    for key, op in linears.operators.items():
        yield Replay(subject.names[op], times[key], converted.get(key, ()))


def conversions(
    linears: Linears, rows: dict[LinearKey, int], request: ModelRequest
) -> dict[LinearKey, list[Callable[[], object]]]:
    """What each linear runs to convert between formats, one call a layer; those that convert nothing are left out."""
    found: dict[LinearKey, list[Callable[[], object]]] = {}
    for key, modules in linears.modules.items():
        calls = [conversion_call(module, rows[key], request.dtype) for module in modules]
        if all(calls):
            found[key] = [call for call in calls if call is not None]
    return found
