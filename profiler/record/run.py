"""A run folder, read back: run.json, samples.jsonl and cells.csv."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from profiler.errors import RunError
from profiler.record.migrations import ADDED_SINCE_1, migrated

CELL_COLUMNS = (
    "phase",
    "batch_size",
    "prompt_len",
    "context_len",
    "new_tokens",
    "status",
    "latency_s",
    "latency_low_s",
    "latency_high_s",
    "samples",
    "tokens_per_s",
    "tokens_per_s_per_seq",
    "model_flops",
    "model_bytes",
    "executed_flops",
    "executed_bytes",
    "intensity",
    "flops_per_s",
    "bytes_per_s",
    "mfu",
    "mbu",
    "attained",
    "floor_s",
    "weights_s",
    "kv_s",
    "compute_s",
    "kernel_s",
    "avoidable_s",
    "dispatch_s",
    "unexplained_s",
    "regime",
    "confidence",
    "peak_memory_bytes",
    "noise",
    "engine",
    "ttft_s",
    "first_step_s",
    "p90_s",
    "p99_s",
    "issue_s",
    "joules_per_token",
    "device_memory_bytes",
    "stopped",
    "dequantise_s",
)
"""The columns of cells.csv. A prefill's latency is that of the whole prompt; a decode's that of one step."""

CELL_KEY = ("phase", "batch_size", "prompt_len", "context_len", "engine")
"""The columns that tell one row from another; `evidence` in run.json carries them as well."""

RUN_FILE = "run.json"
SAMPLES_FILE = "samples.jsonl"
CELLS_FILE = "cells.csv"


class RunDocument(BaseModel):
    """run.json: everything about a run but its samples."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int
    roofscope: str
    created: str
    command: str
    model: dict[str, Any]
    device: dict[str, Any]
    software: dict[str, str]
    ceilings: dict[str, Any]
    grid: dict[str, Any]
    engine: dict[str, Any]
    counting: dict[str, Any] = {}
    health: dict[str, Any] = {}
    evidence: list[dict[str, Any]] = []
    scaling: list[dict[str, Any]] = []
    breakdown: list[dict[str, Any]] = []
    activity: list[dict[str, Any]] = []
    quality: dict[str, Any] = {}
    answer: list[str] = []
    warnings: list[str] = []
    finished: bool = False


@dataclass(frozen=True)
class Run:
    """A run that was read back or has just ended."""

    folder: Path
    document: RunDocument
    cells: pd.DataFrame
    """One row a phase and cell, with the columns of cells.csv."""

    @property
    def answer(self) -> list[str]:
        """The answer in sentences."""
        return self.document.answer


def read_document(folder: Path) -> RunDocument:
    """Read run.json. Raises RunError when it is missing, damaged, or from a newer version."""
    document_path = folder / RUN_FILE
    if not folder.is_dir():
        raise RunError(f"there is no run folder at {folder}.")
    if not document_path.is_file():
        raise RunError(f"{folder} is no run folder: it has no {RUN_FILE}.")
    try:
        content = json.loads(document_path.read_text(encoding="utf-8"))
        document = RunDocument.model_validate(migrated(folder, content))
    except (ValidationError, ValueError, AttributeError, KeyError, TypeError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise RunError(f"{document_path} is damaged or from another version: {problem}.") from None
    return document


def read_run(folder: Path) -> Run:
    """Read a run folder. Raises RunError with the file that is missing or damaged."""
    document, cells_path = read_document(folder), folder / CELLS_FILE
    try:
        cells = pd.read_csv(cells_path)
    except FileNotFoundError:
        raise RunError(f"{folder} has no {CELLS_FILE}: the run ended before its first cell.") from None
    except (pd.errors.ParserError, UnicodeDecodeError) as error:
        raise RunError(f"{cells_path} is damaged: {error}.") from None
    missing = [column for column in CELL_COLUMNS if column not in cells.columns]
    if missing and missing[0] not in ADDED_SINCE_1:
        raise RunError(f"{cells_path} lacks the column {missing[0]!r}.")
    for column in missing:
        cells[column] = ADDED_SINCE_1[column]
    return Run(folder, document, cells)


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """All raw records of samples.jsonl. Raises RunError naming the first line that cannot be read."""
    records = []
    with (folder / SAMPLES_FILE).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                records.append(json.loads(line))
            except ValueError:
                raise RunError(f"{folder / SAMPLES_FILE}, line {number} is damaged.") from None
    return records


def refuse_another(old: RunDocument, new: RunDocument) -> None:
    """Raises RunError when a run cannot be finished here: it was on another device, model or software."""
    facts = [("device", key, old.device.get(key), new.device.get(key)) for key in ("name", "threads", "memory_bytes")]
    facts += [("model", key, old.model.get(key), new.model.get(key)) for key in ("id", "params", "dtype", "quant")]
    facts += [("software", key, old.software.get(key), new.software.get(key)) for key in ("torch", "transformers")]
    for part, key, before, now in facts:
        if before != now:
            raise RunError(f"this run cannot be resumed here: its {part}'s {key} was {before}, and now is {now}.")
