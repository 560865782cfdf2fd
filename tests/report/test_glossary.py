"""Glossary: each term has at most two lines, and a run adds its own figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_runs import key, old_run, result

from profiler.errors import RequestError
from profiler.report.glossary import GLOSSARY, explanation, footnotes


def test_a_term_fits_two_lines() -> None:
    run = old_run()
    for name, term in GLOSSARY.items():
        assert len(term.meaning) <= 130, name
        assert len(explanation(name, run).splitlines()) <= 2, name


def test_figures_are_those_of_the_run() -> None:
    run = old_run()
    fastest = min(result.latency_s for result in run.measured if result.phase == "decode")
    assert f"{1e6 * fastest:.0f} us" in explanation("decode", run)
    regimes = {result.regime for result in run.measured}
    assert all(regime in dict(footnotes(run)) for regime in regimes)


def test_an_unknown_word_names_a_near_one() -> None:
    with pytest.raises(RequestError, match="roofline"):
        explanation("rooflne")


def test_a_tail_has_its_figures_or_the_samples_that_it_needs() -> None:
    results = [result(key("decode", batch), seconds, p90_s=1.1 * seconds) for batch, seconds in ((1, 0.02), (2, 0.03))]
    text = explanation("TPOT", replace(old_run(), results=tuple(results)))
    assert "p50 20.0 ms to 30.0 ms in decode; p90 22.0 ms to 33.0 ms in decode" in text
    assert text.endswith("p99 needs 100 samples, no cell has so many")
