"""The files and figures of the main job, end to end, on a real GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pandas as pd
import pytest

import profiler
from profiler.judge.breakdown import TERMS
from profiler.judge.cells import CELL_COLUMNS
from profiler.judge.regimes import Regime
from profiler.store.document import document_json
from profiler.store.folder import read_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gguf_run(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> profiler.Run:
    """Profile the real SmolLM2-135M through the Python interface."""
    folder = tmp_path_factory.mktemp("runs") / "gguf"
    return profiler.profile(
        str(gguf_file), prompt_lens=[64, 128], batch_sizes=[1, 2], new_tokens=16, no_levers=True, out=folder
    )


def test_all_files_of_the_contract(gguf_run: profiler.Run) -> None:
    names = {path.name for path in gguf_run.folder.iterdir()}
    assert names == {
        "run.json", "samples.jsonl", "cells.csv", "operators.csv", "config.json", "report.md", "report.html",
    }  # fmt: skip
    assert tuple(gguf_run.cells.columns) == CELL_COLUMNS
    assert len(gguf_run.cells) == 2 * 2 * 2
    assert (gguf_run.cells["status"] == "ok").all()


def test_work_is_that_of_the_model(gguf_run: profiler.Run) -> None:
    """SmolLM2-135M: 30 layers, hidden 576, intermediate 1536, 9 query and 3 KV heads of 64, vocabulary 49152, tied."""
    layer = 576 * (576 + 192 + 192) + 576 * 576 + 3 * 576 * 1536
    head, norms = 49152 * 576, 61 * 576
    cells = {(cell.phase, cell.batch_size, cell.prompt_len): cell for cell in gguf_run.results}
    decode, prefill = cells["decode", 1, 64], cells["prefill", 2, 128]
    context = 64 + 16 // 2
    assert decode.context_len == context
    assert decode.model_flops == 2 * 30 * layer + 2 * head + 4 * 576 * 30 * (context + 1)
    weights = 4 * (30 * layer + head + norms)
    kv_token = 2 * 192 * 30 * 4
    assert decode.model_bytes == weights + kv_token * (context + 1) + 4 * 576 + 4 * 49152
    causal = 4 * 576 * 30 * 2 * (128 * 129 // 2)
    assert prefill.model_flops == 2 * 256 * 30 * layer + causal + 2 * 2 * head


def test_figures_hold_together(gguf_run: profiler.Run) -> None:
    cells = gguf_run.cells
    assert cells[list(TERMS)].sum(axis=1).to_numpy() == pytest.approx(cells["latency_s"].to_numpy(), rel=1e-9)
    assert (cells["latency_low_s"] <= cells["latency_s"]).all()
    assert (cells["latency_s"] <= cells["latency_high_s"]).all()
    tokens = cells["batch_size"] * cells["prompt_len"].where(cells["phase"] == "prefill", 1)
    assert (cells["tokens_per_s"] * cells["latency_s"]).to_numpy() == pytest.approx(tokens.to_numpy(float))
    assert (cells["flops_per_s"] * cells["latency_s"]).to_numpy() == pytest.approx(cells["model_flops"].to_numpy(float))
    assert (cells["executed_bytes"] >= cells["model_bytes"]).all()
    assert set(cells["regime"]) <= set(get_args(Regime)) - {"link-bound"}, "no weight here crosses a link"
    assert cells["mfu"].isna().all(), "a CPU has no datasheet here"
    assert (cells["peak_memory_bytes"] > 4 * 134_515_008).all()


def test_the_run_reads_back(gguf_run: profiler.Run) -> None:
    again = read_run(gguf_run.folder)
    assert document_json(again.document) == document_json(gguf_run.document)
    pd.testing.assert_frame_equal(again.cells, gguf_run.cells, check_dtype=False, rtol=1e-12)
