"""FLOPs and bytes of each operator as functions of batch, query and context."""

from __future__ import annotations

import abc
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from profiler.data.links import CollectiveKind, bus_share
from profiler.facts.operators import NO_AMOUNTS, Amount, Cause, GemmShape, OperatorWork
from profiler.facts.step import FLOAT32_BYTES, Count, ExecutionPath, Step, StoredWeight, Work, plain_number
from profiler.grid.cells import CellKey
from profiler.grid.ragged import Batch

if TYPE_CHECKING:
    import torch

OperatorGroup = Literal[
    "attention_proj", "attention", "mlp", "experts", "norm", "lm_head", "embedding", "state_proj", "state",
    "collective", "other",
]  # fmt: skip

Rows = Literal["tokens", "last", "context", "routed"]
"""The rows of a linear's input: every token, the positions with requested logits, every cached and new token (a latent
cache that is expanded in each step), or the tokens that a router sends to it."""


@dataclass(frozen=True)
class Operator(abc.ABC):
    """A matmul-like operator, or a group of elementwise ones; `count` equal ones are merged."""

    name: str
    dtype: torch.dtype
    """The dtype of the operator's matmuls, which decides its compute ceiling."""
    group: OperatorGroup = field(default="other", kw_only=True)
    count: int = field(default=1, kw_only=True)
    repeats: int = field(default=0, kw_only=True)
    """How many of the `count` use weights that another of them has read in the step."""
    only_last: bool = field(default=False, kw_only=True)
    """Whether only positions with requested logits run through this operator, whose layer keeps no keys of its own."""

    @property
    def dtype_name(self) -> str:
        """The dtype's name in `--dtype`."""
        return str(self.dtype).removeprefix("torch.")

    @abc.abstractmethod
    def each(self, step: Step, path: ExecutionPath) -> Work:
        """Return the work of one of the `count` operators."""

    def work(self, step: Step, path: ExecutionPath) -> Work:
        """Return the work of all `count` operators."""
        each = self.each(step if path.all_logits else self.seen(step), path)
        work = each * self.count
        if not self.repeats:
            return work
        again_bytes = each.weight_bytes * self.repeats
        redundant_bytes = {**work.redundant_bytes, Cause.REREAD_WEIGHTS: again_bytes}
        return replace(work, weight_bytes=work.weight_bytes - again_bytes, redundant_bytes=redundant_bytes)

    def kept_bytes(self, tokens: Count, path: ExecutionPath | None = None, *, shared: Count = 0) -> Any:
        """Return the bytes that one sequence keeps for one operator, without its first `shared` tokens."""
        return 0

    def shared_bytes(self, shared: Count) -> Any:
        """Return the bytes that all sequences keep together of their first `shared` tokens."""
        return self.kept_bytes(shared) - self.kept_bytes(0)

    def seen(self, step: Step) -> Step:
        """Return the positions of a step that run through this operator."""
        return step.last_positions if self.only_last else step

    def gemms(self, step: Step) -> Sequence[GemmShape]:
        """Return the matmuls with weights in a step of scalars."""
        return ()


@dataclass(frozen=True)
class Linear(Operator):
    """x @ W.T + b, with 2 * rows * in * out FLOPs (PaLM, arXiv:2204.02311, appendix B, and common use)."""

    weight: StoredWeight
    rows: Rows
    activation_dtype: torch.dtype
    executed_rows: Rows | None = None
    """The rows that the library computes, if they differ from those that the algorithm needs."""

    def each(self, step: Step, path: ExecutionPath) -> Work:
        w = self.weight
        rows, executed = _rows(self.rows, step), self.executed(step, path)
        flops_per_row = 2 * w.in_features * w.out_features
        cause = Cause.UNASKED_LOGITS if self.rows == "last" else Cause.LATENT_EXPANDED
        itemsize = self.activation_dtype.itemsize
        outputs = executed * w.out_features * itemsize
        outliers = path.outlier_columns.get(self.name, 0.0)
        redundant_flops = {cause: (executed - rows) * flops_per_row, **w.conversion_flops(executed, outliers)}
        redundant_bytes = dict(w.conversion_bytes(executed, self.activation_dtype, outliers))
        logits = 0
        if self.group == "lm_head":
            logits = rows * w.out_features * itemsize
            redundant_bytes[cause] = outputs - logits
            if path.upcasts_logits:
                redundant_bytes[Cause.UPCAST_LOGITS] = rows * w.out_features * (itemsize + 2 * FLOAT32_BYTES)
        return Work(
            model_flops=rows * flops_per_row,
            vector_flops=rows * w.out_features if w.bias_bytes else 0,
            weight_bytes=w.weight_bytes + w.bias_bytes,
            logits_bytes=logits,
            activation_bytes=executed * w.in_features * itemsize + (0 if self.group == "lm_head" else outputs),
            redundant_flops=redundant_flops,
            redundant_bytes=redundant_bytes,
        )

    def executed(self, step: Step, path: ExecutionPath) -> Any:
        """Return the number of rows that the library multiplies."""
        if self.rows == "last" and path.all_logits:
            return step.tokens
        return _rows(self.executed_rows or self.rows, step)

    def gemms(self, step: Step) -> Sequence[GemmShape]:
        w = self.weight
        rows = int(_rows(self.executed_rows or self.rows, self.seen(step)))
        return (GemmShape(rows, w.out_features, w.in_features, self.dtype_name, self.count),)


@dataclass(frozen=True)
class Experts(Operator):
    """Routed experts: FLOPs of k per token; T tokens read E (1 - (1 - k/E)^T) distinct ones of E, if routed evenly."""

    group: OperatorGroup = field(default="experts", kw_only=True)
    num_experts: int
    per_token: float
    """Chosen by the router; on average, if it may also choose none."""
    matrices: tuple[tuple[int, int], ...]
    """(in_features, out_features) of one expert's matrices."""
    expert_bytes: int
    activation_dtype: torch.dtype
    row_elements: int
    """Elements that the library has in memory at its peak, per token and expert that runs on it."""
    runs_all: bool = False
    """Whether the library runs every expert on every token and discards the results that the router did not choose."""
    loops: bool = False
    """Whether it runs one expert after the other, instead of all in one matmul."""
    gathers: bool = False
    """Whether a decode step copies their weights where the path `gathers_experts`."""

    @property
    def rows_per_token(self) -> int:
        """The rows per token that are in memory at once, at most."""
        return self.num_experts if self.runs_all else 1 if self.loops else math.ceil(self.per_token)

    def each(self, step: Step, path: ExecutionPath) -> Work:
        tokens = step.tokens
        weights = sum(ins * outs for ins, outs in self.matrices)
        operands = sum(ins + outs for ins, outs in self.matrices)
        idle = self.num_experts - self.per_token if self.runs_all else 0
        used_bytes = self.touched(tokens) * self.expert_bytes
        unchosen_bytes = self.num_experts * self.expert_bytes - used_bytes if self.runs_all else 0
        redundant_bytes = {Cause.UNCHOSEN_EXPERTS: unchosen_bytes}
        if path.gathers_experts and self.gathers:  # a copy is read, written and read again
            redundant_bytes = {Cause.GATHERED_EXPERTS: np.maximum(3 * self.gathered_bytes(step, path) - used_bytes, 0)}
        return Work(
            model_flops=2 * tokens * self.per_token * weights,
            weight_bytes=used_bytes,
            activation_bytes=tokens * self.per_token * operands * self.activation_dtype.itemsize,
            redundant_flops={Cause.UNCHOSEN_EXPERTS: 2 * tokens * idle * weights},
            redundant_bytes=redundant_bytes,
        )

    def gathered_bytes(self, step: Step, path: ExecutionPath) -> Any:
        """Return the bytes of the copies that a decode step makes, all of one layer at once, one for each token.

        `generate` uses them (transformers 5.23, `batched_mm_experts_forward`) after the prompt, but not on a CPU.
        """
        if not (path.gathers_experts and self.gathers):
            return 0
        copied_bytes = step.tokens * self.per_token * self.expert_bytes
        return np.where(np.equal(step.query, 1) & np.greater(step.context, 0), copied_bytes, 0)

    def touched(self, tokens: Count) -> Count:
        """Return the expected number of distinct experts that `tokens` use."""
        unused_share = np.float64(1 - self.per_token / self.num_experts) ** tokens
        return self.num_experts * (1 - unused_share)

    def gemms(self, step: Step) -> Sequence[GemmShape]:
        tokens = int(self.seen(step).tokens)
        touched = max(1, round(float(self.touched(tokens))))
        rows = max(1, round(tokens * self.per_token / touched))
        return [GemmShape(rows, outs, ins, self.dtype_name, self.count * touched) for ins, outs in self.matrices]


@dataclass(frozen=True)
class Embedding(Operator):
    """A table lookup, which reads and writes one row per token, never the whole table."""

    group: OperatorGroup = field(default="embedding", kw_only=True)
    width: int
    itemsize: int
    per_batch: bool = True
    """False for learned positions, which have one lookup for all sequences."""

    def each(self, step: Step, path: ExecutionPath) -> Work:
        rows = step.tokens if self.per_batch else step.query
        row_bytes = rows * self.width * self.itemsize
        return Work(embedding_bytes=row_bytes, activation_bytes=row_bytes)


@dataclass(frozen=True)
class Elementwise(Operator):
    """Norms, rotary embeddings, activations and residual additions: vector FLOPs and unfused traffic per token."""

    flops_per_token: int
    bytes_per_token: int
    weight_bytes: int = 0

    def each(self, step: Step, path: ExecutionPath) -> Work:
        return Work(
            vector_flops=step.tokens * self.flops_per_token,
            weight_bytes=self.weight_bytes,
            activation_bytes=step.tokens * self.bytes_per_token,
        )


@dataclass(frozen=True)
class Convolution(Operator):
    """A causal convolution over time of a state-space or linear-attention layer; its state is the last inputs."""

    group: OperatorGroup = field(default="state", kw_only=True)
    channels: int
    inputs_per_channel: int
    """1 for a depthwise convolution."""
    kernel_size: int
    state_inputs: int
    """Inputs that are kept per channel."""
    weight_bytes: int
    itemsize: int

    def each(self, step: Step, path: ExecutionPath) -> Work:
        return Work(
            model_flops=2 * step.tokens * self.channels * self.inputs_per_channel * self.kernel_size,
            weight_bytes=self.weight_bytes,
            state_bytes=_read_and_written(self.kept_bytes(0), step),
            activation_bytes=2 * step.tokens * self.channels * self.itemsize,
        )

    def kept_bytes(self, tokens: Count, path: ExecutionPath | None = None, *, shared: Count = 0) -> Any:
        return self.channels * self.state_inputs * self.itemsize


@dataclass(frozen=True)
class RecurrentState(Operator):
    """The state of a linear-attention or state-space layer, read and written once per step and sequence."""

    group: OperatorGroup = field(default="state", kw_only=True)
    state_elements: int
    flops_per_element: int
    """FLOPs per element and token."""
    itemsize: int
    """Bytes of an element as kept."""

    def each(self, step: Step, path: ExecutionPath) -> Work:
        return Work(
            model_flops=self.flops_per_element * step.tokens * self.state_elements,
            state_bytes=_read_and_written(self.kept_bytes(0), step),
        )

    def kept_bytes(self, tokens: Count, path: ExecutionPath | None = None, *, shared: Count = 0) -> Any:
        return self.state_elements * self.itemsize


def _read_and_written(state_bytes: int, step: Step) -> Any:
    """Return the bytes of a state that a step reads, unless it is the first, and writes."""
    return step.batch * state_bytes * (1 + np.where(np.greater(step.context, 0), 1, 0))


@dataclass(frozen=True)
class Collective(Operator):
    """A collective of all ranks after one operator; `count` of them per step, one after the other."""

    group: OperatorGroup = field(default="collective", kw_only=True)
    kind: CollectiveKind
    ranks: int
    source: Operator | None
    """The operator whose result is exchanged; it decides the number of rows. None: one row per token."""
    width: int
    """Elements per row of the whole result."""

    def each(self, step: Step, path: ExecutionPath) -> Work:
        rows: Any = step.tokens
        if isinstance(self.source, Linear):
            rows = self.source.executed(step, path)
        elif isinstance(self.source, Experts) and self.source.runs_all:
            rows = step.tokens * self.source.num_experts
        return Work(link_bytes=rows * self.width * self.dtype.itemsize)


Kind = TypeVar("Kind", bound=Operator)


@dataclass(frozen=True)
class ModelWork:
    """All operators of a model, equal ones merged, and the modules that the walk does not understand."""

    operators: tuple[Operator, ...]
    params: int
    unknown: tuple[str, ...]
    """Names of modules whose parameters are not in any operator."""
    not_run: tuple[str, ...] = ()
    """Parts that a text-only step skips: towers of other modalities, cross-attention without an encoder."""
    dense_instead: tuple[str, ...] = ()
    """Attention that chooses its keys by a rule that is not known, and is counted as if it read all of them."""
    keeps_last_logits: bool = True
    """Whether transformers can leave out all logits but the last."""
    layers: int = 0
    """Layers of the decoder, of any kind."""
    group_params: tuple[tuple[str, int], ...] = ()
    """Weights of matrices by group, those of a shared module once; of `towers`, which no text runs, all parameters."""
    tower_flops: int = 0
    """FLOPs of the towers of other modalities for one square picture, or 0 if its patches are not known."""
    picture_pixels: int = 0
    """The side of that picture."""
    coverage: float = 1.0
    """Share of the parameters in the operators; below 1 if there are `unknown` modules."""

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        return [operator for operator in self.operators if isinstance(operator, kind)]

    def work(self, step: Step, path: ExecutionPath | None = None) -> Work:
        """Return the work of a whole step; arrays in `step` give arrays."""
        path = path or ExecutionPath()
        return sum((operator.work(step, path) for operator in self.operators), Work())

    @cached_property
    def names(self) -> dict[Operator, str]:
        """A unique name for each operator; equal names (of layers with different windows) get a number."""
        numbers: dict[str, int] = {}
        names = {}
        for operator in self.operators:
            number = numbers[operator.name] = numbers.get(operator.name, 0) + 1
            names[operator] = operator.name if number == 1 else f"{operator.name} ({number})"
        return names

    def gemm_census(self, step: Step) -> tuple[GemmShape, ...]:
        """Return every distinct matmul with weights in one step of scalars, with its count."""
        counts = Counter[GemmShape]()
        for shape in (shape for operator in self.operators for shape in operator.gemms(step)):
            counts[replace(shape, count=1)] += shape.count
        return tuple(replace(shape, count=count) for shape, count in counts.items())


def _rows(rule: Rows, step: Step) -> Any:
    if rule == "last":
        return step.batch * step.requested
    if rule == "context":
        return step.batch * (step.context + step.query)
    return step.tokens


def padded_work(operator: Operator, key: CellKey, batch: Batch, path: ExecutionPath) -> Work:
    """Return the work in a padded batch: model work is that of each prompt at its length, the rest is redundant."""
    padded = operator.work(Step.of(key), path)
    lens = np.array([request.prompt_len for request in batch], dtype=np.int64)
    padding = key.cell.prompt_len - lens
    useful = operator.work(Step(1, lens, 0) if key.phase == "prefill" else Step(1, 1, key.context_len - padding), path)
    weights = operator.work(Step(1, int(lens.sum()) if key.phase == "prefill" else len(batch), 0), path)

    def total(amount: Any) -> Any:
        return np.broadcast_to(amount, lens.shape).sum()

    flops, read_bytes, write_bytes = map(total, (useful.model_flops, useful.kv_read_bytes, useful.kv_write_bytes))
    padding_bytes = padded.kv_read_bytes + padded.kv_write_bytes - (read_bytes + write_bytes)
    return replace(
        padded,
        model_flops=flops,
        vector_flops=total(useful.vector_flops),
        weight_bytes=weights.weight_bytes,
        kv_read_bytes=read_bytes,
        kv_write_bytes=write_bytes,
        embedding_bytes=total(useful.embedding_bytes),
        redundant_flops={**padded.redundant_flops, Cause.PADDING: padded.model_flops - flops},
        redundant_bytes={**padded.redundant_bytes, Cause.PADDING: padding_bytes},
    )


def as_value(operator: Operator, name: str, work: Work, step: Step | None = None) -> OperatorWork:
    """Return work in scalars as a value for a run folder, with its matmuls in a step of scalars."""
    return OperatorWork(
        operator=name,
        group=operator.group,
        count=operator.count,
        dtype=operator.dtype_name,
        flops=plain_number(work.model_flops),
        weight_bytes=plain_number(work.weight_bytes + work.embedding_bytes + work.logits_bytes),
        kv_bytes=plain_number(work.kv_read_bytes + work.kv_write_bytes + work.state_bytes),
        activation_bytes=plain_number(work.activation_bytes),
        bus_bytes=plain_number(work.link_bytes * bus_share(operator.kind, operator.ranks))
        if isinstance(operator, Collective)
        else 0,
        redundant_flops=_amounts(work.redundant_flops),
        redundant_bytes=_amounts(work.redundant_bytes),
        gemms=" ".join(map(str, operator.gemms(step))) if step else "",
    )


def _amounts(values: Mapping[Cause, Count]) -> Mapping[Cause, Amount]:
    return {cause: amount for cause, value in values.items() if (amount := plain_number(value))} or NO_AMOUNTS
