"""A gate: what passes, what fails, what is inconclusive, and the time that would decide it."""

import csv
import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sides import key_of, side, timed

from profiler.comparison.command import gate_document, thresholds
from profiler.comparison.command import gated as gated_files
from profiler.comparison.compare import compare_sides
from profiler.comparison.gate import Gate, gate
from profiler.comparison.gate_formats import budget_words, gate_github, gate_junit, gate_line, gate_rows
from profiler.errors import RequestError
from profiler.json_document import dumped, json_text

BATCHES = (1, 2, 4, 8, 16, 32)


def gated(changes: Sequence[float], half_width: float = 0.01, repetitions: int = 4, allowed: float = 0.03) -> Gate:
    """A gate over decodes that took longer by `changes`, each time known to +-half_width / sqrt(2)."""
    each = half_width / math.sqrt(2)
    before = side({key_of(batch): timed(0.01, each, repetitions) for batch in BATCHES[: len(changes)]})
    longer = zip(BATCHES, changes, strict=False)
    after = side({key_of(batch): timed(0.01 * (1 + change), each, repetitions) for batch, change in longer})
    return gate(compare_sides(before, after), {"decode": allowed})


CASES = list(csv.DictReader(Path(__file__).with_name("gates.csv").read_text().splitlines()))


@pytest.mark.parametrize("case", CASES, ids=[case["reason"] for case in CASES])
def test_cells_decide_alone_and_together(case: dict[str, str]) -> None:
    found = gated([float(change) for change in case["changes"].split()], float(case["half_width"]))
    assert found.outcome == case["outcome"]
    if case["last_cell"]:
        assert found.cells[-1].gate == case["last_cell"]


def test_no_repetitions_narrow_the_drift_of_the_machine() -> None:
    """Both runs drifted by 2 %: the limit is 5.7 %, for any number of repetitions."""
    still = timed(0.01, 0.03)
    for drift, endless in ((0.02, True), (0.0, False)):
        drifted = replace(still, drift=drift)
        found = gate(compare_sides(side({key_of(): drifted}), side({key_of(): drifted})), {"decode": 0.03})
        assert found.outcome == "inconclusive"
        assert math.isinf(found.more_s) == endless
        assert ("the machine itself drifted by as much as is allowed" in budget_words(found)) == endless
        assert "at the threshold" not in budget_words(found)


def test_a_wide_interval_is_inconclusive_and_names_the_missing_budget() -> None:
    """+-5 % about 0 against 3 %: (5 / 3)^2 = 2.8 times the four repetitions of a second each: 7.1 s more.

    Repetitions get half of a budget.
    """
    found = gated([0.0], half_width=0.05)
    assert found.outcome == "inconclusive"
    assert found.more_s == pytest.approx(4 * (0.05 / math.log(1.03)) ** 2 - 4, rel=0.02)
    assert budget_words(found).startswith("1 cell needs about 15 s more of --budget")
    # A cell that two repetitions of a second decide is judged from four on.
    assert gated([0.0], half_width=0.001, repetitions=2).more_s == 2


def test_at_the_threshold_itself_no_budget_decides() -> None:
    found = gated([0.03], half_width=0.02)
    assert math.isinf(found.more_s)
    assert "no budget helps" in budget_words(found)
    assert "drifted" not in budget_words(found)
    assert json.loads(json_text(dumped(gate_document(found))))["more_s"] is None


def test_no_format_decides_sides_that_are_not_comparable() -> None:
    """Twice as slow on another GPU is not a failure of a cell."""
    other = side({key_of(): timed(0.02)}, settings={"device": "another card"})
    found = gate(compare_sides(side({key_of(): timed(0.01)}), other), {"decode": 0.03})
    assert found.outcome == "not comparable"
    assert "device card -> another card; `roofscope compare --anyway`" in gate_line(found)
    suite = ElementTree.fromstring(gate_junit(found))[0]
    assert (suite.attrib["tests"], suite.attrib["failures"], suite.attrib["errors"]) == ("1", "0", "1")
    assert gate_github(found).count("::error") == 1
    document = json.loads(json_text(dumped(gate_document(found))))
    assert document["phases"] == document["cells"] == []


def test_one_repetition_each_is_no_verdict_on_a_single_cell() -> None:
    found = gated([0.2], repetitions=1)
    assert found.outcome == "inconclusive"
    assert [row[-1] for row in gate_rows(found)] == ["open: few repetitions"]


def test_thresholds_by_phase() -> None:
    assert thresholds("3%") == thresholds("0.03") == {"prefill": 0.03, "decode": 0.03}
    assert thresholds("decode=2.5%") == {"decode": 0.025}
    assert thresholds("decode=3%,prefill=5%") == {"decode": 0.03, "prefill": 0.05}
    for twice in ("decode=3%,decode=50%", "3%,50%", "3%,decode=50%"):
        with pytest.raises(RequestError, match="has two limits"):
            thresholds(twice)
    for wrong in ("fast", "300%", "-3%", "0", "nan", "middle=3%", ""):
        with pytest.raises(RequestError):
            thresholds(wrong)
    table = Path(__file__).parents[1] / "data" / "foreign" / "table.csv"
    with pytest.raises(RequestError, match="no prefill in common"):
        gated_files(table, table, "prefill=3%")


@pytest.mark.parametrize("changes", [[0.0, 0.0, 0.0, 0.0], [0.05] * 4, [0.02, 0.04, 0.02, 0.04]])
def test_every_format_says_the_same(changes: list[float]) -> None:
    found = gated(changes)
    document = json.loads(json_text(dumped(gate_document(found))))
    suite = ElementTree.fromstring(gate_junit(found))[0]
    failures = [case for case in suite if case.find("failure") is not None]
    level = gate_github(found).split(" ")[0]
    assert document["outcome"] == found.outcome
    assert bool(failures) == (found.outcome == "slower")
    assert int(suite.attrib["failures"]) == len(failures)
    assert int(suite.attrib["tests"]) == len(list(suite))
    assert level == {"pass": "::notice", "slower": "::error", "inconclusive": "::warning"}[found.outcome]


def test_names_cannot_break_out_of_a_format() -> None:
    evil = '<b>&"\n::error::\u2028%'
    before = side({key_of(engine=evil): timed(0.01)})
    found = gate(compare_sides(before, side({key_of(engine=evil): timed(0.02)})), {"decode": 0.03})
    ElementTree.fromstring(gate_junit(found))
    assert all(line.startswith("::") for line in gate_github(found).split("\n"))
    assert "%0A" in gate_github(found)
