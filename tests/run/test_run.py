"""The files and figures of the main job, end to end, on a real GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pandas as pd
import pytest
from cells import row
from hurry import with_effort

import profiler
from profiler.effort import Effort
from profiler.judge.breakdown import TERMS
from profiler.judge.cells import CELL_COLUMNS
from profiler.judge.regimes import Regime
from profiler.store.document import document_json
from profiler.store.folder import read_run

pytestmark = pytest.mark.slow
SPLIT = list(TERMS)


@pytest.fixture(scope="module")
def gguf_run(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> profiler.Run:
    """Profile the real SmolLM2-135M through the Python interface."""
    folder = tmp_path_factory.mktemp("runs") / "gguf"
    with pytest.MonkeyPatch.context() as patch:
        with_effort(patch, pictures=Effort().pictures)
        return profiler.profile(
            str(gguf_file), prompt_lens=[64, 128], batch_sizes=[1, 2], new_tokens=16, no_levers=True, out=folder
        )


def test_all_files_of_the_contract(gguf_run: profiler.Run) -> None:
    names = {path.name for path in gguf_run.folder.iterdir()}
    pictures = {"roofline.png", "split.png", "map.png"}
    assert names == {
        "run.json",
        "samples.jsonl",
        "cells.csv",
        "operators.csv",
        "config.json",
        "report.md",
        "report.html",
        *pictures,
    }
    assert tuple(gguf_run.cells.columns) == CELL_COLUMNS
    assert len(gguf_run.cells) == 2 * 2 * 2
    assert (gguf_run.cells["status"] == "ok").all()


def test_work_is_that_of_the_model(gguf_run: profiler.Run) -> None:
    """SmolLM2-135M: 30 layers, hidden 576, intermediate 1536, 9 query and 3 KV heads of 64, vocabulary 49152, tied."""
    layer = 576 * (576 + 192 + 192) + 576 * 576 + 3 * 576 * 1536
    head, norms = 49152 * 576, 61 * 576
    decode = row(gguf_run, "decode", 1, 64)
    context = 64 + 16 // 2
    assert decode["context_len"] == context
    assert decode["model_flops"] == 2 * 30 * layer + 2 * head + 4 * 576 * 30 * (context + 1)
    weights = 4 * (30 * layer + head + norms)
    kv_token = 2 * 192 * 30 * 4
    assert decode["model_bytes"] == weights + kv_token * (context + 1) + 4 * 576 + 4 * 49152
    prefill = row(gguf_run, "prefill", 2, 128)
    causal = 4 * 576 * 30 * 2 * (128 * 129 // 2)
    assert prefill["model_flops"] == 2 * 256 * 30 * layer + causal + 2 * 2 * head


def test_weights_are_the_storages_that_were_loaded(gguf_run: profiler.Run) -> None:
    """The head is tied, so every storage is streamed; the rotary buffers (two of 32 float32) are not weights."""
    assert gguf_run.document.model.storage_bytes == 4 * 134_515_008 + 2 * 32 * 4


def test_figures_hold_together(gguf_run: profiler.Run) -> None:
    cells = gguf_run.cells
    assert cells[SPLIT].sum(axis=1).to_numpy() == pytest.approx(cells["latency_s"].to_numpy(), rel=1e-9)
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


def test_no_path_or_environment_is_told(gguf_run: profiler.Run) -> None:
    text = (gguf_run.folder / "run.json").read_text()
    assert str(Path.home()) not in text
    assert "HF_HUB_OFFLINE" not in text
    assert gguf_run.document.model.id == "SmolLM2-135M-Instruct.Q4_1"
    assert gguf_run.document.finished


def test_export(gguf_run: profiler.Run, roofscope, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = str(gguf_run.folder)
    as_csv = roofscope("export", folder, "--format", "csv").out
    assert as_csv.splitlines()[0].startswith("phase,batch_size,prompt_len,context_len,status,latency_s")
    as_json = json.loads(roofscope("export", folder, "--format", "json").out)
    assert [entry["tokens_per_s"] for entry in as_json] == pytest.approx(list(gguf_run.cells["tokens_per_s"]))
    assert roofscope("export", folder, "--format", "md").out.count("\n") == 2 + 8
    target = tmp_path / "table.parquet"
    assert roofscope("export", folder, "--format", "parquet", "--out", str(target)).code == 0
    assert pd.read_parquet(target)["latency_s"].to_numpy() == pytest.approx(gguf_run.cells["latency_s"].to_numpy())
    assert roofscope("export", folder, "--format", "xlsx").code == 2


def test_picture_shows_every_point(gguf_run: profiler.Run) -> None:
    import matplotlib.image

    from profiler.report.plots import roofline

    figure = roofline(gguf_run)
    [axes] = figure.axes
    (x_low, x_high), (y_low, y_high) = axes.get_xlim(), axes.get_ylim()
    assert gguf_run.cells["intensity"].between(x_low, x_high).all()
    assert gguf_run.cells["flops_per_s"].between(y_low, y_high).all()
    picture = matplotlib.image.imread(gguf_run.folder / "roofline.png")
    assert picture.std() > 0.05, "not blank"
    border = [picture[0], picture[-1], picture[:, 0], picture[:, -1]]
    assert all((edge[..., :3] == 1).all() for edge in border), "nothing is cut off"
