"""The work of many steps at once: what a run's operators must do in cells that nobody measured, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.grid import PHASES, CellKey, Phase
from profiler.work.causes import Cause

Array = NDArray[Any]


@dataclass(frozen=True)
class Steps:
    """Steps of one length of arrays: whole prompts, or single tokens after a cache."""

    prefill: Array
    """bool[n]"""
    batch: Array
    prompt_len: Array
    """int64[n]; 0 where the cache was filled directly."""
    context: Array
    """int64[n]: cached tokens at the step, 0 in a prefill."""
    new_tokens: Array

    @classmethod
    def of(cls, keys: Sequence[CellKey]) -> Steps:
        """The steps of these keys, in their order."""
        return cls(
            np.array([key.phase == "prefill" for key in keys], dtype=bool),
            np.array([key.cell.batch_size for key in keys], dtype=np.int64),
            np.array([key.cell.prompt_len for key in keys], dtype=np.int64),
            np.array([key.context_len for key in keys], dtype=np.int64),
            np.array([key.cell.new_tokens for key in keys], dtype=np.int64),
        )

    @property
    def query(self) -> Array:
        """New tokens a sequence."""
        return np.where(self.prefill, self.prompt_len, 1)

    @property
    def tokens(self) -> Array:
        """Tokens that a step processes."""
        return self.batch * self.query

    @property
    def depth(self) -> Array:
        """Keys that the last query sees."""
        return self.query + self.context

    def __len__(self) -> int:
        return len(self.batch)

    def at(self, chosen: Array) -> Steps:
        """Those that `chosen` (bool or int [n]) picks."""
        return Steps(
            self.prefill[chosen],
            self.batch[chosen],
            self.prompt_len[chosen],
            self.context[chosen],
            self.new_tokens[chosen],
        )


@dataclass(frozen=True)
class Shape:
    """The weight of a linear, by which a card profile knows its kernel."""

    in_features: int
    out_features: int
    format: str
    """Its dtype, how it is packed, or `transposed`."""


@dataclass(frozen=True)
class Heads:
    """The shape of an attention core, by which a card profile knows its kernel."""

    query_heads: int
    kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True)
class OperatorColumn:
    """What one operator must do in each of many steps, all its `count` equal instances together; arrays are [n]."""

    operator: str
    group: str
    count: int
    dtype: str
    rows: Array
    """Rows that its kernel is given; for attention, the keys of the whole batch."""
    flops: Array
    weight_bytes: Array
    kv_bytes: Array
    activation_bytes: Array
    avoidable_flops: Mapping[Cause, Array] = field(default_factory=dict)
    avoidable_bytes: Mapping[Cause, Array] = field(default_factory=dict)
    last_rows: bool = False
    """Whether it sees the last position of each prompt alone, handed over as a slice (LM head)."""
    shape: Shape | None = None
    heads: Heads | None = None

    @property
    def model_bytes(self) -> Array:
        return np.asarray(self.weight_bytes + self.kv_bytes)

    def at(self, chosen: Array) -> OperatorColumn:
        """The same for the steps that `chosen` picks."""
        return OperatorColumn(
            self.operator,
            self.group,
            self.count,
            self.dtype,
            self.rows[chosen],
            self.flops[chosen],
            self.weight_bytes[chosen],
            self.kv_bytes[chosen],
            self.activation_bytes[chosen],
            {cause: values[chosen] for cause, values in self.avoidable_flops.items()},
            {cause: values[chosen] for cause, values in self.avoidable_bytes.items()},
            self.last_rows,
            self.shape,
            self.heads,
        )


@dataclass(frozen=True)
class Demanded:
    """Steps with their work and the peak memory that each needs."""

    steps: Steps
    columns: tuple[OperatorColumn, ...]
    peak_bytes: Array
    collective_s: Array | None = None
    """Seconds that the ranks of a group exchange results in; None: one device works alone."""
    handed_bytes: Array | None = None
    """Of the hidden states that one kernel hands to the next; None where nothing tells their width."""

    @property
    def working_set_bytes(self) -> Array:
        """Bytes that each step must read and write."""
        return np.asarray(sum((column.model_bytes for column in self.columns), np.zeros(len(self.steps))))

    @property
    def written_bytes(self) -> Array:
        """Bytes of operands and intermediates, of which the system may have to find fresh pages for some."""
        total = np.zeros(len(self.steps))
        for column in self.columns:
            total += column.activation_bytes + sum(column.avoidable_bytes.values(), np.zeros(len(self.steps)))
        return total

    @property
    def exchanged_s(self) -> Array:
        return np.zeros(len(self.steps)) if self.collective_s is None else self.collective_s

    def at(self, chosen: Array) -> Demanded:
        """Those that `chosen` picks."""
        columns = tuple(column.at(chosen) for column in self.columns)
        collective_s = None if self.collective_s is None else self.collective_s[chosen]
        handed_bytes = None if self.handed_bytes is None else self.handed_bytes[chosen]
        return Demanded(self.steps.at(chosen), columns, self.peak_bytes[chosen], collective_s, handed_bytes)


def by_phase(steps: Steps) -> list[tuple[Phase, Array]]:
    return [(phase, chosen) for phase in PHASES if (chosen := steps.prefill == (phase == "prefill")).any()]


def octaves(steps: Steps) -> Array:
    """(batch, query, depth) of each step, in octaves: [n, 3]."""
    return np.log2(np.stack([steps.batch, steps.query, steps.depth], axis=1).astype(np.float64))
