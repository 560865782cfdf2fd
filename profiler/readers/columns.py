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
"""Values of one field, whatever that holds."""


@dataclass(frozen=True)
class Table(Generic[Row]):
    """Rows of a dataclass, which are made when they are asked for."""

    kind: type[Row]
    columns: Mapping[str, Column]
    """Of one length, by the fields of `kind`; one that is missing holds what that field does by default."""

    @classmethod
    def of(cls, kind: type[Row], rows: Iterable[Row]) -> Table[Row]:
        """Rows that are there already."""
        found = list(rows)
        return cls(kind, {item.name: [getattr(row, item.name) for row in found] for item in fields(kind)})

    def column(self, name: str) -> Column:
        """One field of all rows. Raises KeyError for one that is missing and has no default."""
        return self.columns[name] if name in self.columns else [self._default(name)] * len(self)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """One as an array, 0 where a row holds None; as floats: many a count is more than int64 holds."""
        if name not in self.columns:
            return np.full(len(self), self._default(name) or 0, dtype=np.float64)
        return np.array([value or 0 for value in self.columns[name]], dtype=np.float64)

    def told(self, name: str) -> NDArray[np.bool_]:
        """Which rows hold something there that is neither empty nor 0."""
        if name not in self.columns:
            return np.full(len(self), bool(self._default(name)))
        return np.array(list(map(bool, self.columns[name])), dtype=bool)

    def _default(self, name: str) -> object:
        return {item.name: item.default for item in fields(self.kind) if item.default is not MISSING}[name]

    def as_dicts(self) -> list[dict[str, object]]:
        """Each row by the names of its columns."""
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True)]

    def first(self, count: int) -> list[Row]:
        return [self[index] for index in range(min(count, len(self)))]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Row:
        return self.kind(**{name: values[index] for name, values in self.columns.items()})

    def __iter__(self) -> Iterator[Row]:
        return map(self.kind, *(self.column(item.name) for item in fields(self.kind)))
