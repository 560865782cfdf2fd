"""report.html in a real browser: no console error, no request, a table that sorts, tooltips on points."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import whole_run

from profiler.report.write import html_report
from profiler.store.folder import Run
from profiler.why_slow.findings import Why, new_finding
from profiler.why_slow.observations import Observations
from profiler.why_slow.render import html_why

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)

# Clicks a heading and a point, and writes the resulting texts into the document.
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
  letters: Math.min(...[...document.querySelectorAll("svg.figure text")].map(
    text => parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a)) >= 9,
  captions: [...document.querySelectorAll("caption")].every(
    caption => caption.getBoundingClientRect().right <= document.documentElement.clientWidth),
  requests: performance.getEntriesByType("resource").length,
});
document.body.append(probe);
</script>
"""


def many_cells() -> Run:
    """Return a real run with 400 more cells, the fastest of which is in the middle."""
    run = whole_run()
    decode = next(result for result in run.results if result.phase == "decode" and result.status == "ok")
    more = (replace(decode, batch_size=1000 + step, latency_s=1e-5 if step == 177 else 20e-3) for step in range(400))
    return replace(run, results=(*run.results, *more))


# Counts the tables that are wider than their container.
SCROLLED = """
<script>
const probe = document.createElement("pre");
probe.id = "probe";
probe.textContent = [...document.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth).length;
document.body.append(probe);
</script>
"""


def opened(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page, and print its document as it is then."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)


def dumped(html: str, probe: str, page: Path, *options: str) -> str:
    """Return the text that a probe wrote into a page under the page's own policy. A console message is an error."""
    own = probe.strip().removeprefix("<script>").removesuffix("</script>")
    allowed = f"script-src 'sha256-{base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()}' "
    text = html.replace("script-src ", allowed, 1).replace("</body>", probe + "</body>")
    page.write_text(text, encoding="utf-8")
    done = opened(page, "--enable-logging=stderr", *options)
    assert "CONSOLE" not in done.stderr
    return done.stdout.split('<pre id="probe">')[1].split("</pre>")[0]


@pytest.mark.skipif(not BROWSER, reason="no chromium on this machine")
def test_in_a_headless_browser(tmp_path: Path) -> None:
    options = ("--virtual-time-budget=2000", "--window-size=420,900")
    probe = dumped(html_report(many_cells()), PROBE, tmp_path / "report.html", *options)
    assert '"sorted":true' in probe
    assert '"shown":432' in probe, "16 prefills and 416 decodes"
    assert '"least":0.00000999' in probe
    assert '"requests":0' in probe
    assert '"hover":"decode 1 x' in probe
    assert '"roofs":5' in probe
    assert '"wide":false' in probe, "the page itself never scrolls sideways"
    assert '"letters":true' in probe, "no letter of a picture is smaller than 9 px"
    assert '"captions":true' in probe, "no caption is cut"
    assert '"ink":"rgb(27, 31, 36)"' in probe, "the picture's text has the page's text colour"


@pytest.mark.skipif(not BROWSER, reason="no chromium on this machine")
def test_findings_are_whole_in_a_window_of_900(tmp_path: Path) -> None:
    """A table of findings with sentences as long as those of `why` needs no scrolling."""
    finding = new_finding(
        "use-cache-off", 6.2, "summarise_reports.py:31", "use_cache=False computes every earlier token again",
        "call model.eval(), and generate under torch.inference_mode()",
        "tried: 5 pairs of 1 x 64 + 32 in turn, on that very model, saved 61 to 70 %",
    )  # fmt: skip
    why = Why(Observations("summarise_reports.py", 9.0, (), (), 0.0, "", 0.01), (finding,), None, ())
    assert finding.basis in html_why(why)
    assert dumped(html_why(why), SCROLLED, tmp_path / "why.html", "--window-size=900,900") == "0"
