"""The page in a real Chromium: sliders, choices, the map, and its width. `.ci/browser` runs it."""

import html
import json
from pathlib import Path

import pytest
from browser import BROWSER, dumped

from profiler.counting.cache import counted_model
from profiler.explore.command import explore_document, explore_page
from profiler.facts.step import Step
from profiler.loading.source import resolve
from profiler.units import scaled

pytestmark = pytest.mark.skipif(not BROWSER, reason="no chromium on this machine")

MODEL = "mistral-7b-v0.1"
# Moves each control, clicks a cell of the map, and writes what the page then shows.
PROBE = """
<script>
const texts = row => [...row.cells].map(cell => cell.textContent);
const rows = selector => [...document.querySelectorAll(selector)].map(texts);
const move = (name, value) => {
  const control = document.querySelector(name);
  control.value = value;
  control.dispatchEvent(new Event("input", { bubbles: true }));
};
const opened = rows("#figures tbody tr");
move("#batch", 5); move("#context", 8); move("#gpu", 1); move("#format", 1);
const moved = [rows("#figures tbody tr"), location.hash];
document.querySelector("#map tr:nth-child(1) td:nth-child(2)").click();
const probe = document.createElement("pre");
probe.id = "probe";
probe.textContent = JSON.stringify({
  opened, moved, clicked: location.hash, here: document.querySelectorAll("#map .here").length,
  dots: document.querySelectorAll("#roofline circle").length,
  wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
  requests: performance.getEntriesByType("resource").length,
});
document.body.append(probe);
</script>
"""


@pytest.mark.parametrize("width", [390, 1200])
def test_the_controls_change_what_is_shown(width: int, tmp_path: Path) -> None:
    document = explore_document(MODEL, ["T4", "H100 SXM"], ["none", "nf4"])
    text = dumped(explore_page(document), PROBE, tmp_path / "page.html", f"--window-size={width},1400")
    probe = json.loads(html.unescape(text))
    assert (probe["wide"], probe["requests"], probe["here"], probe["dots"]) == (False, 0, 1, 2)
    whole = counted_model(resolve(MODEL)).work.work(Step(1, 1, 512))
    assert probe["opened"][1][:3] == ["decode", scaled(whole.model_flops, "FLOP"), scaled(whole.model_bytes, "B")]
    batch, context = document.batches[5], document.contexts[8]
    shown, address = probe["moved"]
    moved = counted_model(resolve(MODEL), quant="nf4").work.work(Step(batch, 1, context))
    assert shown[1][:3] == ["decode", scaled(moved.model_flops, "FLOP"), scaled(moved.model_bytes, "B")]
    assert address == f"#b={batch}&c={context}&q=nf4&g=H100+SXM"
    assert probe["clicked"] == "#b=1024&c=16&q=nf4&g=H100+SXM"
