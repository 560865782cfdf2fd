"""The seconds of loads and of reading weights, and the sentence of an answer without a finding, by hand."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
from torch import nn

from profiler.why_slow import costs
from profiler.why_slow.findings import CallFloor, TriedChange, Why
from profiler.why_slow.observations import Call, CallSettings, Load, Observations
from profiler.why_slow.render import why_sentences

SEEN = Observations(
    "s.py", 12.0, (Call(0, "generate", "Llama", 1, 8, 0, 4, 4, 10.0, "s.py:4", CallSettings()),), (), 0.0, "", 0.0
)
TRIED = TriedChange("threads", [0], [(1.0, 1.0)] * 3, "s.py:4", "all threads", "use one", "1 x 8")


def test_loads_that_overlap_count_once() -> None:
    """From 0 to 3 s, from 2 to 5 s, and 4 s at an unknown time."""
    loads = (Load("a", 3.0, "s.py:1", 0.0), Load("b", 3.0, "s.py:1", 2.0), Load("c", 4.0, "s.py:2"))
    assert replace(SEEN, loads=loads).loads_s == 9.0


def test_reading_weights_is_that_of_a_part_if_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 weights of 4 bytes take 2 s; a quarter of them takes as long, so that all take 8 s."""
    model = nn.Linear(8, 8, bias=False)
    monkeypatch.setattr(costs, "now_s", Mock(side_effect=[0.0, 2.0, 5.0, 7.0]))
    assert costs.read_weights_s(model) == 2.0
    monkeypatch.setattr(costs, "_MOST_BYTES", 64)
    assert costs.read_weights_s(model) == 8.0
    assert costs.read_weights_s(None) is None
    monkeypatch.setattr(costs.tempfile, "TemporaryDirectory", Mock(side_effect=OSError("No space left on device")))
    assert costs.read_weights_s(model) is None


@pytest.mark.parametrize(
    ("tried", "not_tried", "floor_s", "start", "share"),
    [
        (2, (), 8.0, "Nothing to change of 2 tried: 80 %", ""),
        (2, (), 4.0, "Nothing to change of 2 tried, and the floor is", "40 %"),
        (0, (), 4.0, "Nothing to change, and the floor is", "40 %"),
        (1, ("dtype: no memory",), 4.0, "Nothing was found in 1 trial, and others could not be made", ""),
        (0, ("dtype: no memory",), 4.0, "Nothing could be tried", ""),
    ],
)
def test_an_answer_without_a_finding_says_what_was_tried(
    tried: int, not_tried: tuple[str, ...], floor_s: float, start: str, share: str
) -> None:
    """The calls take 10 s; from 70 % of that on, the floor is near."""
    *_, last = why_sentences(Why(SEEN, (), CallFloor(floor_s, 0.1), (TRIED,) * tried, not_tried))
    assert last.startswith(start)
    assert share in last
