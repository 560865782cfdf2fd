"""`forecast --check`: cells are run here, compared with their forecast, and logged for later forecasts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import profiler
from profiler.forecast import check as checking
from profiler.forecast.check import check_forecast
from profiler.forecast.check_log import CheckedCell, append_checks, checks_line, read_checks
from profiler.forecast.command import ForecastRequest
from profiler.grid.cells import Cell, Grid, Phase
from profiler.predict.result import Answer, ForecastCell, ForecastError
from profiler.run.validate import PreparedRun

REFERENCE = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-2-cores"


@pytest.mark.slow
def test_a_forecast_is_run_and_its_errors_are_kept(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roofscope: Any
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    run = profiler.profile(
        str(tiny_folder), prompt_lens=[8, 32], batch_sizes=[1, 2, 4], new_tokens=8, budget_s=1, no_levers=True,
        out=tmp_path / "run",
    )  # fmt: skip
    arguments = ("forecast", str(run.folder), "--batch-sizes", "2,8", "--prompt-lens", "16", "--check", "--budget", "1")
    outcome = roofscope(*arguments, "--format", "json")
    # The model was a local folder: run.json has its name, but not its path.
    assert outcome.code == 2
    assert "--model" in outcome.err
    outcome = roofscope(*arguments, "--model", str(tiny_folder), "--format", "json")
    assert outcome.code == 0, outcome.err
    rows = json.loads(outcome.out)["check"]
    assert {(row["phase"], row["batch_size"]) for row in rows} == {
        (phase, batch) for phase in ("prefill", "decode") for batch in (2, 8)
    }
    for row in rows:
        assert row["error"] == pytest.approx(row["forecast_s"] / row["measured_s"] - 1)
        assert sum(row["terms"].values()) == pytest.approx(row["forecast_s"] - row["measured_s"], abs=1e-9)
    assert len(read_checks()) == 4
    shown = roofscope("forecast", str(run.folder), "--keep")
    assert "On this machine forecasts have been" in " ".join(shown.out.split())
    assert "of 4 checked cells" in " ".join(shown.out.split())
    page = (run.folder / "report.html").read_text()
    assert "What would happen" in page


def test_checks_of_other_machines_and_torn_lines_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert checks_line("a CPU", 2) == ()
    cells = [
        CheckedCell("a CPU", 2, "m", "decode 1 x 8", 1.1, 1.0, True, "2026-11-20"),
        CheckedCell("a CPU", 2, "m", "decode 2 x 8", 0.8, 1.0, False, "2026-11-20"),
        CheckedCell("a CPU", 4, "m", "decode 2 x 8", 9.0, 1.0, False, "2026-11-20"),
    ]
    append_checks(cells)
    with (tmp_path / "roofscope" / "checks.jsonl").open("a") as file:
        file.write("{torn")
    [line] = checks_line("a CPU", 2)
    assert "15.0 % off" in line
    assert "2 checked cells, 1 of them inside" in line


def forecast_cell(phase: Phase, batch_size: int, prompt_len: int, context_len: int) -> ForecastCell:
    return ForecastCell(phase, batch_size, prompt_len, context_len, 1.0, 0.9, 1.1, 1.0, "memory-bound", "measured")


def test_only_cells_of_up_to_65536_tokens_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 32 and 1,024 and caches of 16 and 1,024 tokens, at batches of 1 and 128.

    1,024 x 128 is 131,072 tokens, which is not run, although other cells have that length or that batch.
    """
    cells = tuple(
        cell
        for batch in (1, 128)
        for length in (32, 1024)
        for cell in (forecast_cell("prefill", batch, length, 0), forecast_cell("decode", batch, length, length + 4))
    )
    cells += tuple(forecast_cell("decode", batch, 0, context + 4) for batch in (1, 128) for context in (16, 1024))
    error = ForecastError(None, None, 0, "")
    answer = Answer("a run", "smollm2-135m", "float32", "a CPU", "", error, None, cells)
    tried: list[Cell] = []

    class Swept(Exception):  # noqa: N818  it ends the check where the sweep would begin
        pass

    def swept(grid: Grid, *, fits: Any) -> Any:
        tried.extend(cell for cell in grid.cells if fits(cell) is None)
        raise Swept

    def execute(prepared: PreparedRun, _listener: object, visits: Any) -> None:
        visits(prepared.grid, fits=lambda cell: None)

    monkeypatch.setattr(checking, "sweep", swept)
    monkeypatch.setattr(checking, "execute", execute)
    wanted = ForecastRequest(new_tokens=8, engine="eager", dtype="float32")
    with pytest.raises(Swept):
        check_forecast(REFERENCE, wanted, answer, 1.0, "smollm2-135m")
    run = {(1, 32, 0), (128, 32, 0), (1, 1024, 0), (1, 0, 16), (128, 0, 16), (1, 0, 1024)}
    assert {(cell.batch_size, cell.prompt_len, cell.context_len) for cell in tried} == run
