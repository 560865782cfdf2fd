"""No type of the scoreboard gets worse, and at least 120 agree exactly with torch's counter."""

from __future__ import annotations

import pytest
import scoreboard


@pytest.mark.slow
def test_no_type_gets_worse() -> None:
    table = scoreboard.read_table()
    assert set(scoreboard.types()) <= set(table), "a new type: run tests/counting/scoreboard.py"
    worse = {}
    equal = 0
    for name in scoreboard.types():
        result, detail = scoreboard.score(name)
        equal += result == "equal"
        if scoreboard.RANK[result] > scoreboard.RANK[table[name][0]]:
            worse[name] = f"{table[name][0]} -> {result}: {detail}"
    assert worse == {}
    assert equal >= 120


def test_every_difference_has_a_name() -> None:
    for name, (result, detail) in scoreboard.read_table().items():
        assert result == "equal" or detail, name
