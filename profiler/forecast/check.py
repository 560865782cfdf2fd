"""`forecast --check`: run the forecast cells on this device, and compare their times with the forecast."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from profiler.errors import RequestError
from profiler.facts.run_facts import ModelFacts
from profiler.forecast.command import CheckedCell, ForecastRequest, append_checks
from profiler.grid.cells import Cell
from profiler.judge.cells import CellResult
from profiler.measure.sweep import sweep
from profiler.predict.result import Answer, CheckedForecast, ForecastCell, checked_forecast
from profiler.report.progress import QuietListener
from profiler.roofs.fixed_work import torch_threads
from profiler.run.measure import Sweep
from profiler.run.options import Options
from profiler.run.pipeline import execute
from profiler.run.validate import prepare, recorded_options
from profiler.store.document import RunDocument
from profiler.store.folder import read_document

_MOST_TOKENS = 65_536
"""Cells of more tokens are not run for a check."""


def check_forecast(
    folder: Path, request: ForecastRequest, answer: Answer, budget_s: float, where: str = ""
) -> tuple[CheckedForecast, ...]:
    """Run the forecast cells on this device, compare them, and log the errors; `where` is the path of a local model.

    Raises RequestError if no cell fits this device, or if the model cannot be loaded here.
    """
    document = read_document(folder)
    cells = [cell for cell in answer.cells if cell.fits and cell.batch_size * cell.depth <= _MOST_TOKENS]
    if not cells:
        raise RequestError("--check: no forecast cell fits this device; use smaller --batch-sizes.")
    recorded = document.device
    threads = request.threads or (recorded.threads if recorded.kind == "cpu" else torch.get_num_threads())
    options = replace(_options(document, request, cells), model=_model(document.model, where), budget_s=budget_s)
    with tempfile.TemporaryDirectory(prefix="roofscope-check-") as base, torch_threads(threads):
        prepared = prepare(replace(options, out=Path(base) / "run"))
        run = execute(prepared, QuietListener(), visits=_visits_of(cells))
        measured = {_key(result): result for result in run.measured}
        device = run.document.device
    rows = tuple(checked_forecast(cell, measured[_key(cell)]) for cell in cells if _key(cell) in measured)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    append_checks(
        [
            CheckedCell(
                device.name,
                document.device.threads,
                document.model.id,
                f"{row.phase} {row.batch_size} x {row.prompt_len}, {answer.precision}",
                row.forecast_s,
                row.measured_s,
                row.inside,
                now,
            )
            for row in rows
        ]
    )
    return rows


def _options(document: RunDocument, request: ForecastRequest, cells: Sequence[ForecastCell]) -> Options:
    """The options of a run that measures these cells as they were forecast."""
    model, new_tokens = document.model, request.new_tokens or document.grid.new_tokens
    options = recorded_options(document, Options(device=document.device.kind, no_levers=True))
    if request.quant not in ("none", model.quant):
        options = replace(options, quant=request.quant, double_quant=False, compute_dtype="auto")
    return replace(
        options,
        prompt_lens=sorted({cell.prompt_len for cell in cells if cell.prompt_len}),
        batch_sizes=sorted({cell.batch_size for cell in cells}),
        context_lens=sorted({cell.context_len - new_tokens // 2 for cell in cells if not cell.prompt_len}),
        prefix=0,  # a forecast from a run has no cached prefix
        new_tokens=new_tokens,
        dtype=_dtype(request, model.dtype),
        engine=request.engine or document.engine.names[0],
    )


def _model(model: ModelFacts, where: str) -> str:
    """The name or path of the model to load; a run folder does not contain the path of a local model."""
    if where:
        return where
    if model.kind not in ("card", "hub"):
        raise RequestError(f"--check: {model.id} was a local path, which its run does not record; give --model PATH.")
    return model.id


def _dtype(request: ForecastRequest, run_dtype: str) -> str:
    """The dtype to run in. Quantised weights use their default dtype if the run was in float32."""
    if request.dtype != "auto":
        return request.dtype
    return "auto" if request.quant != "none" and run_dtype == "float32" else run_dtype


def _visits_of(cells: Sequence[ForecastCell]) -> Sweep:
    """A sweep that skips all other cells of the grid, which is the product of the cells' lengths and batches."""
    checked_keys = {_key(cell) for cell in cells}

    def reason_to_skip(cell: Cell) -> str | None:
        keys = {(key.phase, cell.batch_size, cell.prompt_len, key.context_len) for key in cell.keys}
        return None if keys & checked_keys else "is not a cell of this check"

    return lambda *given, fits, **named: sweep(*given, fits=lambda cell: reason_to_skip(cell) or fits(cell), **named)


def _key(cell: ForecastCell | CellResult) -> tuple[str, int, int, int]:
    return cell.phase, cell.batch_size, cell.prompt_len, cell.context_len
