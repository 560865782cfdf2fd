"""What the page evaluates: a model's operators as expressions, and the roofs and memory of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from profiler.counting.attention import AttentionCore
from profiler.counting.floor import RoofSet
from profiler.counting.operators import Operator
from profiler.counting.preset_counts import CountedModel
from profiler.explore.expressions import Tree, symbolic_step, tree_of
from profiler.facts.step import ExecutionPath
from profiler.store.folder import Run


@dataclass(frozen=True)
class OperatorExpressions:
    """The model work of one kind of operator in a step, as expressions of `batch`, `query` and `context`."""

    name: str
    group: str
    dtype: str
    flops: Tree
    weight_bytes: Tree
    kv_bytes: Tree
    """Read and written."""
    other_bytes: Tree
    """Embedding rows and logits."""


@dataclass(frozen=True)
class CacheLayer:
    """Layers that cache alike: bytes per token and sequence, and the window that caps them (0: none)."""

    bytes_per_token: int
    window: int


@dataclass(frozen=True)
class PrecisionEntry:
    """A model in one precision."""

    quant: str
    dtype: str
    weight_bytes: int
    operators: Sequence[OperatorExpressions]
    cache: Sequence[CacheLayer]


@dataclass(frozen=True)
class GpuOption:
    """The roofs of one GPU."""

    name: str
    bytes_per_s: float
    flops_per_s: dict[str, float]
    memory_bytes: int | None


@dataclass(frozen=True)
class MeasuredCell:
    """A measured cell of a run."""

    phase: str
    batch: int
    query: int
    context: int
    seconds: float
    flops: float
    intensity: float


@dataclass(frozen=True)
class ExploreDocument:
    """All that the page knows."""

    model: str
    params: int
    max_positions: int
    precisions: Sequence[PrecisionEntry]
    gpus: Sequence[GpuOption]
    measured: Sequence[MeasuredCell]
    run: str
    """The model, precision and device of the run; empty without one."""


def precision_entry(counted: CountedModel, quant: str) -> PrecisionEntry:
    """Return a counted model as expressions."""
    cores = [operator for operator in counted.work.operators if isinstance(operator, AttentionCore)]
    return PrecisionEntry(
        quant=quant,
        dtype=counted.dtype,
        weight_bytes=counted.weight_bytes,
        operators=[expressions_of(operator) for operator in counted.work.operators],
        cache=[CacheLayer(core.count * core.cached_elements * core.itemsize, core.window or 0) for core in cores],
    )


def expressions_of(operator: Operator) -> OperatorExpressions:
    """Trace the formula of an operator on symbols."""
    work = operator.work(symbolic_step(), ExecutionPath())
    return OperatorExpressions(
        name=operator.name,
        group=operator.group,
        dtype=operator.dtype_name,
        flops=tree_of(work.model_flops),
        weight_bytes=tree_of(work.weight_bytes),
        kv_bytes=tree_of(work.kv_read_bytes + work.kv_write_bytes),
        other_bytes=tree_of(work.embedding_bytes + work.logits_bytes),
    )


def gpu_option(roofs: RoofSet) -> GpuOption:
    """Return the roofs of a GPU as the page shows them."""
    name = roofs.device if roofs.name.endswith(", datasheet") else roofs.name
    return GpuOption(name, roofs.bytes_per_s, dict(roofs.flops_per_s), roofs.memory_bytes)


def measured_points(run: Run) -> list[MeasuredCell]:
    """Return the measured cells of a run."""
    return [
        MeasuredCell(
            cell.phase,
            cell.batch_size,
            cell.key.query_tokens,
            cell.context_len,
            cell.latency_s,
            cell.flops_per_s,
            cell.intensity,
        )
        for cell in run.measured
    ]
