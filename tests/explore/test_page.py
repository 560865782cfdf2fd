"""The page of `explore`: small, without connections, and with the figures of `count` at any setting."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profiler.counting.count import count
from profiler.explore.command import explore_document
from profiler.explore.document import ExploreDocument
from profiler.explore.page import explore_page

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
REFERENCE = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-xeon-float32"


@pytest.fixture(scope="module")
def document() -> ExploreDocument:
    return explore_document("mistral-7b-v0.1", ["T4", "H100 SXM"])


def test_it_has_every_format_and_opens_offline(document: ExploreDocument) -> None:
    page = explore_page(document)
    assert {item.quant for item in document.precisions} >= {"none", "nf4", "int8", "fp8"}
    assert len(page) < 1_000_000
    assert not re.search(r"https?://(?!www\.w3\.org)|@import|url\(|fetch\(|XMLHttpRequest|\beval\b|new Function", page)
    assert "default-src 'none'" in html.unescape(page)
    # 4-bit weights with their scales: 4.5 bits a weight in the linears of the blocks, and a head in 16.
    weights = {item.quant: item.weight_bytes for item in document.precisions}
    assert weights["none"] == pytest.approx(2 * 7_241_732_096, rel=1e-6)
    assert 3.2 < weights["none"] / weights["nf4"] < 3.8


def test_names_are_escaped(tmp_path: Path) -> None:
    document = explore_document("gpt2", ["T4"], ["none"])
    page = explore_page(type(document)(**{**vars(document), "model": "</script><b>x"}))
    assert "</script><b>" not in page
    assert json.loads(re.findall(r'id="data">(.*?)</script>', page)[0])["model"] == "</script><b>x"


def test_the_command(roofscope: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    found = roofscope("explore", "smollm2-135m", "--gpu", "T4", "--run", str(REFERENCE), "--out", str(out))
    assert found.code == 0, found.err
    text = out.read_text()
    assert '"measured":[{"phase":"' in text
    assert "smollm2-135m, float32, random weights" not in found.err
    for options, words in ((["--gpu", "H1000"], "no GPU is called"), (["--quant", "int3"], "int3")):
        refused = roofscope("explore", "smollm2-135m", *options)
        assert refused.code == 2
        assert words in refused.err


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="no chromium on this machine")
@pytest.mark.parametrize(("batch", "prompt", "context"), [(1, 512, 512), (8, 128, 2048), (64, 2048, 96)])
def test_a_browser_shows_what_count_says(
    batch: int, prompt: int, context: int, document: ExploreDocument, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(explore_page(document), encoding="utf-8")
    address = f"{file.as_uri()}#b={batch}&p={prompt}&c={context}&q=none&g=T4"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
    done = subprocess.run([BROWSER, *options, address], capture_output=True, text=True, timeout=90, check=True)
    assert "CONSOLE" not in done.stderr
    value = r'<td[^>]*data-value="([^"]+)">[^<]*</td>'
    rows = re.findall(rf"<tr><td>(prefill|decode)</td>{value}{value}", done.stdout)
    assert len(rows) == 2
    for phase, flops, nbytes in rows:
        step = count("mistral-7b-v0.1", phase=phase, batch=batch, prompt=prompt if phase == "prefill" else context)
        assert float(flops) == float(step.work.model_flops)
        assert float(nbytes) == float(step.work.model_bytes)
