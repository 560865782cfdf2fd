"""Words: each has a meaning of two lines at most, and a run adds its own figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.errors import RequestError
from profiler.record.run import read_run
from profiler.report.glossary import TERMS, explain, footnotes

RUN = Path(__file__).parent.parent / "data" / "run_schema_1"


@pytest.mark.parametrize("name", TERMS)
def test_a_term_fits_two_lines(name: str) -> None:
    run = read_run(RUN)
    assert len(TERMS[name].meaning) <= 130
    assert len(explain(name, run).splitlines()) <= 2


def test_figures_are_those_of_the_run() -> None:
    run = read_run(RUN)
    fastest = run.cells[run.cells["phase"] == "decode"]["latency_s"].min()
    assert f"{1e6 * fastest:.0f} us" in explain("decode", run)
    regimes = set(run.cells["regime"])
    assert all(any(line.startswith(f"**{regime}**") for line in footnotes(run)) for regime in regimes)


def test_an_unknown_word_names_a_near_one() -> None:
    with pytest.raises(RequestError, match="roofline"):
        explain("rooflne")
