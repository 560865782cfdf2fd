"""Python and the page both give the conformance vectors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from profiler.explore.document import gpu_option, model_entry
from tests.explore.theory import Theory
from tests.explore.vectors import FILE, ROOFS, STEPS, figures, presets

VECTORS: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
EXACT = ("flops", "cache_bytes", "bound", "fits")


@pytest.mark.slow
def test_every_preset_precision_and_step_is_there() -> None:
    expected = [(*pair, *step) for pair in presets() for step in STEPS]
    named = ("model", "precision", "batch", "query", "context")
    assert [tuple(row[name] for name in named) for row in VECTORS] == expected
    assert len({row["model"] for row in VECTORS}) == 19


@pytest.mark.slow
def test_python_and_the_page_give_the_vectors() -> None:
    theory, gpu, rows = Theory(), gpu_option(ROOFS), iter(VECTORS)
    for (card, quant), counted in presets().items():
        page = theory.ask(model_entry(counted, quant), gpu, STEPS)
        for ours, theirs in zip(figures(counted), page, strict=True):
            row = next(rows)
            found = {**theirs, "flops": int(theirs["flops"]), "cache_bytes": int(theirs["cache_bytes"])}
            for name in EXACT:
                assert row[name] == ours[name] == found[name], (card, quant, name)
            assert row["bytes"] == ours["bytes"]
            assert abs(row["bytes"] - float(theirs["bytes"])) <= 0.51, (card, quant)
            assert row["floor_s"] == pytest.approx(ours["floor_s"], rel=1e-11)
            assert row["floor_s"] == pytest.approx(theirs["floor_s"], rel=1e-11)
            assert row["safe_bytes"] == ours["safe_bytes"]
            assert row["safe_bytes"] == pytest.approx(theirs["safe_bytes"], rel=1e-9)


def test_some_vectors_by_hand() -> None:
    """Mistral-7B: 14,483,464,192 bytes of weights, except the embedding rows that a step does not read.

    A decode step reads 7.11e9 weights (all but 32,000 x 4,096 embeddings) of 2 bytes, and 512 x 131,072 bytes of cache.
    Its matmuls take 2 FLOPs per weight (the norms have none), and attention 4 x 32 layers x 4,096 x 513 FLOPs.
    """
    row = next(
        item
        for item in VECTORS
        if (item["model"], item["precision"], item["batch"], item["query"]) == ("mistral-7b-v0.1", "none", 1, 1)
    )
    norms, embeddings = 65 * 4096, 32_000 * 4096
    matrices = 7_241_732_096 - embeddings - norms
    assert row["flops"] == 2 * matrices + 4 * 32 * 4096 * 513
    cache = 513 * 131_072
    logits_and_embedding = 2 * 32_000 + 2 * 4096
    assert row["bytes"] == 2 * (matrices + norms) + cache + logits_and_embedding
    assert row["cache_bytes"] == cache
