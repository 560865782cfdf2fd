"""A column-wise table for large files, where one object per row would dominate the run time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = TypeVar("Row", bound="DataclassInstance")
Column = Sequence[Any]
"""The values of one field, of any type."""


@dataclass(frozen=True)
class Table(Generic[Row]):
    """Rows of a dataclass stored as columns; a row is created on access."""

    kind: type[Row]
    columns: Mapping[str, Column]
    """Columns of one length, by field of `kind`; a missing column has the field's default in every row."""

    @classmethod
    def of(cls, kind: type[Row], rows: Iterable[Row]) -> Table[Row]:
        """A table of existing rows."""
        rows = list(rows)
        return cls(kind, {item.name: [getattr(row, item.name) for row in rows] for item in fields(kind)})

    def column(self, name: str) -> Column:
        """One field of all rows. Raises KeyError if the column is missing and the field has no default."""
        return self.columns[name] if name in self.columns else [self._default(name)] * len(self)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """One field as an array, 0 for None. Floats, since counts may exceed int64."""
        if name not in self.columns:
            return np.full(len(self), self._default(name) or 0, dtype=np.float64)
        return np.array([value or 0 for value in self.columns[name]], dtype=np.float64)

    def filled(self, name: str) -> NDArray[np.bool_]:
        """bool[n]: the rows in which the field is neither empty, 0 nor None."""
        if name not in self.columns:
            return np.full(len(self), bool(self._default(name)))
        return np.array(list(map(bool, self.columns[name])), dtype=bool)

    def _default(self, name: str) -> object:
        return {item.name: item.default for item in fields(self.kind) if item.default is not MISSING}[name]

    def as_dicts(self) -> list[dict[str, object]]:
        """Each row as a dict by column name."""
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True)]

    def first(self, count: int) -> list[Row]:
        """At most `count` rows, from the first."""
        return [self[index] for index in range(min(count, len(self)))]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Row:
        return self.kind(**{name: values[index] for name, values in self.columns.items()})

    def __iter__(self) -> Iterator[Row]:
        return map(self.kind, *(self.column(item.name) for item in fields(self.kind)))
