"""What the page evaluates: a model's operators as expressions, and the roofs, links and memory of GPUs.

An operator's formula runs once on symbols instead of numbers. Arithmetic and NumPy's functions on a symbol build an
expression of a step's fields, which the page evaluates for any of their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from profiler.counting.attention import AttentionCore
from profiler.counting.memory_need import MemoryNeed, cache_bytes, memory_need, path_on, state_bytes
from profiler.counting.operators import Collective, Operator
from profiler.counting.preset_counts import CountedModel
from profiler.data.links import bus_share, published_link, published_links
from profiler.data.roof_set import RoofSet
from profiler.facts.step import ExecutionPath, Step
from profiler.judge.cells import CellResult
from profiler.predict.result import BETWEEN_CELLS, ForecastCell
from profiler.store.folder import Run

Row = Mapping[str, Any]
Tree = int | float | bool | str | list[Any]
"""An expression as JSON: a number, the name of a symbol, or [operation, argument, ...], as theory.js computes it."""


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
class MeasuredRun:
    """A run: its model entry and its GPU on the page, its measured cells and the forecasts between them."""

    name: str
    quant: str
    gpu: str
    cells: Sequence[Row]
    """Of a prefill, `length` is its prompt tokens, of a decode its cached ones; `flops` is in FLOP/s."""
    forecasts: Sequence[Row]
    """With their 90 % intervals, and whether they are `between` measured cells."""


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
    gpus: Sequence[Row]
    """By `gpu_row`."""
    links: Sequence[Row]
    """By `link_rows`."""
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
        cache_bytes=_tree_of(cache_bytes(counted.work, _symbol("batch"), _symbol("tokens"), shared=_symbol("shared"))),
        state_bytes=state_bytes(counted.work),
        workspace_bytes=_tree_of(_prefill_need(counted, fuses_grouped_heads=True).workspace_bytes),
        unfused_workspace_bytes=_tree_of(_prefill_need(counted, fuses_grouped_heads=False).workspace_bytes),
        fragmentation_bytes=_tree_of(_prefill_need(counted, fuses_grouped_heads=True).fragmentation_bytes),
        operators=[_operator(operator) for operator in operators if not isinstance(operator, Collective)],
        collectives=[_collective(operator) for operator in operators if isinstance(operator, Collective)],
    )


def _symbol(name: str) -> int:
    symbol: object = _Expression(name)
    return symbol  # type: ignore[return-value]


def _prefill_need(counted: CountedModel, *, fuses_grouped_heads: bool) -> MemoryNeed:
    path = path_on(counted.work, counted.attention, fuses_grouped_heads=fuses_grouped_heads)
    new_tokens = _symbol("tokens") - _symbol("shared") - _symbol("query")
    return memory_need(counted.work, 0, _symbolic_prefill(), new_tokens, path)


def _operator(operator: Operator) -> OperatorExpressions:
    """Trace the formula of an operator on symbols."""
    work = operator.work(_symbolic_step(), ExecutionPath())
    return OperatorExpressions(
        name=operator.name,
        group=operator.group,
        dtype=operator.dtype_name,
        flops=_tree_of(work.model_flops),
        weight_bytes=_tree_of(work.weight_bytes),
        kv_bytes=_tree_of(work.kv_read_bytes + work.kv_write_bytes),
        other_bytes=_tree_of(work.state_bytes + work.embedding_bytes + work.logits_bytes),
    )


def _collective(operator: Collective) -> CollectiveExpressions:
    work = operator.work(_symbolic_step(), ExecutionPath())
    return CollectiveExpressions(operator.count, bus_share(operator.kind, operator.ranks), _tree_of(work.link_bytes))


def gpu_row(roofs: RoofSet) -> Row:
    """Return the fields of a GPU's roofs, with its name and its source (`datasheet` or `measured`) apart."""
    return {**vars(roofs), "name": roofs.device, "source": roofs.name.rpartition(", ")[2]}


def link_rows(ranks: Sequence[int]) -> list[Row]:
    """Return the latency and the bandwidth of every published link, for each number of ranks."""
    links = [(count, published_link(name, count)) for name in published_links() for count in ranks]
    return [
        {"name": link.name, "ranks": count, "alpha_s": link.alpha_s, "bus_bytes_per_s": link.bus_bytes_per_s}
        for count, link in links
    ]


def run_roofs(run: Run) -> RoofSet:
    """Return the roofs that a run measured."""
    device = run.document.device
    return run.document.ceilings.ceilings.roof_set(device.name, device.room_bytes)


def measured_run(run: Run, forecasts: Sequence[ForecastCell] = ()) -> MeasuredRun:
    """Return the measured cells of a run's first engine, and forecasts of cells that it did not measure."""
    engine = run.document.engine.names[0]
    cells = [cell for cell in run.measured if cell.engine == engine]
    return MeasuredRun(
        name=f"{run.model.id}, {run.model.precision}, {run.document.device.name}",
        quant=run.model.quant,
        gpu=run.document.device.name,
        cells=[{**_step(cell), "flops": cell.flops_per_s, "intensity": cell.intensity} for cell in cells],
        forecasts=[
            {**_step(cell), "low_s": cell.low_s, "high_s": cell.high_s, "between": cell.basis == BETWEEN_CELLS}
            for cell in forecasts
            if cell.fits
        ],
    )


def _step(cell: CellResult | ForecastCell) -> Row:
    length = cell.prompt_len if cell.phase == "prefill" else cell.context_len
    return {"phase": cell.phase, "batch": cell.batch_size, "length": length, "seconds": cell.latency_s}


_UFUNCS = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "floor_divide": "//",
    "power": "**",
    "minimum": "min",
    "maximum": "max",
    "greater": ">",
    "greater_equal": ">=",
    "less": "<",
    "less_equal": "<=",
    "equal": "==",
    "bitwise_or": "or",
    "bitwise_and": "and",
    "logical_or": "or",
    "logical_and": "and",
    "invert": "not",
    "logical_not": "not",
}


class _Expression(NDArrayOperatorsMixin):
    """An operation on numbers and symbols that has not been evaluated."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **_: Any) -> Any:
        if method != "__call__" or ufunc.__name__ not in _UFUNCS:
            return NotImplemented
        return _apply(_UFUNCS[ufunc.__name__], *inputs)

    def __array_function__(self, function: Any, _types: Any, arguments: Any, _keywords: Any) -> Any:
        if function is np.where:
            return _apply("where", *arguments)
        if function is np.clip:
            value, low, high = arguments
            return _apply("min", _apply("max", value, low), high)
        return NotImplemented

    def __bool__(self) -> bool:
        raise TypeError("an expression has no truth value before it is evaluated; compare with NumPy's functions")

    __hash__ = object.__hash__  # the mixin compares, so it leaves none


def _apply(operation: str, *arguments: Any) -> Any:
    """Return an expression, or a number where the result depends on no expression."""
    plain = [_plain(argument) for argument in arguments]
    if operation == "*" and any(_is(argument, 0) for argument in plain):
        return 0
    if operation == "-" and _is(plain[1], 0):
        return plain[0]
    for neutral, unit in (("*", 1), ("+", 0)):
        if operation == neutral and any(_is(argument, unit) for argument in plain):
            return next(argument for argument in plain if not _is(argument, unit))
    return _Expression([operation, *map(_tree_of, plain)])


def _plain(argument: Any) -> Any:
    """NumPy wraps a symbol, or a number, in an array without dimensions."""
    return argument.item() if isinstance(argument, np.generic | np.ndarray) else argument


def _is(argument: Any, number: int) -> bool:
    return not isinstance(argument, _Expression) and bool(argument == number)


def _tree_of(value: Any) -> Tree:
    """Return a traced value as JSON."""
    plain = _plain(value)
    tree: Tree = plain.tree if isinstance(plain, _Expression) else plain
    return tree


def _symbolic_step() -> Step:
    """Return a step of symbols with the names of its fields, which have no values to check."""
    step = object.__new__(Step)
    for item in fields(Step):
        object.__setattr__(step, item.name, _Expression(item.name))
    return step


def _symbolic_prefill() -> Step:
    """Return a prefill of the symbols `batch` and `query` after a prefix of the symbol `shared`."""
    step = _symbolic_step()
    object.__setattr__(step, "context", step.shared)
    return step
