"""A run on disk: run.json, samples.jsonl and cells.csv. Samples are appended and fsynced as they come."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from profiler.errors import RunError
from profiler.grid import Cell
from profiler.timing.outcomes import Gap, Visit

SCHEMA_VERSION = 3

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

_RUN = "run.json"
_SAMPLES = "samples.jsonl"
_CELLS = "cells.csv"


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


_LISTS = ("decode_s", "warm_up_s", "more_prefill_s")


class RunStore:
    """Writes one run folder, alone; as a context, leaves no empty folder behind when the run never began."""

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        self.folder = folder
        self._made_folder = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not resume and ((folder / _RUN).exists() or (folder / _SAMPLES).exists()):
                raise RunError(f"{folder} already holds a run; give another --out, or --resume {folder} to finish it.")
            self._samples = (folder / _SAMPLES).open("a+", encoding="utf-8")
        except OSError as error:
            raise RunError(f"the run folder {folder} cannot be written: {error.strerror or error}.") from None
        try:
            fcntl.flock(self._samples, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._samples.close()
            raise RunError(f"another roofscope is writing {folder}; wait for it to end.") from None
        if resume:
            _drop_torn_line(self.folder / _SAMPLES)

    def restored(self) -> tuple[dict[Cell, list[Visit]], dict[Cell, Gap]]:
        """The visits and gaps that an interrupted run has left, by cell."""
        visits: dict[Cell, list[Visit]] = {}
        gaps: dict[Cell, Gap] = {}
        for record in read_samples(self.folder):
            kind = record.pop("kind")
            if kind == "sentinel":
                continue
            cell = Cell(**{item.name: record.pop(item.name) for item in fields(Cell) if item.name in record})
            if kind == "gap":
                gaps[cell] = Gap(cell=cell, **record)
            else:
                times: dict[str, Any] = {name: tuple(record.pop(name)) for name in _LISTS if name in record}
                visits.setdefault(cell, []).append(Visit(cell=cell, **times, **record))
        return visits, gaps

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one raw record and push it to the disk. Raises RunError when the disk does not take it."""
        try:
            self._samples.write(json.dumps(record, allow_nan=False) + "\n")
            self._samples.flush()
            os.fsync(self._samples.fileno())
        except OSError as error:
            raise RunError(
                f"{self.folder} takes no more samples: {error.strerror or error}; what was written before is kept."
            ) from None

    def write_document(self, document: RunDocument) -> None:
        """Write run.json whole; a reader sees the old one or the new one, never a part."""
        _replace(self.folder / _RUN, document.model_dump_json(indent=2) + "\n")

    def write_cells(self, cells: pd.DataFrame) -> None:
        """Write cells.csv whole."""
        _replace(self.folder / _CELLS, cells.to_csv(index=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._samples.close()
        if not (self.folder / _RUN).exists():
            (self.folder / _SAMPLES).unlink(missing_ok=True)
            if self._made_folder:
                self.folder.rmdir()


def read_document(folder: Path) -> RunDocument:
    """Read run.json. Raises RunError when it is missing, damaged, or from a newer version."""
    document_path = folder / _RUN
    if not folder.is_dir():
        raise RunError(f"there is no run folder at {folder}.")
    if not document_path.is_file():
        raise RunError(f"{folder} is no run folder: it has no {_RUN}.")
    try:
        content = json.loads(document_path.read_text(encoding="utf-8"))
        document = RunDocument.model_validate(_migrated(folder, content))
    except (ValidationError, ValueError, AttributeError, KeyError, TypeError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise RunError(f"{document_path} is damaged or from another version: {problem}.") from None
    return document


def _migrated(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """A run.json of an older version as this one would have written it. Raises RunError for a newer one."""
    version = content.get("schema_version", 0)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RunError(f"{folder} was written by a newer roofscope (schema {version}); upgrade to read it.")
    for known, migrate in sorted(_MIGRATIONS.items()):
        if version == known:
            content = {**migrate(content), "schema_version": known + 1}
            version = known + 1
    return content


def _from_1(content: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 knew one engine a run, no context lengths, and one link that offloaded weights cross."""
    engine, ceilings, model = dict(content["engine"]), dict(content["ceilings"]), dict(content["model"])
    link = ceilings.pop("host_link", None)
    model.pop("offloaded", None)
    evidence = [{"context_len": 0, "engine": engine["name"], **item} for item in content.get("evidence", [])]
    return {
        **content,
        "evidence": evidence,
        "engine": {"names": [engine.pop("name")], **engine},
        "ceilings": {**ceilings, "links": {"host": link} if link else {}},
        "model": {**model, "offloaded_bytes": {}},
        "grid": {**content["grid"], "context_lens": []},
    }


def _from_2(content: dict[str, Any]) -> dict[str, Any]:
    """Schema 2 counted what dequantising took among the kernels' losses, and did not say how far a term may be off."""
    return {**content, "evidence": [{"split_half_widths_s": {}, **item} for item in content.get("evidence", [])]}


# From which schema to the next one.
_MIGRATIONS = {1: _from_1, 2: _from_2}
# Columns that cells.csv of older schemas did not have, with what stands for them.
_ADDED_SINCE_1: dict[str, str | float] = {
    "engine": "eager",
    "ttft_s": math.nan,
    "first_step_s": math.nan,
    "p90_s": math.nan,
    "p99_s": math.nan,
    "issue_s": math.nan,
    "joules_per_token": math.nan,
    "device_memory_bytes": math.nan,
    "stopped": "",
    "dequantise_s": 0.0,
}


def read_run(folder: Path) -> Run:
    """Read a run folder. Raises RunError with the file that is missing or damaged."""
    document, cells_path = read_document(folder), folder / _CELLS
    try:
        cells = pd.read_csv(cells_path)
    except FileNotFoundError:
        raise RunError(f"{folder} has no {_CELLS}: the run ended before its first cell.") from None
    except (pd.errors.ParserError, UnicodeDecodeError) as error:
        raise RunError(f"{cells_path} is damaged: {error}.") from None
    missing = [column for column in CELL_COLUMNS if column not in cells.columns]
    if missing and missing[0] not in _ADDED_SINCE_1:
        raise RunError(f"{cells_path} lacks the column {missing[0]!r}.")
    for column in missing:
        cells[column] = _ADDED_SINCE_1[column]
    return Run(folder, document, cells)


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """All raw records of samples.jsonl. Raises RunError naming the first line that cannot be read."""
    records = []
    with (folder / _SAMPLES).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                records.append(json.loads(line))
            except ValueError:
                raise RunError(f"{folder / _SAMPLES}, line {number} is damaged.") from None
    return records


def refuse_another(old: RunDocument, new: RunDocument) -> None:
    """Raises RunError when a run cannot be finished here: it was on another device, model or software."""
    facts = [("device", key, old.device.get(key), new.device.get(key)) for key in ("name", "threads", "memory_bytes")]
    facts += [("model", key, old.model.get(key), new.model.get(key)) for key in ("id", "params", "dtype", "quant")]
    facts += [("software", key, old.software.get(key), new.software.get(key)) for key in ("torch", "transformers")]
    for part, key, before, now in facts:
        if before != now:
            raise RunError(f"this run cannot be resumed here: its {part}'s {key} was {before}, and now is {now}.")


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that was being written when the run was killed."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))


def _replace(path: Path, text: str) -> None:
    draft = path.with_suffix(path.suffix + ".part")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}; what was written before is kept."
        ) from None
