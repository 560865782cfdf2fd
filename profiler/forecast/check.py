"""`forecast --check`: forecast, run, and compare, with the error by term."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from profiler.errors import RequestError
from profiler.facts.run_facts import ModelFacts
from profiler.forecast.check_log import CheckedCell, append_checks
from profiler.forecast.command import ForecastRequest
from profiler.grid.cells import Cell
from profiler.judge.cells import CellResult
from profiler.measure.sweep import sweep
from profiler.predict.result import Answer, Checked, CheckRow, ForecastCell
from profiler.report.progress import QuietListener
from profiler.run.measure import Sweep
from profiler.run.options import Options
from profiler.run.pipeline import execute
from profiler.run.validate import prepare
from profiler.store.folder import read_document

_MOST_TOKENS = 65_536
"""Cells of more tokens are forecast, and not run for a check."""


def check_forecast(folder: Path, wanted: ForecastRequest, answer: Answer, budget_s: float, where: str = "") -> Checked:
    """Run what was forecast on this device, and keep the errors. Raises RequestError where it cannot be run here."""
    document = read_document(folder)
    cells = [cell for cell in answer.cells if cell.fits and _tokens(cell) <= _MOST_TOKENS]
    if not cells:
        raise RequestError("--check: no forecast cell fits this device; ask for smaller batches.")
    model = document.model
    threads = torch.get_num_threads()
    new_tokens = wanted.new_tokens or document.grid.new_tokens
    options = Options(
        model=_model(model, where),
        prompt_lens=sorted({cell.prompt_len for cell in cells if cell.prompt_len}),
        batch_sizes=sorted({cell.batch_size for cell in cells}),
        context_lens=sorted({cell.context_len - new_tokens // 2 for cell in cells if not cell.prompt_len}),
        new_tokens=new_tokens,
        dtype=_dtype(wanted, model.dtype),
        quant=wanted.quant if wanted.quant != "none" else model.quant,
        weights=model.weights,
        engine=wanted.engine or document.engine.names[0],
        budget_s=budget_s,
        no_levers=True,
    )
    with tempfile.TemporaryDirectory(prefix="roofscope-check-") as base:
        try:
            if wanted.threads:
                torch.set_num_threads(wanted.threads)
            prepared = prepare(replace(options, out=Path(base) / "run"))
            run = execute(prepared, QuietListener(), visits=_visits_of(cells))
        finally:
            torch.set_num_threads(threads)
        measured = {_key(result): result for result in run.measured}
        device = run.document.device
    rows = tuple(CheckRow(cell, measured[_key(cell)]) for cell in cells if _key(cell) in measured)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    append_checks(
        [
            CheckedCell(
                device.name,
                document.device.threads,
                model.id,
                f"{row.forecast.phase} {row.forecast.batch_size} x {row.forecast.prompt_len}, {answer.precision}",
                row.forecast.latency_s,
                row.measured.latency_s,
                row.inside,
                now,
            )
            for row in rows
        ]
    )
    return Checked(rows)


def _model(model: ModelFacts, where: str) -> str:
    """What to load: a run keeps no path of a local model."""
    if where:
        return where
    if model.kind not in ("card", "hub"):
        raise RequestError(f"--check: {model.id} was a local path, which its run does not keep; give --model PATH.")
    return model.id


def _dtype(wanted: ForecastRequest, own: str) -> str:
    """The dtype to run in: quantised weights take their own default where the run was in float32."""
    if wanted.dtype != "auto":
        return wanted.dtype
    return "auto" if wanted.quant != "none" and own == "float32" else own


def _tokens(cell: ForecastCell) -> int:
    """Tokens of all its sequences, in the prompt or in the cache."""
    return cell.batch_size * (cell.prompt_len or cell.context_len)


def _visits_of(cells: Sequence[ForecastCell]) -> Sweep:
    """A sweep of these cells alone: a grid's lengths and batches make others of them, too."""
    wanted = {_key(cell) for cell in cells}

    def unwanted(cell: Cell) -> str | None:
        keys = {(key.phase, cell.batch_size, cell.prompt_len, key.context_len) for key in cell.keys}
        return None if keys & wanted else "is no cell of this check"

    return lambda *given, fits, **named: sweep(*given, fits=lambda cell: unwanted(cell) or fits(cell), **named)


def _key(cell: ForecastCell | CellResult) -> tuple[str, int, int, int]:
    return cell.phase, cell.batch_size, cell.prompt_len, cell.context_len
