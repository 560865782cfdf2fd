"""The page of `explore`: small, without connections, and equal to `count` at 100 random settings of each kind."""

from __future__ import annotations

import html
import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import slow_except
from py_mini_racer import MiniRacer
from transformers import AutoConfig

import profiler.explore
from profiler.counting.cache import counted_model
from profiler.counting.grid_count import gpu_floors
from profiler.counting.memory_need import cache_bytes, memory_need, path_on
from profiler.counting.model_numbers import model_numbers
from profiler.data.roof_set import roofs_called
from profiler.explore.command import explore_document, explore_page
from profiler.explore.document import ExploreDocument, ModelEntry, Row, gpu_row, model_entry
from profiler.facts.step import Step
from profiler.loading.source import resolve
from profiler.report.write import html_report
from profiler.store.folder import read_run
from tests.counting.realistic import PUBLISHED

SETTINGS = 100
KINDS = {
    "grouped heads": ("llama-3.1-70b", "nf4"),
    "windowed and full layers": ("gemma-2-9b", "int8"),
    "latent attention": ("deepseek-v2-lite", "none"),
    "mixture of experts": ("mixtral-8x7b", "fp8"),
    "transposed weights": ("gpt2", "none"),
    "weights that are published packed": ("gpt-oss-20b", "none"),
}

SMALL = {
    "a state": "mamba2",
    "states and full attention": "qwen3_next",
    "compressed keys": "deepseek_v4",
    "attention in chunks": "llama4_text",
}
"""Kinds without a preset, by the type of a small model."""


def settings(seed: str) -> list[tuple[int, int, int, int, int]]:
    """Random (batch, query, context, shared, asked), whose FLOPs int64 can count."""
    rng = random.Random(seed)
    found = []
    for _ in range(SETTINGS):
        query = rng.choice([1, int(2 ** rng.uniform(0, 13))])
        batch = int(2 ** rng.uniform(0, 20 - np.log2(query) if query > 1 else 12))
        context = rng.choice([0, int(2 ** rng.uniform(0, 17))])
        found.append((batch, query, context, rng.choice([0, int(rng.random() * context)]), rng.choice([1, query])))
    return found


@pytest.mark.parametrize("kind", slow_except(("grouped heads", "mixture of experts", "a state"), [*KINDS, *SMALL]))
def test_equal_to_the_last_flop_and_byte(kind: str, tmp_path: Path) -> None:
    if kind in SMALL:
        AutoConfig.for_model(SMALL[kind], **PUBLISHED[SMALL[kind]][0]).save_pretrained(tmp_path)
    model, quant = KINDS.get(kind, (str(tmp_path), "none"))
    counted, roofs = counted_model(resolve(model), quant=quant), roofs_called("H100 SXM")
    steps = settings(kind)
    batch, query, context, shared, asked = np.array(steps, dtype=np.int64).T
    step = Step(batch, query, context, shared, asked)
    work, cache = counted.work.work(step), cache_bytes(counted.work, batch, query + context, shared=shared)
    first = np.where(context > 0, context, query)  # a decode step needs the memory of the prefill before it
    path = path_on(counted.work, counted.attention, fuses_grouped_heads=roofs.fuses_grouped_heads)
    prefill = Step(batch, first - shared, shared, shared)
    need = memory_need(counted.work, counted.weight_bytes, prefill, query + context - first, path)
    floors = gpu_floors(roofs, counted.work, counted.dtype, step, need)
    shown = Theory().ask(model_entry(counted, quant), gpu_row(roofs), steps)
    assert len(shown) == len(steps) == SETTINGS
    for index, page in enumerate(shown):
        assert int(page["flops"]) == work.model_flops[index], steps[index]
        # Expected numbers of experts are not whole, so such bytes are compared after rounding.
        whole = np.issubdtype(np.asarray(work.model_bytes).dtype, np.integer)
        page_bytes = int(page["bytes"]) if whole else round(float(page["bytes"]))
        assert abs(page_bytes - round(work.model_bytes[index])) <= (0 if whole else 1), steps[index]
        assert int(page["cache_bytes"]) == cache[index]
        assert page["fast_flops"] == pytest.approx(float(work.model_flops[index]), rel=1e-13)
        assert page["fast_bytes"] == pytest.approx(float(work.model_bytes[index]), rel=1e-13)
        assert page["floor_s"] == pytest.approx(floors.floor_s[index], rel=1e-12)
        assert page["bound"] == floors.bound[index]
        assert page["fits"] == floors.fits[index]
        assert page["safe_bytes"] == pytest.approx(need.safe_bytes[index], rel=1e-12)


@pytest.mark.parametrize(
    ("model", "gpu", "context"),
    [
        ("mistral-7b-v0.1", "T4", 512),
        ("mistral-7b-v0.1", "H100 SXM", 8191),
        ("mistral-7b-v0.1", "RTX 4090", 4096),
        ("llama-3.1-70b", "T4", 512),  # 2 x 70.6e9 bytes of weights, more than a T4 has room for
    ],
)
def test_largest_batch(model: str, gpu: str, context: int) -> None:
    counted, roofs = counted_model(resolve(model)), roofs_called(gpu)
    [page] = Theory().ask(model_entry(counted, "none"), gpu_row(roofs), [(1, 1, context)])
    [numbers] = model_numbers(counted, context, (roofs,)).gpus
    assert page["largest_batch"] == numbers.largest_batch
    assert page["fits"] == (numbers.largest_batch > 0) == ("70b" not in model)


def test_a_narrower_kv_cache() -> None:
    """Mistral-7B: 2 x 32 layers x 8 heads x 128 = 65,536 elements per token; bits scale only the cache."""
    entry = model_entry(counted_model(resolve("mistral-7b-v0.1")), "none")
    gpu, theory, step = gpu_row(roofs_called("T4")), Theory(), (3, 1, 999)
    full, half = (theory.ask(entry, gpu, [step], bits=bits)[0] for bits in (16, 8))
    assert int(full["cache_bytes"]) == 3 * 1000 * 65_536 * 2
    assert int(half["cache_bytes"]) == 3 * 1000 * 65_536
    assert int(full["bytes"]) - int(half["bytes"]) == 3 * 1000 * 65_536
    assert full["flops"] == half["flops"]


def test_ranks() -> None:
    """Two ranks of Mistral-7B: half of the linears, and two all-reduces of the hidden states per layer.

    A decode of 4 sequences sends 4 x 4096 x 2 bytes in each of 64 all-reduces, and again for a split embedding. Over a
    ring of two each rank carries 2 x (2 - 1) / 2 = 1 times that.
    """
    counted = counted_model(resolve("mistral-7b-v0.1"), ranks=2)
    entry, gpu = model_entry(counted, "none", 2), gpu_row(roofs_called("A100 80GB SXM"))
    reduces = sum(item.count for item in entry.collectives)
    assert reduces >= 64
    slow, fast = ({"alpha_s": alpha, "bus_bytes_per_s": rate} for alpha, rate in ((1e-5, 1e9), (0.0, 1e30)))
    [page], [free] = (Theory().ask(entry, gpu, [(4, 1, 500)], link) for link in (slow, fast))
    blocks = 32 * 2 * (1e-5 + 4 * 4096 * 2 / 1e9)
    assert blocks <= page["link_s"] <= 1.2 * blocks
    assert page["floor_s"] == pytest.approx(free["floor_s"] + page["link_s"])
    whole = counted_model(resolve("mistral-7b-v0.1"))
    assert 0.49 < entry.weight_bytes / whole.weight_bytes < 0.53
    assert int(page["flops"]) == counted.work.work(Step(4, 1, 500)).model_flops


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


_THEORY = Path(profiler.explore.__file__).with_name("theory.js")
_ASK = """
function ask(entry, gpu, link, bits, steps) {
  return JSON.stringify(steps.map(([batch, query, context, shared = 0, asked = 1]) => {
    const exact = { batch: BigInt(batch), query: BigInt(query), context: BigInt(context) };
    const work = stepWork(entry, { ...exact, shared: BigInt(shared), asked: BigInt(asked) }, bits);
    const fast = stepWork(entry, { batch, query, context, shared, asked }, bits);
    const floor = floorOf(work, entry, gpu, link), tokens = query + context;
    return {
      flops: String(work.flops), bytes: String(work.bytes), fast_flops: fast.flops, fast_bytes: fast.bytes,
      cache_bytes: String(cacheBytes(entry, BigInt(batch), BigInt(tokens), bits, BigInt(shared))), floor_s: floor.total,
      compute_s: floor.compute, memory_s: floor.memory, link_s: floor.link, bound: floor.bound,
      fits: fits(entry, gpu, batch, context || query, tokens, bits, shared),
      safe_bytes: safeBytes(entry, gpu, batch, context || query, tokens, bits, shared),
      largest_batch: largestBatch(entry, gpu, context || query, tokens, bits, shared),
    };
  }));
}
"""


class Theory:
    """theory.js with one entry of a page."""

    def __init__(self) -> None:
        self._engine = MiniRacer()
        self._engine.eval(_THEORY.read_text(encoding="utf-8") + _ASK)

    def ask(
        self,
        entry: ModelEntry,
        gpu: Row,
        steps: Sequence[tuple[int, ...]],
        link: Row | None = None,
        bits: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return the page's figures of each step (batch, query, context, and if need be shared and asked)."""
        given = [asdict(entry), gpu, link, bits or entry.kv_bits, steps]
        found: list[dict[str, Any]] = json.loads(self._engine.eval(f"ask({', '.join(map(json.dumps, given))})"))
        return found
