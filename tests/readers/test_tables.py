"""Rows as columns: the same values, and what is not there is its default."""

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


def test_rows_come_back_as_they_were() -> None:
    table = Table.of(Fruit, [APPLE, PEAR])
    assert (len(table), table[1], list(table), table.first(1)) == (2, PEAR, [APPLE, PEAR], [APPLE])
    assert table.as_dicts()[1] == {"name": "pear", "weight_g": None, "seeds": 5, "tags": ()}
    assert (len(Table.of(Fruit, [])), list(Table.of(Fruit, []))) == (0, [])


def test_a_column_that_is_missing_has_the_default() -> None:
    table = Table(Fruit, {"name": ["apple", "pear"], "weight_g": [150.0, None]})
    assert list(table) == [Fruit("apple", 150.0), Fruit("pear", None)]
    assert table[0] == Fruit("apple", 150.0)
    assert table.column("tags") == [(), ()]
    assert np.array_equal(table.numbers("seeds"), [3.0, 3.0])
    assert not table.told("tags").any()
    with pytest.raises(KeyError):
        Table(Fruit, {"name": ["apple"]}).column("weight_g")


def test_none_is_no_number_and_nothing_told() -> None:
    table = Table.of(Fruit, [APPLE, PEAR])
    assert np.array_equal(table.numbers("weight_g"), [150.0, 0.0])
    assert table.told("tags").tolist() == [True, False]
