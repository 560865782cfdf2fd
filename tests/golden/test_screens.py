"""Screens are as last reviewed. For an intended change, run `python -m tests.golden` and review the diff."""

from __future__ import annotations

from pathlib import Path

import pytest

from .screens import COMMANDS, FOLDER, screen_of, working_folder

LONG = ("judge-h100", "judge-h100-engines")
"""Runs with many cells: each takes two seconds to judge."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.ci] if name in LONG else ()) for name in COMMANDS]
)
def test_a_screen_is_as_it_was_reviewed(name: str, tmp_path: Path) -> None:
    with working_folder(tmp_path):
        screen = screen_of(COMMANDS[name])
    assert f"$ roofscope {COMMANDS[name]}\n\n{screen}" == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_no_screen_is_left_over() -> None:
    assert {file.stem for file in FOLDER.glob("*.txt")} == set(COMMANDS)
