"""report.html: one file that fetches nothing and escapes everything, from an empty run to ten thousand cells."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import ROOT, old_run, whole_run, with_document, with_results
from pages import Page

from profiler.judge.breakdown import TERMS
from profiler.report.roofline_data import roof_lines
from profiler.report.write import html_report, write_reports
from profiler.store.folder import Run, read_run


@pytest.fixture
def run() -> Run:
    return old_run()


@pytest.fixture(scope="module")
def old_page() -> str:
    return html_report(old_run())


@pytest.fixture(scope="module")
def whole_page() -> str:
    return html_report(whole_run())


def test_every_cell_is_a_point_with_a_tooltip(whole_page: str) -> None:
    run, page = whole_run(), Page(whole_page)
    for phase in ("prefill", "decode"):
        assert page.count("g", phase) == sum(result.phase == phase for result in run.measured)
    for result in run.results:
        assert f"{result.key.name}: " in page.words
    assert run.document.answer[0] in page.words
    assert run.document.command in page.words


def test_the_roofline_says_which_line_is_which(whole_page: str) -> None:
    run = whole_run()
    figure = Page(re.findall(r"<svg.*?</svg>", whole_page, re.DOTALL)[0])
    assert figure.count("g", "roof") == len(roof_lines(run))
    shown = [words for words in figure.text if words.strip()]
    for line in roof_lines(run):
        assert shown.count(line.label) == 2, "in the legend, and on the line itself"
    assert "achieved speed" in shown
    assert "arithmetic intensity, model FLOPs per model byte" in shown
    assert {"prefill", "decode"} <= set(shown)


def test_the_picture_follows_the_page(old_page: str) -> None:
    """The picture scales with the page, down to 9 px letters, and uses the page's colours."""
    [figure] = re.findall(r"<svg.*?</svg>", old_page, re.DOTALL)
    [root] = [attrs for tag, attrs in Page(figure).tags if tag == "svg"]
    assert set(root) == {"viewbox", "class", "style", "role", "aria-label"}
    assert re.fullmatch(r"min-width: \d{3}px", root["style"] or "")
    assert not re.search(r"#[0-9a-f]{6}", figure)
    assert "var(--blue)" in figure
    ids = re.findall(r' id="([^"]+)"', figure)
    assert len(ids) == len(set(ids))


def test_every_term_has_a_colour_and_a_runs_terms_are_in_the_legend(old_page: str) -> None:
    """A term without a rule in the page's style would be an invisible bar."""
    [style] = re.findall(r"<style>.*?</style>", old_page, re.DOTALL)
    classes = {name for _tag, attrs in Page(old_page).tags for name in (attrs.get("class") or "").split()}
    rules = {f"p-{term.removesuffix('_s')}" for term in TERMS}
    assert all(f".{name} {{ background: " in style for name in rules)
    # An eager run on one device converts, pads and fetches nothing, and has no engine term.
    present = ("weights", "kv", "compute", "kernel", "avoidable", "dispatch", "unexplained")
    assert {name for name in classes if name.startswith("p-")} == {f"p-{name}" for name in present}


def test_nothing_is_fetched(old_page: str) -> None:
    page = Page(old_page)
    assert not page.open
    for _tag, attrs in page.tags:
        assert not {"src", "srcset", "action"} & set(attrs)
        assert str(attrs.get("href", "#")).startswith("#")
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|https?://", old_page)
    assert len(old_page) < 3_000_000


def test_an_empty_run_and_a_partly_failed_one(run: Run, tmp_path: Path) -> None:
    nothing = with_results(run, lambda result: replace(result, status="failed", latency_s=math.nan, regime=None))
    nothing = replace(with_document(nothing, answer=(), evidence=()), folder=tmp_path)
    write_reports([nothing])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "nothing to conclude" in text
    assert "failed" in text
    assert not list(tmp_path.glob("*.png"))
    part = replace(run, results=(replace(run.results[0], status="oom", latency_s=math.nan), *run.results[1:]))
    assert "oom" in html_report(part)
    one = replace(run, results=tuple(result for result in run.results if result.phase == "decode")[:1])
    assert Page(html_report(one)).count("g", "decode") == 1


def test_the_answers_lines_are_code_to_copy_and_the_roofline_is_first() -> None:
    """The line of the tried change, and the run's own command with the engine that measures it."""
    run = read_run(ROOT / "runs/reference/mistral-7b-h100-default")
    page = html_report(run)
    code = [re.sub("<[^>]*>", "", line) for line in re.findall(r'<pre class="code">(.*?)</pre>', page)]
    assert "torch.backends.cuda.enable_cudnn_sdp(False)" in code
    [measuring] = [line for line in code if line.endswith("--engine eager,graph")]
    assert measuring.startswith("roofscope run mistral-7b-v0.1 ")
    assert measuring.count("--engine") == 1
    titles = re.findall(r"<h2>([^<]+)", page)
    assert [title.strip() for title in titles[:3]] == ["To change it", "Roofline", "Cells"]
    assert "15.3\u00a0ms" in page, "no line ends between a number and its unit"
