"""A run waits for busy neighbours, and its first sentence says how far they disturbed the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from profiler.effort import Effort
from profiler.facts.run_facts import Facts
from profiler.facts.telemetry import BusyProcess, Contention
from profiler.judge.judge_run import judge_run
from profiler.run.setup import wait_for_neighbours
from profiler.run.stages import RunBudget, Stages
from profiler.store.folder import read_document, read_facts, read_gathered
from tests.machines import HOST

RUN = Path(__file__).resolve().parents[2] / "runs" / "reference" / "smollm2-135m-xeon"
QUIET = Contention(0.0, 1)
BUSY = Contention(1.0, 1, (BusyProcess("backup", 7, 1.0),))


class Scripted:
    """Neighbours with given readings; the last one is repeated."""

    def __init__(self, *looks: Contention) -> None:
        self.looks = list(looks)

    def look(self) -> Contention:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


class Listening:
    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each wait between two looks, which take no time here."""
    seconds: list[float] = []
    monkeypatch.setattr("profiler.run.setup.time", SimpleNamespace(sleep=seconds.append))
    return seconds


def waited(total_s: float, *looks: Contention) -> tuple[Sequence[Contention], list[str]]:
    listener = Listening()
    stages = Stages(listener, HOST)  # type: ignore[arg-type]
    budget = RunBudget(HOST, total_s, Effort())
    return wait_for_neighbours(Scripted(*looks), stages, budget), listener.stages  # type: ignore[arg-type]


def test_a_neighbour_that_ends_is_waited_for(waits: list[float]) -> None:
    found, [stage] = waited(60.0, BUSY, BUSY, QUIET)
    assert found == []
    assert len(waits) == 2
    assert "1.0 of 1 core busy with backup (pid 7)" in stage
    assert "at most 6 s" in stage


def test_a_neighbour_that_stays_is_waited_for_a_tenth_of_the_budget(waits: list[float]) -> None:
    looks = [replace(BUSY, at_unix_s=float(number)) for number in range(9)]
    [found], _ = waited(10.0, *looks)
    assert found.at_unix_s == len(waits), "a look follows each wait"
    assert sum(waits) == 1.0


@pytest.fixture(scope="module")
def facts() -> Facts:
    document = read_document(RUN)
    return read_facts(RUN, document, read_gathered(RUN, document))


def busy(facts: Facts, cores: float) -> Facts:
    visits = {cell: [replace(visit, foreign_cores=cores) for visit in known] for cell, known in facts.visits.items()}
    return replace(facts, visits=visits, others={**facts.others, Contention: [replace(BUSY, of_cores=2)]})


def test_a_busy_machine_is_the_first_thing_said_and_no_saving_is_named(facts: Facts) -> None:
    quiet, disturbed = judge_run(facts), judge_run(busy(facts, 0.9))
    assert "This machine was busy: backup (pid 7) kept up to 1.0 of 2 cores busy in" in disturbed.answer[0]
    assert "no saving is named" in disturbed.answer[1]
    assert any("save" in sentence for sentence in quiet.answer)
    assert not any("would save" in sentence or "saves" in sentence for sentence in disturbed.answer[2:])
    assert {lever.basis for item in disturbed.evidence for lever in item.levers} <= {"tried"}


def test_the_systems_own_work_is_no_neighbour(facts: Facts) -> None:
    idle = replace(busy(facts, 0.02), others=facts.others)
    assert judge_run(idle).answer == judge_run(facts).answer
