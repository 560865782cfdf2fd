"""A default run on a simulated GPU tries changes on the loaded model, and advises what saves most."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from profiler.facts.measurements import GRAPHED, REPEATED_HEADS, WITHOUT_CUDNN
from profiler.report.changes import levers
from profiler.store.folder import Run, read_gathered, read_run

from .scenario import Scenario, command_line
from .truth import H100, T4, Truth
from .world import simulated

pytestmark = pytest.mark.slow
BUDGET_S = 60.0


def tried_on(truth: Truth, dtype: str, folder: Path, **more: str) -> tuple[Run, float]:
    """Return a run of four layers of Mistral-7B, with its simulated seconds."""
    model = str(Scenario("mistral-7b-v0.3", 4, dtype).folder(folder))
    options = {"prompt_lens": "64,512", "batch_sizes": "1,8", "budget": BUDGET_S, "fresh": True, **more}
    with simulated(truth) as world:
        start_s = world.host.now_s
        code = command_line("run", model, dtype=dtype, out=folder / "run", **options)
        took_s = world.host.now_s - start_s
    assert code == 0
    return read_run(folder / "run"), took_s


def test_a_slow_host_gets_the_graph_that_was_tried(tmp_path: Path) -> None:
    """Each kernel costs the host 40 us, so a step of about 180 kernels takes 7 ms, and its graph under 1 ms."""
    run, took_s = tried_on(H100.but(launch_s=40e-6), "bfloat16", tmp_path)
    assert took_s < 1.2 * BUDGET_S, "by the clock of the simulated host"
    [decode] = [
        item for item in run.document.evidence if (item.phase, item.batch_size, item.prompt_len) == ("decode", 1, 64)
    ]
    tried = [lever for lever in decode.levers if lever.basis == "tried"]
    assert tried[0].change == GRAPHED
    [change] = [text for text in run.answer if text.startswith("What to change")]
    assert f"{GRAPHED} saves" in change
    assert 'model.generate(..., cache_implementation="static")' in " ".join(run.answer)
    gathered = read_gathered(run.folder, run.document).trials
    names = {trial.form for trials in gathered.values() for trial in trials}
    assert WITHOUT_CUDNN in names
    whole = [trial for trials in gathered.values() for trial in trials if trial.form in (GRAPHED, WITHOUT_CUDNN)]
    assert all(trial.layers == trial.of_layers for trial in whole), "the loaded model is stepped, not a few layers"
    assert "memory-efficient attention" not in {item.what for item in run.document.missing}
    # Of four layers: 4 x 218.1 M weights and a head of 131 M. nf4 has 4 bits and a float32 per 64 weights.
    dense_bytes, nf4_bytes = 2 * (4 * 218.1e6 + 131e6), 4 * 218.1e6 * (0.5 + 4 / 64) + 2 * 131e6
    assert run.document.format_linears is not None
    linears = {(item.format, item.rows): item for item in run.document.format_linears.times}
    assert linears["bfloat16", 1].time.median_s == pytest.approx(dense_bytes / 3.0e12, rel=0.02), (
        "without the slow host"
    )
    assert linears["nf4", 1].time.median_s == pytest.approx(nf4_bytes / 3.0e12, rel=0.05)
    assert linears["nf4", 64].time.median_s > linears["bfloat16", 64].time.median_s, "dense copies are written first"
    assert all(item.graph for item in linears.values())
    tried = {lever.change for lever in decode.levers if lever.basis == "tried"} & {"nf4", "int8wo"}
    rows = [row for row in levers(run).blocks[0].rows if row[0] == decode.key.name and row[1] in tried]
    assert rows
    assert all("*all linears of a step*" in row[-1] for row in rows), "a step of the host judges no format"


@pytest.mark.ci
def test_a_gpu_without_a_fused_kernel_for_grouped_heads_repeats_them(tmp_path: Path) -> None:
    """A T4's prefill of 8 x 512 writes its scores in the math kernel; with repeated heads it does not."""
    run, _ = tried_on(T4, "float16", tmp_path)
    prefill = next(
        item for item in run.document.evidence if (item.phase, item.batch_size, item.prompt_len) == ("prefill", 8, 512)
    )
    repeated = [lever for lever in prefill.levers if lever.change == REPEATED_HEADS]
    assert [lever.basis for lever in repeated] == ["tried"]
    assert repeated[0].saves_s > 0
    [line] = [text for text in run.answer if "use_gqa_in_sdpa" in text]
    assert line.startswith(f"In a prefill of 8 x 512 {REPEATED_HEADS} saves ")


def test_4_bit_weights_on_a_t4_with_slow_cores_get_three_changes(tmp_path: Path) -> None:
    """A compiled static cache, kernels for repeated heads, and a batch of 4, each with its milliseconds.

    bitsandbytes' table has a kernel without a dense copy for up to 64 rows on a T4, so a batch of 4 costs hardly more.
    """
    run, took_s = tried_on(T4.but(launch_s=50e-6), "float16", tmp_path, quant="nf4", batch_sizes="1,4")
    assert took_s < 1.2 * BUDGET_S
    text = " ".join(run.answer)
    assert re.search(r"Batch 4 gives [34]\.\d+x the tokens/s for 1\.\d+x the step, [\d.]+ ms a token", text)
    assert re.search(rf"{GRAPHED} saves [\d.]+ ms", text)
    assert 'cache_implementation="static"' in text
    assert re.search(rf"{REPEATED_HEADS} saves [\d.]+ ms \(tried\): .*use_gqa_in_sdpa", text)
