"""One formula per operator: FLOPs and bytes as functions of batch, query and context."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from profiler.data.links import CollectiveKind, bus_share
from profiler.facts.operators import NO_AMOUNTS, Amount, Cause, OperatorWork
from profiler.facts.step import Count, ExecutionPath, Step, StoredWeight, Work
from profiler.grid.cells import CellKey
from profiler.grid.ragged import Batch

if TYPE_CHECKING:
    import torch

OperatorGroup = Literal[
    "attention_proj", "attention", "mlp", "experts", "norm", "lm_head", "embedding", "state", "collective", "other"
]

_FLOAT32_BYTES = 4

Rows = Literal["tokens", "last", "context", "routed"]
"""Which rows a linear sees: every token, the positions whose logits are asked for, every cached and new token
(a latent cache that is expanded again at each step), or the tokens that a router sends to it."""


@dataclass(frozen=True)
class GemmShape:
    """One matrix product of the census: [m, k] x [k, n], `count` times a step."""

    m: int
    n: int
    k: int
    dtype: str
    count: int


@dataclass(frozen=True)
class Operator(abc.ABC):
    """One matmul-like thing, or a class of elementwise ones; `count` equal ones are kept as one."""

    name: str
    group: OperatorGroup
    count: int
    dtype: torch.dtype
    """The dtype that its products run in, which decides its compute roof."""

    @property
    def dtype_name(self) -> str:
        """As `--dtype` calls it."""
        return str(self.dtype).removeprefix("torch.")

    @abc.abstractmethod
    def each(self, step: Step, path: ExecutionPath) -> Work:
        """The work of one of them."""

    def work(self, step: Step, path: ExecutionPath) -> Work:
        """The work of all `count` of them."""
        return self.each(step, path) * self.count

    def gemms(self, step: Step) -> Sequence[GemmShape]:
        """The matrix products with weights that a step of plain numbers runs."""
        return ()


@dataclass(frozen=True)
class Linear(Operator):
    """x @ W.T + b. FLOPs 2 * rows * in * out (PaLM, arXiv:2204.02311, appendix B, and common use)."""

    weight: StoredWeight
    rows: Rows
    activation_dtype: torch.dtype
    executed_rows: Rows | None = None
    """What the library runs, where that differs from what the algorithm needs."""

    def each(self, step: Step, path: ExecutionPath) -> Work:
        w = self.weight
        rows, executed = _rows(self.rows, step), self.executed(step, path)
        flops_per_row = 2 * w.in_features * w.out_features
        cause = Cause.UNASKED_LOGITS if self.rows == "last" else Cause.LATENT_EXPANDED
        itemsize = self.activation_dtype.itemsize
        outputs = executed * w.out_features * itemsize
        outliers = path.outlier_columns.get(self.name, 0.0)
        avoidable_flops = {cause: (executed - rows) * flops_per_row, **w.conversion_flops(executed, outliers)}
        avoidable_bytes = dict(w.conversion_bytes(executed, self.activation_dtype, outliers))
        logits = 0
        if self.group == "lm_head":
            logits = rows * w.out_features * itemsize
            avoidable_bytes[cause] = outputs - logits
            if path.upcasts_logits:
                avoidable_bytes[Cause.UPCAST_LOGITS] = rows * w.out_features * (itemsize + 2 * _FLOAT32_BYTES)
        return Work(
            model_flops=rows * flops_per_row,
            vector_flops=rows * w.out_features if w.bias_bytes else 0,
            weight_bytes=w.weight_bytes + w.bias_bytes,
            logits_bytes=logits,
            activation_bytes=executed * w.in_features * itemsize + (0 if self.group == "lm_head" else outputs),
            avoidable_flops=avoidable_flops,
            avoidable_bytes=avoidable_bytes,
        )

    def executed(self, step: Step, path: ExecutionPath) -> Any:
        """Rows that the library really multiplies."""
        if self.rows == "last" and path.all_logits:
            return step.tokens
        return _rows(self.executed_rows or self.rows, step)

    def gemms(self, step: Step) -> Sequence[GemmShape]:
        w = self.weight
        rows = int(_rows(self.executed_rows or self.rows, step))
        return (GemmShape(rows, w.out_features, w.in_features, self.dtype_name, self.count),)


@dataclass(frozen=True)
class Experts(Operator):
    """Routed experts: FLOPs for k experts a token, weights of the distinct experts that T tokens touch.

    With uniform routing E * (1 - (1 - k/E)^T) of E experts are touched (expectation of distinct draws).
    """

    num_experts: int
    per_token: int
    matrices: tuple[tuple[int, int], ...]
    """(in_features, out_features) of one expert's products."""
    expert_bytes: int
    activation_dtype: torch.dtype
    runs_all: bool = False
    """Whether the library multiplies every token by every expert and discards what the router did not choose."""

    def each(self, step: Step, path: ExecutionPath) -> Work:
        tokens = step.tokens
        weights = sum(ins * outs for ins, outs in self.matrices)
        operands = sum(ins + outs for ins, outs in self.matrices)
        idle = self.num_experts - self.per_token if self.runs_all else 0
        return Work(
            model_flops=2 * tokens * self.per_token * weights,
            weight_bytes=self.touched(tokens) * self.expert_bytes,
            activation_bytes=tokens * self.per_token * operands * self.activation_dtype.itemsize,
            avoidable_flops={Cause.UNCHOSEN_EXPERTS: 2 * tokens * idle * weights},
            avoidable_bytes={
                Cause.UNCHOSEN_EXPERTS: (self.num_experts - self.touched(tokens)) * self.expert_bytes if idle else 0
            },
        )

    def touched(self, tokens: Count) -> Count:
        """Expected distinct experts for so many tokens."""
        missed = (1 - self.per_token / self.num_experts) ** np.asarray(tokens, dtype=np.float64)
        return self.num_experts * (1 - missed)

    def gemms(self, step: Step) -> Sequence[GemmShape]:
        tokens = int(step.tokens)
        touched = max(1, round(float(self.touched(tokens))))
        rows = max(1, round(tokens * self.per_token / touched))
        dtype = self.dtype_name
        return [GemmShape(rows, outs, ins, dtype, self.count * touched) for ins, outs in self.matrices]


@dataclass(frozen=True)
class Embedding(Operator):
    """A table lookup: each token reads its row (and its result is written), never the whole table."""

    width: int
    itemsize: int
    per_batch: bool = True
    """False for learned positions, which are looked up once for all sequences."""

    def each(self, step: Step, path: ExecutionPath) -> Work:
        rows = step.tokens if self.per_batch else step.query
        row_bytes = rows * self.width * self.itemsize
        return Work(embedding_bytes=row_bytes, activation_bytes=row_bytes)


@dataclass(frozen=True)
class Elementwise(Operator):
    """Norms, rotary embeddings, activations and residual additions: vector FLOPs and unfused traffic a token."""

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
    """A causal convolution over time, as state-space and linear-attention layers use; it keeps its last inputs."""

    channels: int
    inputs_per_channel: int
    """1 for a depthwise convolution."""
    kernel_size: int
    weight_bytes: int
    itemsize: int

    def each(self, step: Step, path: ExecutionPath) -> Work:
        kept = step.batch * self.channels * (self.kernel_size - 1) * self.itemsize
        return Work(
            model_flops=2 * step.tokens * self.channels * self.inputs_per_channel * self.kernel_size,
            weight_bytes=self.weight_bytes,
            kv_read_bytes=np.where(np.asarray(step.context) > 0, kept, 0),
            kv_write_bytes=kept,
            activation_bytes=2 * step.tokens * self.channels * self.itemsize,
        )


@dataclass(frozen=True)
class RecurrentState(Operator):
    """The recurrent state of a linear-attention or state-space layer: read and written once a step a sequence.

    A token updates each element with what it adds, corrects it, and reads it out: three multiply-adds (the recurrence
    of Mamba-2, arXiv:2405.21060, and of gated delta networks, arXiv:2412.06464). A library that computes a prefill in
    chunks executes more than that.
    """

    state_elements: int
    itemsize: int

    def each(self, step: Step, path: ExecutionPath) -> Work:
        state = step.batch * self.state_elements * self.itemsize
        return Work(
            model_flops=6 * step.tokens * self.state_elements,
            kv_read_bytes=np.where(np.asarray(step.context) > 0, state, 0),
            kv_write_bytes=state,
        )


@dataclass(frozen=True)
class Collective(Operator):
    """What the ranks of a group exchange behind one operator; `count` of them a step, one after the other."""

    kind: CollectiveKind
    ranks: int
    source: Operator | None
    """The operator whose result is exchanged, which decides how many rows there are; None: one a token."""
    width: int
    """Elements of a row of the whole result."""
    itemsize: int

    def each(self, step: Step, path: ExecutionPath) -> Work:
        return Work(link_bytes=self._rows(step, path) * self.width * self.itemsize)

    def _rows(self, step: Step, path: ExecutionPath) -> Count:
        if isinstance(self.source, Linear):
            rows: Count = self.source.executed(step, path)
            return rows
        if isinstance(self.source, Experts) and self.source.runs_all:
            return step.tokens * self.source.num_experts
        return step.tokens


@dataclass(frozen=True)
class ModelWork:
    """All operators of a model, equal ones merged, and what the walk did not understand."""

    operators: tuple[Operator, ...]
    params: int
    understood_params: int
    unknown: tuple[str, ...]
    """Names of modules whose parameters are not in any operator."""
    not_run: tuple[str, ...] = ()
    """Parts that a text-only step leaves alone: towers of other modalities, cross-attention without an encoder."""

    @property
    def coverage(self) -> float:
        """Share of the parameters that the operators account for; below 1 when something is not understood."""
        return self.understood_params / self.params if self.params else 1.0

    def work(self, step: Step, path: ExecutionPath | None = None) -> Work:
        """The work of a whole step; arrays in `step` give arrays."""
        path = path or ExecutionPath()
        return sum((operator.work(step, path) for operator in self.operators), Work())

    @property
    def names(self) -> dict[Operator, str]:
        """A name of its own for each operator; those of one name (layers that differ in a window) are numbered."""
        seen: dict[str, int] = {}
        found = {}
        for operator in self.operators:
            seen[operator.name] = seen.get(operator.name, 0) + 1
            number = seen[operator.name]
            found[operator] = operator.name if number == 1 else f"{operator.name} ({number})"
        return found

    def gemm_census(self, step: Step) -> tuple[GemmShape, ...]:
        """Every distinct matrix product with weights of one step (plain numbers), with how often it runs."""
        counts: dict[GemmShape, int] = {}
        for operator in self.operators:
            for shape in operator.gemms(step):
                key = replace(shape, count=1)
                counts[key] = counts.get(key, 0) + shape.count
        return tuple(replace(shape, count=count) for shape, count in counts.items())


def _rows(rule: Rows, step: Step) -> Any:
    if rule == "last":
        return step.batch
    if rule == "context":
        return step.batch * (step.context + step.query)
    return step.tokens


def padded_work(operator: Operator, key: CellKey, batch: Batch, path: ExecutionPath) -> Work:
    """The work of an operator in a step of a batch that is padded to its longest prompt.

    Model work is that of each prompt at its own length, with the weights read once for all of them. What the padded
    shape has beyond that is avoidable: FLOPs of padded positions, and their keys and values, which every step reads.
    """
    whole = operator.work(Step.of(key), path)
    lens = np.array([request.prompt_len for request in batch], dtype=np.int64)
    beyond = key.cell.prompt_len - lens
    own = Step(1, lens, 0) if key.phase == "prefill" else Step(1, 1, key.context_len - beyond)
    useful = operator.work(own, path)
    weights = operator.work(Step(1, int(lens.sum()) if key.phase == "prefill" else len(batch), 0), path)

    def total(amount: Any) -> Any:
        return np.broadcast_to(amount, lens.shape).sum()

    flops, read, written = map(total, (useful.model_flops, useful.kv_read_bytes, useful.kv_write_bytes))
    cached = read + written
    return replace(
        whole,
        model_flops=flops,
        vector_flops=total(useful.vector_flops),
        weight_bytes=weights.weight_bytes,
        kv_read_bytes=read,
        kv_write_bytes=written,
        embedding_bytes=total(useful.embedding_bytes),
        avoidable_flops={**whole.avoidable_flops, Cause.PADDING: whole.model_flops - flops},
        avoidable_bytes={
            **whole.avoidable_bytes,
            Cause.PADDING: whole.kv_read_bytes + whole.kv_write_bytes - cached,
        },
    )


def operator_work(operator: Operator, name: str, step: Step, path: ExecutionPath) -> OperatorWork:
    """What an operator must do in a step of plain numbers, as a value."""
    return as_value(operator, name, operator.work(step, path))


def as_value(operator: Operator, name: str, work: Work) -> OperatorWork:
    """The work of an operator, in plain numbers, as a run keeps it."""
    return OperatorWork(
        operator=name,
        group=operator.group,
        count=operator.count,
        dtype=operator.dtype_name,
        flops=_amount(work.model_flops),
        weight_bytes=_amount(work.weight_bytes + work.embedding_bytes + work.logits_bytes),
        kv_bytes=_amount(work.kv_read_bytes + work.kv_write_bytes),
        activation_bytes=_amount(work.activation_bytes),
        bus_bytes=_bus_bytes(operator, work),
        avoidable_flops=_amounts(work.avoidable_flops),
        avoidable_bytes=_amounts(work.avoidable_bytes),
    )


def _amount(value: Count) -> Amount:
    number = float(value)
    return int(value) if number.is_integer() else number


def _bus_bytes(operator: Operator, work: Work) -> Amount:
    if not isinstance(operator, Collective):
        return 0
    return _amount(work.link_bytes * bus_share(operator.kind, operator.ranks))


def _amounts(values: Mapping[Cause, Count]) -> Mapping[Cause, Amount]:
    return {cause: amount for cause, value in values.items() if (amount := _amount(value))} or NO_AMOUNTS
