"""A new fact is one class: it is stored, read, and found among the others without further edits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from profiler.facts.fact import Fact
from profiler.facts.merged import MergedFacts
from profiler.grid.cells import Cell, CellKey
from profiler.store.samples import fact_of, line_of

KEY = CellKey("decode", Cell(batch_size=2, prompt_len=16, new_tokens=8))


@dataclass(frozen=True)
class Warmth(Fact, kind="warmth"):
    """The temperature of a made-up sensor in one cell."""

    key: CellKey
    degrees: float


def test_it_is_stored_read_and_merged() -> None:
    import json

    facts = [Warmth(KEY, 41.0), Warmth(KEY, 43.5)]
    merged = MergedFacts()
    for fact in facts:
        record = json.loads(line_of(fact))
        assert (record["kind"], record["batch_size"], record["phase"]) == ("warmth", 2, "decode")
        merged.add(fact_of(record))
    assert merged.every(Warmth) == facts
    assert merged.latest(Warmth) == facts[-1]
    assert merged.latest_by(Warmth, "key") == (facts[-1],)


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(KeyError):
        fact_of({"kind": "coldness", "degrees": 1.0})
