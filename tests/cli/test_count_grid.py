"""`count` over a grid: table, CSV, JSON and pictures agree; wrong requests are refused in one line."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GRID = ["--batch-sizes", "1,8", "--prompt-lens", "128,512", "--gpu", "T4,H100 SXM"]
REFERENCE = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-xeon-float32"


def test_table_csv_and_json_have_the_same_figures(roofscope: Callable[..., Any]) -> None:
    table = roofscope("count", "mistral-7b-v0.1", *GRID, "--plain", "--full").out
    rows = list(csv.DictReader(io.StringIO(roofscope("count", "mistral-7b-v0.1", *GRID, "--format", "csv").out)))
    document = json.loads(roofscope("count", "mistral-7b-v0.1", *GRID, "--format", "json").out)
    assert len(rows) == len(document["rows"]) == 2 * 2 * 2 * 2, "phases, batch sizes, lengths, GPUs"
    for row, entry in zip(rows, document["rows"], strict=True):
        assert float(row["floor_s"] or "nan") == pytest.approx(entry["floor_s"] or math.nan, nan_ok=True)
        assert row["bound"] == entry["bound"]
    # 14.5 GB at the T4's 320 GB/s take 45 ms per step.
    [decode] = [row for row in rows if row["phase"] == "decode" and row["gpu"].startswith("T4")][:1]
    assert float(decode["tokens_per_s_at_most"]) == pytest.approx(22.4, rel=0.02)
    assert "decode       1     128  44.5 ms           22.5  memory" in table
    assert "KV cache:     131 kB per token" in table
    assert document["numbers"]["architecture"]["kv_heads"] == 8


def test_one_step_has_the_numbers_of_its_model(roofscope: Callable[..., Any]) -> None:
    document = json.loads(roofscope("count", "llama-2-7b", "--gpu", "T4", "--format", "json").out)
    assert document["numbers"]["kv_bytes_per_token"] == 2 * 32 * 4096 * 2
    [t4] = document["numbers"]["gpus"]
    assert t4["largest_batch"] > 0
    assert "numbers" not in json.loads(roofscope("count", "llama-2-7b", "--tp", "2", "--format", "json").out)


@pytest.mark.parametrize("plot", ["roofline", "kv", pytest.param("intensity", marks=pytest.mark.slow)])
def test_pictures_are_drawn(plot: str, roofscope: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "picture.svg"
    measured = ["--run", str(REFERENCE)] if plot == "roofline" else []
    found = roofscope("count", "smollm2-135m", *GRID, "--plot", plot, *measured, "--out", str(out))
    assert found.code == 0, found.err
    picture = out.read_text("utf-8")
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture)
    assert size
    assert float(size[2]) < 1.2 * float(size[1]), "nothing is drawn far from the panels"
    assert "$" not in picture, "a mark in TeX, which is off"


def test_what_does_not_fit_has_no_tokens(roofscope: Callable[..., Any]) -> None:
    """Llama-3.1-70B in 16 bits takes 141 GB; an H100 has 80."""
    options = ["--batch-sizes", "1", "--prompt-lens", "128", "--gpu", "H100 SXM"]
    assert "no room" in roofscope("count", "llama-3.1-70b", *options, "--plain").out
    document = json.loads(roofscope("count", "llama-3.1-70b", *options, "--format", "json").out)
    assert {row["tokens_per_s_at_most"] for row in document["rows"]} == {None}
    assert document["numbers"]["gpus"][0]["largest_batch"] == 0
