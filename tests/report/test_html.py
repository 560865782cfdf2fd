"""report.html: one file, nothing fetched, everything escaped, usable from an empty run to ten thousand cells."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from profiler.record.run import Run, read_run
from profiler.report.html import html_report

RUN = Path(__file__).parent.parent / "data" / "run_schema_1"
VOID = {"meta", "link", "br", "line", "circle", "path", "polyline"}


class Page(HTMLParser):
    """Elements in order, those left open, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID or tag in ("circle", "path", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, tag: str, css_class: str = "") -> int:
        classes = [(attrs.get("class") or "").split() for name, attrs in self.tags if name == tag]
        return sum(not css_class or css_class in names for names in classes)


@pytest.fixture
def run() -> Run:
    return read_run(RUN)


def test_every_cell_is_a_point_with_its_words(run: Run) -> None:
    page = Page(html_report(run))
    phases = run.cells["phase"].value_counts()
    assert page.count("circle", "decode") == phases["decode"]
    assert page.count("path", "prefill") == phases["prefill"]
    text = " ".join(page.text)
    for row in run.cells.to_dict("records"):
        assert f"{row['phase']} {row['batch_size']} x {row['prompt_len']}: " in text
    assert run.document.answer[0] in text
    assert run.document.command in text


def test_points_lie_within_the_axes(run: Run) -> None:
    page = Page(html_report(run))
    for tag, attrs in page.tags:
        if tag == "circle":
            assert 100 <= float(attrs["cx"] or 0) <= 864
            assert 16 <= float(attrs["cy"] or 0) <= 410


def test_nothing_is_fetched(run: Run) -> None:
    text = html_report(run)
    page = Page(text)
    assert not page.open
    for _tag, attrs in page.tags:
        assert not {"src", "href", "srcset", "action"} & set(attrs)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|https?://", text)
    assert len(text) < 3_000_000


def test_names_are_escaped(run: Run) -> None:
    evil = "<script>alert(1)</script>"
    document = run.document.model_copy(
        update={"model": {**run.document.model, "id": evil}, "warnings": [evil], "command": f"roofscope run {evil}"}
    )
    text = html_report(replace(run, document=document))
    assert evil not in text
    assert Page(text).count("script") == 1
    assert evil in "".join(Page(text).text)


def test_an_empty_run_and_a_partly_failed_one(run: Run) -> None:
    nothing = run.cells.assign(status="failed", latency_s=float("nan"), regime=None)
    text = html_report(Run(run.folder, run.document.model_copy(update={"answer": []}), nothing))
    assert "nothing to conclude" in text
    assert "failed" in text
    part = run.cells.copy()
    part.loc[0, ["status", "latency_s"]] = ["oom", float("nan")]
    assert "oom" in html_report(Run(run.folder, run.document, part))
    one = run.cells[run.cells["phase"] == "decode"].head(1)
    assert Page(html_report(Run(run.folder, run.document, one))).count("circle", "decode") == 1


@pytest.mark.parametrize(("step_s", "drawn"), [(0.74e-3, 1), (0.0, 0), (-0.003, 0)])
def test_a_dispatch_that_cannot_be_is_not_drawn(run: Run, step_s: float, drawn: int) -> None:
    """Folders of earlier versions may hold one: on a busy machine a difference of two times came out below zero."""
    ceilings = {**run.document.ceilings, "dispatch_s": {"eager": {"decode": {"1": step_s}}}}
    document = run.document.model_copy(update={"ceilings": ceilings})
    assert Page(html_report(replace(run, document=document))).count("polyline", "dispatch") == drawn


def test_ten_thousand_cells(run: Run) -> None:
    many = pd.concat([run.cells] * (10_000 // len(run.cells)), ignore_index=True)
    many["batch_size"] = range(1, len(many) + 1)
    many["latency_s"] *= many["batch_size"] ** 0.5
    start = time.perf_counter()
    text = html_report(Run(run.folder, run.document, many))
    assert time.perf_counter() - start < 10
    assert Page(text).count("circle", "decode") == int((many["phase"] == "decode").sum())


def test_report_command(roofscope, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    import shutil

    folder = shutil.copytree(RUN, tmp_path / "run")
    found = roofscope("report", str(folder))
    assert found.code == 0, found.err
    assert (folder / "report.html").stat().st_size > 5000
    assert (folder / "split.png").exists()
