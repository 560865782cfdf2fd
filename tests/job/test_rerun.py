"""A gate that measures its own new side."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import profiler
from profiler.grid import Cell
from profiler.job.rerun import open_cells
from profiler.record.run import read_document, read_gathered
from profiler.record.sides import read_side

REFERENCE = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-2-cores"
LIMITS = {"prefill": 0.03, "decode": 0.03}


def test_the_same_visits_leave_little_open_and_slower_ones_nothing() -> None:
    """Against itself a run has nothing slower; three times as slow, every cell is decided."""
    before = read_side(REFERENCE)
    visits = read_gathered(REFERENCE, read_document(REFERENCE)).visits
    slow = {
        cell: [
            replace(one, prefill_s=3 * (one.prefill_s or 0), decode_s=tuple(3 * step for step in one.decode_s),
                    more_prefill_s=tuple(3 * each for each in one.more_prefill_s))
            for one in known
        ]
        for cell, known in visits.items()
    }  # fmt: skip
    assert open_cells(before, LIMITS, slow) == []  # type: ignore[arg-type]
    alone: dict[Cell, list[object]] = dict([next(iter(visits.items()))])  # type: ignore[arg-type]
    assert set(open_cells(before, LIMITS, alone)) <= set(alone)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_grid_is_measured_again(tiny_folder: Path, tmp_path: Path, roofscope: Callable[..., object]) -> None:
    model, base, new = str(tiny_folder), tmp_path / "base", tmp_path / "new"
    profiler.profile(model, prompt_lens=[8], batch_sizes=[1, 2], new_tokens=8, budget_s=1, out=base)
    asked = ["--rerun", "--model", model, "--budget", "2", "--out", str(new), "--format", "json", "--quiet"]
    done = roofscope("gate", str(base), *asked)
    assert done.code in (0, 1, 3), done.err  # type: ignore[attr-defined]
    document = json.loads(done.out)  # type: ignore[attr-defined]
    assert document["comparable"]
    assert len(document["cells"]) == 4
    assert (tmp_path / "new" / "cells.csv").is_file()


def test_one_of_the_two_is_asked_for(roofscope: Callable[..., object]) -> None:
    for arguments in ([str(REFERENCE)], [str(REFERENCE), str(REFERENCE), "--rerun"]):
        done = roofscope("gate", *arguments)
        assert done.code == 2  # type: ignore[attr-defined]
        assert "give one of the two" in done.err  # type: ignore[attr-defined]
