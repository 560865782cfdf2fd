"""The work of every operator over many steps, as arrays of FLOPs and bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from profiler.counting.attention import AttentionCore
from profiler.counting.memory_need import MemoryNeed, memory_need
from profiler.counting.operators import Collective, Linear, ModelWork, Operator
from profiler.facts.operators import Cause
from profiler.facts.step import ExecutionPath, Step
from profiler.grid.cells import PHASES, CellKey, Phase

Array = NDArray[Any]
Floats = NDArray[np.float64]


class Columnar:
    """A dataclass whose arrays, in its fields and in theirs, have one element per step; all else is of all steps."""

    def at(self, chosen: Array) -> Self:
        """The steps that `chosen` (bool or int [n]) picks."""
        own: Any = self
        return cast(Self, replace(own, **{name: _picked(value, chosen) for name, value in vars(own).items()}))


def _picked(value: Any, chosen: Array) -> Any:
    if isinstance(value, Mapping):
        return {name: _picked(item, chosen) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_picked(item, chosen) for item in value)
    if isinstance(value, np.ndarray):
        return value[chosen]
    return value.at(chosen) if hasattr(value, "at") else value


@dataclass(frozen=True)
class StepArrays(Columnar):
    """Prefill and decode steps as arrays of one length n."""

    prefill: Array
    """bool[n]"""
    batch: Array
    prompt_len: Array
    """int64[n], without the prefix; 0 if the cache was filled directly."""
    context: Array
    """int64[n]: cached tokens at the step; in a prefill, those of its prefix."""
    new_tokens: Array
    prefix: Array
    """int64[n]: the first tokens of every prompt, which are cached before it."""
    shared: Array
    """int64[n]: as many, if one copy of them serves all sequences; 0 if each has its own, as in transformers."""

    @classmethod
    def of(cls, keys: Sequence[CellKey], *, prefix: int = 0, is_shared: bool = False) -> Self:
        """The steps of these keys, in their order. All of their prompts have a cached prefix, or none has one."""
        prefixes = np.full(len(keys), prefix)
        return cls(
            np.array([key.phase == "prefill" for key in keys], dtype=bool),
            np.array([key.cell.batch_size for key in keys], dtype=np.int64),
            np.array([key.cell.prompt_len for key in keys], dtype=np.int64),
            np.array([key.context_len for key in keys], dtype=np.int64),
            np.array([key.cell.new_tokens for key in keys], dtype=np.int64),
            prefixes,
            prefixes * is_shared,
        )

    def phase(self, index: int) -> Phase:
        return "prefill" if self.prefill[index] else "decode"

    @property
    def query(self) -> Array:
        """New tokens per sequence and step."""
        return np.where(self.prefill, self.prompt_len, 1)

    @property
    def tokens(self) -> Array:
        """New tokens per step, over all sequences."""
        return self.batch * self.query

    @property
    def depth(self) -> Array:
        """Keys that the last query attends to."""
        return self.query + self.context

    @property
    def octaves(self) -> Array:
        """(batch, query, depth) of each step, in octaves: [n, 3]."""
        return np.log2(np.stack([self.batch, self.query, self.depth], axis=1).astype(np.float64))

    @property
    def by_phase(self) -> list[tuple[Phase, Array]]:
        """(phase, bool[n] of its steps) for each phase that has any."""
        return [(phase, chosen) for phase in PHASES if (chosen := self.prefill == (phase == "prefill")).any()]

    def __len__(self) -> int:
        return len(self.batch)


@dataclass(frozen=True)
class OperatorColumn(Columnar):
    """The work of one operator in each of many steps, summed over its `count` equal instances; arrays are [n]."""

    operator: str
    source: Operator
    rows: Array
    """Rows of a linear's matmul; for other operators, the new tokens of the step."""
    flops: Array
    weight_bytes: Array
    kv_bytes: Array
    activation_bytes: Array
    redundant_flops: Mapping[Cause, Array]
    redundant_bytes: Mapping[Cause, Array]

    @property
    def is_attention(self) -> bool:
        return isinstance(self.source, AttentionCore)

    @property
    def model_bytes(self) -> Array:
        return np.asarray(self.weight_bytes + self.kv_bytes)


@dataclass(frozen=True)
class OperatorArrays(Columnar):
    """Steps with their work by operator, and the peak memory of each; arrays are [n]."""

    steps: StepArrays
    columns: tuple[OperatorColumn, ...]
    need: MemoryNeed
    """What the cell of each step needs of a device's memory."""

    @property
    def working_set_bytes(self) -> Array:
        """As of the judge: all bytes of a prefill, and those of weights and cache of a decode step."""
        total = np.zeros(len(self.steps))
        for column in self.columns:
            total += column.model_bytes
            total += self.steps.prefill * (column.activation_bytes + sum(column.redundant_bytes.values()))
        return total


Paths = Mapping[Phase, ExecutionPath]


def operator_arrays(work: ModelWork, steps: StepArrays, paths: Paths, weight_bytes: int) -> OperatorArrays:
    """The work of every operator of a model in each of `steps`, and the peak memory of each step."""
    parts = [(chosen, *_step(steps.at(chosen), paths[phase])) for phase, chosen in steps.by_phase]
    names = {op: name for op, name in work.names.items() if not isinstance(op, Collective)}
    columns = tuple(_column(operator, name, parts, len(steps)) for operator, name in names.items())
    return OperatorArrays(steps, columns, need_of_cells(work, steps, paths["prefill"], weight_bytes))


def need_of_cells(work: ModelWork, steps: StepArrays, path: ExecutionPath, weight_bytes: int) -> MemoryNeed:
    """What the cell of each step needs of a device's memory [n]; `path` is that of its prefill."""
    filled = np.maximum(1, steps.context - steps.prefix - steps.new_tokens // 2)
    depth = np.where(steps.prompt_len > 0, steps.prompt_len, filled)
    prefilled = np.where(steps.prompt_len > 0, steps.prompt_len, 1)
    prefill = Step(steps.batch, prefilled, steps.prefix, steps.shared)
    return memory_need(work, weight_bytes, prefill, depth + steps.new_tokens - prefilled, path)


def _step(steps: StepArrays, path: ExecutionPath) -> tuple[Step, ExecutionPath]:
    """The steps of one phase in the form that operators count; a cache is as long as each step needs."""
    filled: Any = np.where(steps.prompt_len > 0, steps.prompt_len + steps.prefix, steps.context - steps.new_tokens // 2)
    if path.cache == "static":
        path = replace(path, static_cache_len=filled + steps.new_tokens)
    if path.cache_format is not None:
        path = replace(path, residual_tokens=path.cache_format.residual(np.maximum(steps.context - filled, 0)))
    return Step(steps.batch, steps.query, steps.context, steps.shared), path


def _column(
    operator: Operator, name: str, parts: list[tuple[Array, Step, ExecutionPath]], count: int
) -> OperatorColumn:
    rows = np.zeros(count)
    flops, weights, cache, activations = sums = [np.zeros(count) for _ in range(4)]
    by_cause: tuple[dict[Cause, Array], dict[Cause, Array]] = ({}, {})
    for chosen, step, path in parts:
        work = operator.work(step, path)
        rows[chosen] = operator.executed(step, path) if isinstance(operator, Linear) else step.tokens
        nbytes = work.weight_bytes + work.embedding_bytes + work.logits_bytes
        kv_bytes = work.kv_read_bytes + work.kv_write_bytes + work.state_bytes
        for total, amount in zip(sums, (work.model_flops, nbytes, kv_bytes, work.activation_bytes), strict=True):
            total[chosen] = amount
        for totals, causes in zip(by_cause, (work.redundant_flops, work.redundant_bytes), strict=True):
            for cause, amount in causes.items():
                if np.any(np.asarray(amount) != 0):
                    totals.setdefault(cause, np.zeros(count))[chosen] = amount
    return OperatorColumn(name, operator, rows, flops, weights, cache, activations, *by_cause)
