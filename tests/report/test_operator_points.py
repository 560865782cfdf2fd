"""Operator groups on the roofline: their work adds up to the step's, and their times come from replays."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
from pages import Page

from profiler.errors import RequestError
from profiler.report.plots import draw
from profiler.report.roofline_data import group_points
from profiler.report.write import html_report
from profiler.store.folder import read_run

REFERENCE = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-xeon-float32"


def test_groups_add_up_to_the_step() -> None:
    """SmolLM2-135M in float32: all weights except norms are in products, and a decode step reads each once."""
    run = read_run(REFERENCE)
    points = group_points(run)
    assert {cell.phase for cell in points} == {"prefill", "decode"}
    for cell, groups in points.items():
        assert {group.group for group in groups} == {"attention", "attention_proj", "mlp", "lm_head"}
        assert sum(group.flops for group in groups) == pytest.approx(cell.model_flops)
        assert 0.3 < sum(group.seconds for group in groups) / cell.latency_s < 1.0
        if cell.phase == "decode" and cell.batch_size == 1:
            [mlp] = [group for group in groups if group.group == "mlp"]
            assert mlp.nbytes == 4 * 30 * 3 * 576 * 1536
            assert mlp.intensity == pytest.approx(0.5), "2 FLOPs for each weight of 4 bytes"


@pytest.mark.slow
def test_the_page_draws_them_and_a_run_without_replays_has_no_such_section(tmp_path: Path) -> None:
    page = Page(html_report(read_run(REFERENCE)))
    assert "Operators under the roof" in page.words
    folder = shutil.copytree(REFERENCE, tmp_path / "run")
    with (folder / "operators.csv").open(newline="") as file:
        rows = [{**row, "replayed_s": ""} for row in csv.DictReader(file)]
    with (folder / "operators.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    run = read_run(folder)
    assert "Operators under the roof" not in Page(html_report(run)).words
    with pytest.raises(RequestError, match="no replayed kernels"):
        draw([run], "operators")
