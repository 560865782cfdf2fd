"""Writing a run: samples are appended and fsynced as they come, whole files are replaced at once."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pandas as pd

from profiler.errors import RunError
from profiler.grid import Cell
from profiler.record.run import CELLS_FILE, RUN_FILE, SAMPLES_FILE, RunDocument, read_samples
from profiler.timing.outcomes import Gap, Visit

_LISTS = ("decode_s", "warm_up_s", "more_prefill_s")


class RunStore:
    """Writes one run folder, alone; as a context, leaves no empty folder behind when the run never began."""

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        self.folder = folder
        self._made_folder = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not resume and ((folder / RUN_FILE).exists() or (folder / SAMPLES_FILE).exists()):
                raise RunError(f"{folder} already holds a run; give another --out, or --resume {folder} to finish it.")
            self._samples = (folder / SAMPLES_FILE).open("a+", encoding="utf-8")
        except OSError as error:
            raise RunError(f"the run folder {folder} cannot be written: {error.strerror or error}.") from None
        try:
            fcntl.flock(self._samples, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._samples.close()
            raise RunError(f"another roofscope is writing {folder}; wait for it to end.") from None
        if resume:
            _drop_torn_line(self.folder / SAMPLES_FILE)

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
        _replace(self.folder / RUN_FILE, document.model_dump_json(indent=2) + "\n")

    def write_cells(self, cells: pd.DataFrame) -> None:
        """Write cells.csv whole."""
        _replace(self.folder / CELLS_FILE, cells.to_csv(index=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._samples.close()
        if not (self.folder / RUN_FILE).exists():
            (self.folder / SAMPLES_FILE).unlink(missing_ok=True)
            if self._made_folder:
                self.folder.rmdir()


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
