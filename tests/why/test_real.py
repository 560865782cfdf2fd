"""The page of real scripts has their answers, and `why` finds the causes in its fast scripts."""

from __future__ import annotations

from pathlib import Path

import pytest
from real.__main__ import table
from real.corpus import saved_answers, scripts
from real.runs import run_why

SCRIPTS = {script.name: script for script in scripts()}


def test_the_page_has_the_table() -> None:
    page = Path(__file__).parents[2] / "docs/reference/why-corpus.md"
    assert table(saved_answers()) in page.read_text(), "run `python -m tests.why.real table`"


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("name", ["embed_padded", "embed_notes", "chat"])
@pytest.mark.usefixtures("gguf_file")
def test_the_cause_comes_first(name: str) -> None:
    verdict = run_why(SCRIPTS[name]).verdict(SCRIPTS[name])
    assert verdict.first
    assert not verdict.false
