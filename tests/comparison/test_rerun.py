"""`gate --rerun`: a gate that measures its new side itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from machines import HOST
from slowed_visits import slowed

import profiler
from profiler.comparison import rerun
from profiler.comparison.rerun import _refuse_another_machine, open_cells
from profiler.comparison.side import read_side
from profiler.errors import RequestError
from profiler.facts.visits import Visit
from profiler.grid.cells import Cell
from profiler.grid.ranges import make_grid
from profiler.loading.prompts import Prompts
from profiler.measure.rounds import Plan
from profiler.measure.sweep import VisitContext
from profiler.store.folder import read_document, read_gathered

REFERENCE = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-2-cores"
LIMITS = {"prefill": 0.03, "decode": 0.03}


def test_the_same_visits_leave_little_open_and_slower_ones_nothing() -> None:
    """Compared with itself, a run has no slower cell. If it is three times as slow, every cell is decided."""
    before = read_side(REFERENCE)
    visits = read_gathered(REFERENCE, read_document(REFERENCE)).visits
    slow = {cell: [slowed(visit, 3.0) for visit in known] for cell, known in visits.items()}
    assert open_cells(before, LIMITS, slow) == []  # type: ignore[arg-type]
    one_cell: dict[Cell, list[object]] = dict([next(iter(visits.items()))])  # type: ignore[arg-type]
    assert set(open_cells(before, LIMITS, one_cell)) <= set(one_cell)  # type: ignore[arg-type]


def test_open_cells_are_visited_in_rounds_after_those_of_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells of a round share the drift of the machine, so no two rounds may have the same number."""
    recorded = read_gathered(REFERENCE, read_document(REFERENCE)).visits
    known = {cell: visits[0] for cell, visits in list(recorded.items())[:3]}

    def swept(*args: object, **named: object) -> Iterator[Visit]:
        yield from (replace(visit, round=number) for number in range(2) for visit in known.values())

    def visited(_engine: object, cell: Cell, number: int, bench: VisitContext) -> Visit:
        assert bench.own_bytes == own_bytes
        return replace(known[cell], round=number)

    still_open = iter([list(known), list(known), []])
    monkeypatch.setattr(rerun, "sweep", swept)
    monkeypatch.setattr(rerun, "visit", visited)
    monkeypatch.setattr(rerun, "open_cells", lambda *args: next(still_open))
    machine, own_bytes = SimpleNamespace(now_s=lambda: 0.0), {"eager": 264_000_000}
    plan = Plan(make_grid([64], [1], 8), 1e9)
    engines = {cell.engine: None for cell in known}
    found = rerun.visits_of_open(
        read_side(REFERENCE), LIMITS, engines, plan, machine=machine, prompts=Prompts(8), own_bytes=own_bytes
    )  # type: ignore[arg-type]
    rounds: dict[int, set[Cell]] = {}
    for visit in found:
        assert isinstance(visit, Visit)
        assert visit.cell not in rounds.setdefault(visit.round, set())
        rounds[visit.round].add(visit.cell)
    assert list(rounds) == [0, 1, 2, 3]
    assert all(cells == set(known) for cells in rounds.values())


@pytest.mark.slow
def test_the_grid_is_measured_again(tiny_folder: Path, tmp_path: Path, roofscope: Callable[..., object]) -> None:
    model, base, new = str(tiny_folder), tmp_path / "base", tmp_path / "new"
    profiler.profile(model, prompt_lens=[8], batch_sizes=[1, 2], new_tokens=8, budget_s=1, out=base)
    arguments = ["--rerun", "--model", model, "--budget", "2", "--out", str(new), "--format", "json", "--quiet"]
    done = roofscope("gate", str(base), *arguments)
    assert done.code in (0, 1, 3), done.err  # type: ignore[attr-defined]
    document = json.loads(done.out)  # type: ignore[attr-defined]
    assert document["comparable"]
    assert len(document["cells"]) == 4
    assert (tmp_path / "new" / "cells.csv").is_file()


def test_a_base_of_another_machine_is_refused_before_anything_is_measured() -> None:
    before = read_side(REFERENCE)
    there, here = (replace(before, settings={"device": name}) for name in ("a card", HOST.info.name))
    with pytest.raises(RequestError, match=r"is of another machine: device a card -> .* Measure a base on this one"):
        _refuse_another_machine(REFERENCE, there, HOST)
    _refuse_another_machine(REFERENCE, here, HOST)
