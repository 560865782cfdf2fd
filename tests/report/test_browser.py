"""report.html in a real browser: no console error, no request, the table sorts, a point tells its cell."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import whole_run

from profiler.record.run import Run
from profiler.report.html import html_report

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)

# Clicks a heading and a point, and writes what a reader would see into the document.
PROBE = """
<script>
const buttons = [...document.querySelectorAll("#cells th button")];
buttons[buttons.findIndex(button => button.textContent === "time")].click();
const units = {s: 1, ms: 1e-3, us: 1e-6};
const seconds = text => parseFloat(text) * units[text.split(" ")[1]];
const times = [...document.querySelectorAll("#cells tbody tr")].map(row => seconds(row.children[6].textContent));
const probe = document.createElement("pre");
probe.id = "probe";
probe.textContent = JSON.stringify({
  sorted: times.every((value, index) => !index || times[index - 1] <= value),
  shown: times.length,
  least: times[0],
  hover: document.querySelector(".point.decode title").textContent,
  roofs: document.querySelectorAll(".roof title").length,
  wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
  ink: getComputedStyle(document.querySelector("svg.figure text")).fill,
  requests: performance.getEntriesByType("resource").length,
});
document.body.append(probe);
</script>
"""


def many_cells() -> Run:
    """A real run with 400 cells more, of which one that a page does not show at first is the fastest of all."""
    run = whole_run()
    decode = next(result for result in run.results if result.phase == "decode" and result.status == "ok")
    more = (replace(decode, batch_size=1000 + step, latency_s=1e-5 if step == 177 else 20e-3) for step in range(400))
    return replace(run, results=(*run.results, *more))


@pytest.mark.skipif(not BROWSER, reason="no chromium on this machine")
def test_in_a_headless_browser(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    own = PROBE.strip().removeprefix("<script>").removesuffix("</script>")
    allowed = f"script-src 'sha256-{base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()}' "
    text = html_report(many_cells()).replace("script-src ", allowed, 1).replace("</body>", PROBE + "</body>")
    page.write_text(text, encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=2000",
        "--window-size=500,900",
        "--enable-logging=stderr",
    ]
    done = subprocess.run(
        [BROWSER, *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=90, check=True
    )
    assert "CONSOLE" not in done.stderr
    probe = done.stdout.split('<pre id="probe">')[1].split("</pre>")[0]
    assert '"sorted":true' in probe
    assert '"shown":116' in probe, "16 prefills and 100 of 416 decodes"
    assert '"least":0.00000999' in probe, "a time that was not among the rows shown at first"
    assert '"requests":0' in probe
    assert '"hover":"decode 1 x' in probe
    assert '"roofs":5' in probe
    assert '"wide":false' in probe, "the page itself never scrolls sideways"
    assert '"ink":"rgb(27, 31, 36)"' in probe, "the picture's words are in the page's ink"
