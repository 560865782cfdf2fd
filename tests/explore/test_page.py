"""The page of `explore`: small, without connections, and with the numbers of `count` at 50 random points."""

import html
import json
import random
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cases import slow_except
from py_mini_racer import MiniRacer

import profiler.explore
from profiler.counting.cache import counted_model
from profiler.counting.floor import GpuRow, floor_on
from profiler.counting.memory_need import memory_need, need_in_chunks, path_on
from profiler.counting.model_numbers import model_numbers
from profiler.counting.operators import as_value
from profiler.counting.preset_counts import CountedModel
from profiler.data.ceiling_set import ceilings_called
from profiler.data.datasheets import gpu_called
from profiler.explore.command import MOST_BYTES, ExploreDocument, explore_document, explore_page, grid_values
from profiler.facts.step import ExecutionPath, Step, Work
from profiler.grid.cells import PHASES, Phase
from profiler.loading.source import presets, resolve

POINTS = 50
LIMITS = {
    "m": ("memory", False), "M": ("memory", True), "c": ("compute", False), "C": ("compute", True), "-": (None, False),
    "p": ("memory", False), "q": ("compute", False),
}  # fmt: skip
"""The ceiling that bounds a step, and whether it is tight, by the page's letter."""
SCRIPT = Path(profiler.explore.__file__).with_name("explore.js").read_text(encoding="utf-8")


class Page:
    """The functions of the page's script that look up figures."""

    def __init__(self, document: ExploreDocument) -> None:
        self._engine = MiniRacer()
        self._engine.eval(f"{SCRIPT}\nconst data = {json.dumps(asdict(document))};")

    def ask(self, expression: str) -> Any:
        return json.loads(self._engine.eval(f"JSON.stringify({expression})"))


MODELS = ("mistral-7b-v0.1", "deepseek-v2-lite", "gpt-oss-20b", "gpt2", "llama-3.1-70b")
"""Windows and grouped heads, latent attention and experts, packed weights, a short context, and a long one."""


@pytest.mark.parametrize("model", slow_except(("mistral-7b-v0.1",), MODELS))
def test_count_has_the_same_numbers(model: str) -> None:
    """`count` computes each operator of a step with whole numbers; the page has six digits."""
    names = ["T4", "L40S", "H200 SXM"]
    document = explore_document(model, names)
    page, draw = Page(document), random.Random(model)
    for _ in range(POINTS):
        format_, gpu, phase = draw.randrange(len(document.formats)), draw.randrange(len(names)), draw.choice(PHASES)
        batch, context = draw.randrange(len(document.batches)), draw.randrange(len(document.contexts))
        shown = page.ask(f"figuresAt(data, {format_}, {gpu}, {batch}, {context})")
        counted = counted_model(resolve(model), quant=document.formats[format_].quant)
        row, work = counted_step(counted, names[gpu], phase, document.batches[batch], document.contexts[context])
        figures = shown[phase]
        if figures["flops"] is not None:
            assert figures["flops"] == pytest.approx(float(work.model_flops), rel=5e-6)
            assert figures["bytes"] == pytest.approx(float(work.model_bytes), rel=5e-6)
        assert LIMITS[figures["limit"]] == (row.bound, row.tight)
        assert figures["floor_s"] == (row.floor_s if row.floor_s is None else pytest.approx(row.floor_s, rel=5e-6))
        if phase == "decode":
            assert shown["needs_bytes"] == pytest.approx(row.needs_bytes, rel=5e-6)


def counted_step(counted: CountedModel, gpu: str, phase: Phase, batch: int, tokens: int) -> tuple[GpuRow, Work]:
    """One step as `count` counts it: the sum over operators, its memory, and its floor by the datasheet."""
    sheet, first = gpu_called(gpu), Step(batch, tokens, 0)
    step, path = first if phase == "prefill" else Step(batch, 1, tokens), ExecutionPath()
    there = path_on(counted.work, counted.attention, fuses_grouped_heads=sheet.fuses_grouped_heads)
    need = memory_need(counted.work, counted.weight_bytes, first, int(phase == "decode"), there)
    operators = [as_value(operator, operator.name, operator.work(step, path)) for operator in counted.work.operators]
    needs_bytes, safe_bytes = float(need.peak_bytes), float(need.safe_bytes)
    if phase == "decode" and needs_bytes > sheet.room_bytes:  # in chunks, as servers do
        needs_bytes = float(need_in_chunks(counted.work, counted.weight_bytes, batch, tokens).safe_bytes)
        safe_bytes = 0.0
    row = floor_on(sheet, operators, counted.dtype, needs_bytes, safe_bytes)
    return row, counted.work.work(step, path)


@pytest.fixture(scope="module")
def document() -> ExploreDocument:
    return explore_document("mistral-7b-v0.1", ["T4", "H100 SXM"])


def test_figures_by_hand(document: ExploreDocument) -> None:
    """Mistral-7B keeps 131,072 bytes per token in 16 bits: 2 x 32 layers x 8 heads x 128 x 2.

    Its 2 x 7.24 GB fit a T4's 14.9 GB, but not with 8 sequences of 1,024 tokens.
    """
    page = Page(document)
    shown = page.ask(f"figuresAt(data, 0, 0, {document.batches.index(8)}, {document.contexts.index(1024)})")
    assert shown["cache_bytes"] == pytest.approx(8 * 1025 * 131_072, rel=1e-5)
    assert shown["weight_bytes"] == pytest.approx(2 * 7_241_732_096, rel=1e-6)
    assert shown["decode"]["floor_s"] is None
    assert page.ask(f"LIMITS[{json.dumps(shown['decode']['limit'])}]") == "does not fit"


def test_it_snaps_to_the_grid(document: ExploreDocument) -> None:
    """5 is nearer to 6 than to 4 by its ratio, and 25 to 24 than to 32; 10**9 is the last one."""
    page = Page(document)
    places = [page.ask(f"nearest(data.batches, {wanted})") for wanted in (0, 1, 5, 25, 10**9)]
    assert [document.batches[place] for place in places] == [1, 1, 6, 24, 1024]
    assert grid_values(16, 100) == [16, 24, 32, 48, 64, 96, 100]
    assert (document.contexts[-1], document.max_positions) == (262_144, 32_768), "beyond the model's own limit"


def test_the_largest_batch_is_the_last_that_fits(document: ExploreDocument) -> None:
    """At the same context, `count` has a largest batch between that of the page and the next one."""
    page, context = Page(document), document.contexts.index(512)
    largest = page.ask(f"largestBatch(data, 0, 1, {context})")
    [numbers] = model_numbers(counted_model(resolve("mistral-7b-v0.1")), 512, (ceilings_called("H100 SXM"),)).gpus
    following = document.batches[document.batches.index(largest) + 1]
    assert largest <= numbers.largest_batch < following


def test_weights_that_fit_are_named() -> None:
    """A token of Qwen3-8B has 147,456 bytes of cache: 19.3 GB at 131,072, which fit into an RTX 5090 with 4 bits."""
    page = Page(document := explore_document("qwen3-8b", ["RTX 5090"]))
    contexts = [document.contexts.index(tokens) for tokens in (32_768, 131_072, 262_144)]
    fitting = [page.ask(f"fittingFormats(data, 0, 0, {context})") for context in contexts]
    assert {"nf4", "int4wo"} <= set(fitting[1]) < set(fitting[0])
    assert document.dtype in fitting[0]
    assert document.dtype not in fitting[1]
    assert fitting[2] == []


def test_it_opens_offline(document: ExploreDocument) -> None:
    page = explore_page(document)
    assert {item.quant for item in document.formats} >= {"none", "nf4", "int8", "fp8"}
    assert not re.search(r"https?://(?!www\.w3\.org)|@import|url\(|fetch\(|XMLHttpRequest|\beval\b|new Function", page)
    assert "default-src 'none'" in html.unescape(page)


@pytest.mark.parametrize("model", slow_except(("qwen2.5-0.5b",), presets()))
def test_the_page_is_at_most_a_megabyte(model: str) -> None:
    """With every format and the five default GPUs."""
    assert len(explore_page(explore_document(model)).encode()) <= MOST_BYTES == 1_000_000


def test_the_command(roofscope: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "page.html"
    command = ("explore", "smollm2-135m", "--gpu", "T4", "--quant", "none,nf4", "--out", str(out))
    found = roofscope(*command)
    assert found.code == 0, found.err
    [content] = re.findall(r'id="data">(.*?)</script>', out.read_text(encoding="utf-8"), re.S)
    page = json.loads(content)
    assert (page["model"], [gpu["name"] for gpu in page["gpus"]]) == ("smollm2-135m", ["T4"])
    assert [item["quant"] for item in page["formats"]] == ["none", "nf4"]
    monkeypatch.setattr("profiler.explore.command.MOST_BYTES", out.stat().st_size - 1)
    assert "are possible; name fewer" in roofscope(*command).err
