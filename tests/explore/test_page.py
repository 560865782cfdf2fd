"""The page of `explore`: small, without connections, and with the figures of `count` at any setting."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profiler.explore.command import explore_document, explore_page
from profiler.explore.document import ExploreDocument
from profiler.report.write import html_report
from profiler.store.folder import read_run

REFERENCE = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-xeon-float32"


@pytest.fixture(scope="module")
def document() -> ExploreDocument:
    return explore_document("mistral-7b-v0.1", ["T4", "H100 SXM"])


def test_it_has_every_format_and_opens_offline(document: ExploreDocument) -> None:
    page = explore_page(document)
    assert {item.quant for item in document.entries} >= {"none", "nf4", "int8", "fp8"}
    assert len(page) < 1_000_000
    assert not re.search(r"https?://(?!www\.w3\.org)|@import|url\(|fetch\(|XMLHttpRequest|\beval\b|new Function", page)
    assert "default-src 'none'" in html.unescape(page)
    # 4-bit weights with their scales: 4.5 bits per weight in the linears of the blocks, and a head in 16.
    weights = {item.quant: item.weight_bytes for item in document.entries if item.ranks == 1}
    assert weights["none"] == pytest.approx(2 * 7_241_732_096, rel=1e-6)
    assert 3.2 < weights["none"] / weights["nf4"] < 3.8


def content(page: str) -> Any:
    return json.loads(re.findall(r'id="data">(.*?)</script>', page, re.S)[0])


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_has_its_cells_and_forecasts_between_them(roofscope: Callable[..., Any], tmp_path: Path) -> None:
    """The page is in the run's folder and linked from its report; its forecasts surround the measured cells."""
    folder = tmp_path / "run"
    shutil.copytree(REFERENCE, folder)
    assert 'href="explore.html"' not in html_report(read_run(folder))
    found = roofscope("explore", "smollm2-135m", "--gpu", "T4", "--run", str(folder))
    assert found.code == 0, found.err
    assert 'href="explore.html"' in (folder / "report.html").read_text(encoding="utf-8")
    page = content((folder / "explore.html").read_text(encoding="utf-8"))
    assert [gpu["source"] for gpu in page["gpus"]] == ["measured", "datasheet"]
    cells, forecasts = page["run"]["cells"], page["run"]["forecasts"]
    measured = read_run(folder).measured
    assert [cell["seconds"] for cell in cells] == [result.latency_s for result in measured]
    assert {cell["length"] for cell in cells} <= set(page["lengths"])
    assert all(step["low_s"] <= step["seconds"] <= step["high_s"] for step in forecasts)
    assert any(step["between"] for step in forecasts)
    # At a measured setting, the range of the fitted forecast contains or nearly contains the measured time.
    by_key = {(step["phase"], step["batch"], step["length"]): step for step in forecasts}
    for cell in cells:
        step = by_key[cell["phase"], cell["batch"], cell["length"]]
        assert 0.7 * step["low_s"] < cell["seconds"] < 1.3 * step["high_s"]
    refused = roofscope("explore", "gpt2", "--run", str(folder))
    assert refused.code == 2
    assert "is a run of smollm2-135m" in refused.err


def test_the_command(roofscope: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    found = roofscope("explore", "smollm2-135m", "--gpu", "T4", "--out", str(out))
    assert found.code == 0, found.err
    page = content(out.read_text(encoding="utf-8"))
    assert (page["model"], [gpu["source"] for gpu in page["gpus"]]) == ("smollm2-135m", ["datasheet"])
    for options, words in ((["--gpu", "H1000"], "no GPU is called"), (["--quant", "int3"], "int3")):
        refused = roofscope("explore", "smollm2-135m", *options)
        assert refused.code == 2
        assert words in refused.err
