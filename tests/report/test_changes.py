"""Two runs on one page, and the sentences that compare them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import PRECISIONS, ROOT
from pages import Page

from profiler.comparison.command import compared
from profiler.comparison.page import html_changes, write_changes
from profiler.comparison.text import changes_section, changes_table, column_words, comparison_sentences
from profiler.report.terminal import print_sections, screen
from profiler.store.folder import read_run

RUNS = Path(__file__).parents[2] / "runs" / "reference"


@pytest.mark.slow
def test_the_page_holds_both(tmp_path: Path) -> None:
    before = read_run(shutil.copytree(PRECISIONS / "none", tmp_path / "none"))
    after = read_run(shutil.copytree(PRECISIONS / "nf4", tmp_path / "nf4"))
    text = write_changes(before, after).read_text(encoding="utf-8")
    page = Page(text)
    used = set(re.findall(r"url\(#([\w-]+)\)", text))
    assert any(name.startswith("h") for name in used), "terms that no thread executes are hatched"
    assert used <= {attrs.get("id") for _, attrs in page.tags}, "a fill without a definition is invisible"
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert links == ["../none/report.html", "report.html"]
    assert page.count("svg") == 4, "waterfall, two splits, both rooflines"
    assert "precision float32 -> bfloat16, nf4" in page.words
    assert "prefill 1 x 64" in page.words
    assert not page.open
    assert page.count("script") == 0


@pytest.mark.slow
def test_two_that_are_not_comparable_have_no_waterfall() -> None:
    xeon, epyc = (read_run(ROOT / "runs" / "reference" / f"smollm2-135m-{name}") for name in ("xeon", "zen4"))
    page = Page(html_changes(xeon, epyc, Path("/runs")))
    assert page.count("svg") == 3, "two splits, both rooflines"
    assert "Not comparable (device Intel(R) Xeon(R) Processor -> AMD EPYC)" in page.words


@pytest.mark.slow
def test_the_screen_says_whether_drift_is_taken_off_and_why_nothing_is_claimed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A cell visited once is inconclusive even if its interval is above 0, and its row says why.

    If the machine was 25 % faster, the report says that drift is taken off. If the drift is unknown, the report says
    that it is not taken off.
    """
    epyc, zen4 = (RUNS / f"smollm2-135m-{name}" for name in ("epyc", "zen4"))
    comparison = compared(epyc, zen4)
    assert any(item.low > 0 and item.verdict == "inconclusive" for item in comparison.changes)
    print_sections([changes_section(comparison)], screen())
    head, rows = capsys.readouterr().out.split("cell  ", 1)
    assert "drift is taken off" in " ".join(head.split())
    assert "inconclusive: the interval contains 0 and more than 3 %" in " ".join(head.split())
    assert rows.split("\n")[0].rstrip().endswith("reason")
    assert all(re.search(r"\+[1-9].*%.*inconclusive +one visit", row) for row in rows.split("\n") if "4 x 128" in row)
    still = replace(comparison, changes=tuple(replace(item, machine=0.0) for item in comparison.changes))
    assert "drift is not taken off" in column_words(still)
    assert "drift is taken off" in Page(html_changes(read_run(epyc), read_run(zen4), Path("/runs"))).words


def test_a_faster_precision_is_reported_with_the_terms_that_changed() -> None:
    """nf4 reads 4.6 times fewer weight bytes but converts them; the row of a decode has both terms."""
    comparison = compared(PRECISIONS / "none", PRECISIONS / "nf4")
    first = next(change for change in comparison.changes if change.asked.phase == "decode")
    assert first.terms["weights_s"] < 0
    assert sum(first.terms.values()) == pytest.approx(first.gained_s)
    assert len(changes_table(comparison).rows) == 8
    assert any("slower" in sentence or "faster" in sentence for sentence in comparison_sentences(comparison))


@pytest.mark.slow
def test_two_without_a_common_cell_get_no_page(roofscope: Callable[..., Any], tmp_path: Path) -> None:
    """Runs with different batches and prompts get their own reports, and one line instead of a page of changes."""
    names = ("smollm2-135m-zen4", "smollm2-135m-xeon-float32")
    one, other = (str(shutil.copytree(PRECISIONS.parent / name, tmp_path / name)) for name in names)
    outcome = roofscope("report", one, other)
    assert outcome.code == 0
    assert all((Path(run) / "report.html").exists() for run in (one, other))
    assert len(outcome.err.splitlines()) == 1
    assert "have no cell in common" in outcome.err
    assert not (Path(other) / "changes.html").exists()
