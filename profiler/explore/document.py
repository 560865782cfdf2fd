"""What the page evaluates: a model's operators as expressions, and the roofs, links and memory of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from profiler.counting.attention import AttentionCore
from profiler.counting.floor import RoofSet
from profiler.counting.memory_need import MemoryNeed, cache_bytes, memory_need, path_on, state_bytes
from profiler.counting.operators import Collective, Operator
from profiler.counting.preset_counts import CountedModel
from profiler.data.links import bus_share, published_link, published_links
from profiler.explore.expressions import Expression, Tree, symbolic_prefill, symbolic_step, tree_of
from profiler.facts.step import ExecutionPath
from profiler.predict.result import BETWEEN_CELLS, ForecastCell
from profiler.store.folder import Run


@dataclass(frozen=True)
class OperatorExpressions:
    """The model work of one kind of operator in a step, as expressions of the fields of `Step`."""

    name: str
    group: str
    dtype: str
    flops: Tree
    weight_bytes: Tree
    kv_bytes: Tree
    """Read and written."""
    other_bytes: Tree
    """States, embedding rows and logits."""


@dataclass(frozen=True)
class CollectiveExpressions:
    """Equal collectives of a step under tensor parallelism."""

    count: int
    """Collectives per step, one after the other."""
    bus_share: float
    """Bytes that cross each rank's link per byte of the result."""
    link_bytes: Tree
    """Bytes of all results, as an expression of the fields of `Step`."""


@dataclass(frozen=True)
class ModelEntry:
    """A model in one precision; on several ranks, the share of the rank that has most."""

    quant: str
    dtype: str
    ranks: int
    weight_bytes: int
    kv_bits: int
    """Bits of one element of the KV cache."""
    cache_bytes: Tree
    """The KV cache and states, as an expression of `batch` and `tokens`, of which the first `shared` are kept once."""
    state_bytes: int
    """The states of one sequence, which `kv_bits` do not change."""
    workspace_bytes: Tree
    """What a prefill of `query` tokens after `shared` ones, into a cache of `tokens`, needs; attention is fused."""
    unfused_workspace_bytes: Tree
    """The same on a GPU without a fused attention kernel for grouped heads."""
    fragmentation_bytes: Tree
    """Free memory that the large tensors of that prefill may be unable to use, since it is in pieces."""
    operators: Sequence[OperatorExpressions]
    collectives: Sequence[CollectiveExpressions]


@dataclass(frozen=True)
class GpuOption:
    """The roofs of one GPU."""

    name: str
    source: str
    """`datasheet` or `measured`."""
    bytes_per_s: float
    flops_per_s: dict[str, float]
    room_bytes: int | None
    """Bytes that a model may take of its memory; null if unknown."""
    fuses_grouped_heads: bool
    sustained: dict[str, float]
    """What a healthy one holds at its power limit, by dtype, where that is known."""


@dataclass(frozen=True)
class LinkOption:
    """The published link between some ranks."""

    name: str
    ranks: int
    alpha_s: float
    bus_bytes_per_s: float


@dataclass(frozen=True)
class MeasuredCell:
    """A measured cell of a run. A prefill has `length` prompt tokens, a decode `length` cached ones."""

    phase: str
    batch: int
    length: int
    seconds: float
    flops: float
    """FLOP/s of its model work."""
    intensity: float


@dataclass(frozen=True)
class ForecastStep:
    """A forecast between or beyond the measured cells of a run, with its 90 % interval."""

    phase: str
    batch: int
    length: int
    seconds: float
    low_s: float
    high_s: float
    between: bool
    """Whether measured cells surround it."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run: its model entry and its GPU on the page, its measured cells and the forecasts between them."""

    name: str
    quant: str
    gpu: str
    cells: Sequence[MeasuredCell]
    forecasts: Sequence[ForecastStep]


@dataclass(frozen=True)
class ExploreDocument:
    """All that the page knows."""

    model: str
    max_positions: int
    """The longest sequence, in tokens."""
    batches: Sequence[int]
    lengths: Sequence[int]
    """The settings of the sliders."""
    entries: Sequence[ModelEntry]
    gpus: Sequence[GpuOption]
    links: Sequence[LinkOption]
    run: MeasuredRun | None


def model_entry(counted: CountedModel, quant: str, ranks: int = 1) -> ModelEntry:
    """Return a counted model, or the share of one of several ranks, as expressions."""
    operators = counted.work.operators
    widths = [operator.itemsize for operator in operators if isinstance(operator, AttentionCore)]
    return ModelEntry(
        quant=quant,
        dtype=counted.dtype,
        ranks=ranks,
        weight_bytes=counted.weight_bytes,
        kv_bits=8 * max(widths, default=2),
        cache_bytes=tree_of(cache_bytes(counted.work, _symbol("batch"), _symbol("tokens"), shared=_symbol("shared"))),
        state_bytes=state_bytes(counted.work),
        workspace_bytes=tree_of(_prefill_need(counted, fuses_grouped_heads=True).workspace_bytes),
        unfused_workspace_bytes=tree_of(_prefill_need(counted, fuses_grouped_heads=False).workspace_bytes),
        fragmentation_bytes=tree_of(_prefill_need(counted, fuses_grouped_heads=True).fragmentation_bytes),
        operators=[_operator(operator) for operator in operators if not isinstance(operator, Collective)],
        collectives=[_collective(operator) for operator in operators if isinstance(operator, Collective)],
    )


def _symbol(name: str) -> int:
    symbol: object = Expression(name)
    return symbol  # type: ignore[return-value]


def _prefill_need(counted: CountedModel, *, fuses_grouped_heads: bool) -> MemoryNeed:
    path = path_on(counted.work, counted.attention, fuses_grouped_heads=fuses_grouped_heads)
    new_tokens = _symbol("tokens") - _symbol("shared") - _symbol("query")
    return memory_need(counted.work, 0, symbolic_prefill(), new_tokens, path)


def _operator(operator: Operator) -> OperatorExpressions:
    """Trace the formula of an operator on symbols."""
    work = operator.work(symbolic_step(), ExecutionPath())
    return OperatorExpressions(
        name=operator.name,
        group=operator.group,
        dtype=operator.dtype_name,
        flops=tree_of(work.model_flops),
        weight_bytes=tree_of(work.weight_bytes),
        kv_bytes=tree_of(work.kv_read_bytes + work.kv_write_bytes),
        other_bytes=tree_of(work.state_bytes + work.embedding_bytes + work.logits_bytes),
    )


def _collective(operator: Collective) -> CollectiveExpressions:
    work = operator.work(symbolic_step(), ExecutionPath())
    return CollectiveExpressions(operator.count, bus_share(operator.kind, operator.ranks), tree_of(work.link_bytes))


def gpu_option(roofs: RoofSet) -> GpuOption:
    """Return the roofs of a GPU as the page shows them."""
    source = roofs.name.rpartition(", ")[2]
    return GpuOption(
        roofs.device,
        source,
        roofs.bytes_per_s,
        dict(roofs.flops_per_s),
        roofs.room_bytes,
        roofs.fuses_grouped_heads,
        dict(roofs.sustained),
    )


def link_options(ranks: Sequence[int]) -> list[LinkOption]:
    """Return every published link for each number of ranks."""
    links = [(name, count, published_link(name, count)) for name in published_links() for count in ranks if count > 1]
    return [LinkOption(name, count, link.alpha_s, link.bus_bytes_per_s) for name, count, link in links]


def run_roofs(run: Run) -> RoofSet:
    """Return the roofs that a run measured."""
    device = run.document.device
    return RoofSet.measured(device.name, run.document.ceilings.ceilings, device.room_bytes)


def measured_run(run: Run, forecasts: Sequence[ForecastCell] = ()) -> MeasuredRun:
    """Return the measured cells of a run's first engine, and forecasts of cells that it did not measure."""
    engine = run.document.engine.names[0]
    cells = [cell for cell in run.measured if cell.engine == engine]
    return MeasuredRun(
        name=f"{run.model.id}, {run.model.precision}, {run.document.device.name}",
        quant=run.model.quant,
        gpu=run.document.device.name,
        cells=[
            MeasuredCell(
                cell.phase,
                cell.batch_size,
                cell.key.query_tokens if cell.phase == "prefill" else cell.context_len,
                cell.latency_s,
                cell.flops_per_s,
                cell.intensity,
            )
            for cell in cells
        ],
        forecasts=[
            ForecastStep(
                cell.phase,
                cell.batch_size,
                cell.prompt_len if cell.phase == "prefill" else cell.context_len,
                cell.latency_s,
                cell.low_s,
                cell.high_s,
                cell.basis == BETWEEN_CELLS,
            )
            for cell in forecasts
            if cell.fits
        ],
    )
