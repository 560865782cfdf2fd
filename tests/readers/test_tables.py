"""A column-wise table returns the rows it was made of, with defaults for missing columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from profiler.readers.columns import Table


@dataclass(frozen=True)
class Fruit:
    name: str
    weight_g: float | None
    seeds: int = 3
    tags: tuple[str, ...] = ()


APPLE, PEAR = Fruit("apple", 150.0, tags=("red",)), Fruit("pear", None, 5)


def test_rows_are_unchanged() -> None:
    table = Table.of(Fruit, [APPLE, PEAR])
    assert (len(table), table[1], list(table), table.first(1)) == (2, PEAR, [APPLE, PEAR], [APPLE])
    assert table.as_dicts()[1] == {"name": "pear", "weight_g": None, "seeds": 5, "tags": ()}
    assert (len(Table.of(Fruit, [])), list(Table.of(Fruit, []))) == (0, [])


def test_a_missing_column_has_the_default() -> None:
    table = Table(Fruit, {"name": ["apple", "pear"], "weight_g": [150.0, None]})
    assert list(table) == [Fruit("apple", 150.0), Fruit("pear", None)]
    assert table[0] == Fruit("apple", 150.0)
    assert table.column("tags") == [(), ()]
    assert np.array_equal(table.numbers("seeds"), [3.0, 3.0])
    assert not table.filled("tags").any()
    with pytest.raises(KeyError):
        Table(Fruit, {"name": ["apple"]}).column("weight_g")


def test_none_is_zero_and_absent() -> None:
    table = Table.of(Fruit, [APPLE, PEAR])
    assert np.array_equal(table.numbers("weight_g"), [150.0, 0.0])
    assert table.filled("tags").tolist() == [True, False]
