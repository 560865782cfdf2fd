"""The page in a real Chromium: sliders, keys, figures, width and smoothness. `.ci/browser` runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("PySide6.QtWebEngineWidgets", reason="needs the extra `browser`")


from profiler.counting.cache import counted_model
from profiler.counting.preset_counts import CountedModel
from profiler.explore.command import explore_document, explore_page
from profiler.facts.step import Step
from profiler.loading.source import resolve
from tests.explore.chromium import Chromium

MODEL = "mistral-7b-v0.1"
FIGURES = """
JSON.stringify(Object.fromEntries([...document.querySelectorAll("#figures tbody tr")].map(row =>
  [row.cells[0].textContent, [...row.cells].slice(1).map(cell => cell.dataset.value ?? cell.textContent)])))
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("explore") / "page.html"
    file.write_text(explore_page(explore_document(MODEL, ["T4", "H100 SXM"])), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def counted() -> CountedModel:
    return counted_model(resolve(MODEL))


@pytest.fixture
def window(page: Path) -> Iterator[Chromium]:
    opened = Chromium()
    opened.open(page.as_uri())
    yield opened
    assert opened.console == []
    assert {address.partition("#")[0] for address in opened.requested} == {page.as_uri()}
    opened.close()


def figures(window: Chromium) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(window.run(FIGURES))
    return found


def slide(window: Chromium, slider: str, place: int) -> int:
    """Move a slider as a user's drag does, and return the number that it now shows."""
    shown = window.run(
        f"(() => {{ const it = document.querySelector('#{slider}'); it.value = {place};"
        " it.dispatchEvent(new Event('input', {bubbles: true}));"
        f" return document.querySelector('#{slider}-is').textContent; }})()"
    )
    return int(shown.replace(",", ""))


@pytest.mark.parametrize("places", [(0, 5, 5), (12, 14, 20)])
def test_sliders_show_what_count_says(window: Chromium, counted: CountedModel, places: tuple[int, int, int]) -> None:
    batch, prompt, context = (
        slide(window, name, place) for name, place in zip(("batch", "prompt", "context"), places, strict=True)
    )
    shown = figures(window)
    for phase, step in (("prefill", Step(batch, prompt, 0)), ("decode", Step(batch, 1, context))):
        work = counted.work.work(step)
        assert int(shown[phase][0]) == work.model_flops
        assert int(shown[phase][1]) == work.model_bytes
    script = "JSON.stringify(Object.fromEntries(new URLSearchParams(location.hash.slice(1))))"
    kept = json.loads(window.run(script))
    assert (kept["b"], kept["p"], kept["c"]) == (str(batch), str(prompt), str(context))


def test_a_shared_prefix_and_drafts(page: Path, counted: CountedModel) -> None:
    window = Chromium()
    window.open(f"{page.as_uri()}#b=8&p=1024&c=1500&x=512&v=4&g=H100+SXM")
    shown = figures(window)
    steps = {"prefill": Step(8, 512, 512, 512), "decode": Step(8, 5, 1500, 512, 5)}
    for phase, step in steps.items():
        work = counted.work.work(step)
        assert [int(shown[phase][0]), int(shown[phase][1])] == [work.model_flops, work.model_bytes]
    remarks = window.run("document.querySelector('#notes').textContent")
    assert "plain attention kernels read it once for each" in remarks
    assert "The decode step verifies 4 drafts per sequence, and has 1.0" in remarks
    assert slide(window, "prefix", 0) == 0
    assert int(figures(window)["prefill"][0]) == counted.work.work(Step(8, 1024, 0)).model_flops
    assert slide(window, "drafts", 16) == 16
    assert window.console == []
    window.close()


def test_the_roofs_are_those_of_the_chosen_gpu(window: Chromium) -> None:
    """NVIDIA's datasheets: a T4 has 65 TFLOP/s in float16 and no bfloat16, an H100 SXM has 989 in both.

    Below them are the rates of gpus.csv that a T4 and an H100 sustain at 70 and 700 W.
    """
    roofs = "document.querySelector('#roofs').textContent"
    notes = "document.querySelector('#notes').textContent"
    assert "float16: 65.0 TFLOP/s" in window.run(roofs)
    assert "float16, sustained: 24.0 TFLOP/s" in window.run(roofs)
    assert "bfloat16" not in window.run(roofs)
    assert window.run(notes) == "T4 has no bfloat16 roof; its floor is that of float16."
    window.run(
        "(() => { const it = document.querySelector('#gpu'); it.value = 'H100 SXM';"
        " it.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    assert "float16, bfloat16: 989 TFLOP/s" in window.run(roofs)
    assert "bfloat16, sustained: 680 TFLOP/s" in window.run(roofs)
    assert "65.0" not in window.run(roofs)
    assert window.run(notes) == ""
