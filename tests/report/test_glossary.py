"""Words: each has a meaning of two lines at most, and a run adds its own figures."""

from __future__ import annotations

import pytest
from made_runs import old_run

from profiler.errors import RequestError
from profiler.report.glossary import TERMS, explain, footnotes


@pytest.mark.parametrize("name", TERMS)
def test_a_term_fits_two_lines(name: str) -> None:
    run = old_run()
    assert len(TERMS[name].meaning) <= 130
    assert len(explain(name, run).splitlines()) <= 2


def test_figures_are_those_of_the_run() -> None:
    run = old_run()
    fastest = min(result.latency_s for result in run.measured if result.phase == "decode")
    assert f"{1e6 * fastest:.0f} us" in explain("decode", run)
    regimes = {result.regime for result in run.measured}
    assert all(any(line.startswith(f"**{regime}**") for line in footnotes(run)) for regime in regimes)


def test_an_unknown_word_names_a_near_one() -> None:
    with pytest.raises(RequestError, match="roofline"):
        explain("rooflne")
