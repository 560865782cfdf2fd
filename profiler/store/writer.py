"""Write a run folder: append and fsync samples, replace whole files at once."""

import contextlib
import csv
import fcntl
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from profiler.errors import RunError
from profiler.facts.fact import Fact
from profiler.facts.run_facts import Facts
from profiler.judge.cells import CELL_COLUMNS, CellResult
from profiler.store.document import RunDocument, document_json
from profiler.store.folder import CELLS_FILE, CONFIG_FILE, RUN_FILE
from profiler.store.operators_csv import OPERATOR_COLUMNS, OPERATORS_FILE, table_rows
from profiler.store.samples import SAMPLES_FILE, line_of


class RunStore:
    """Writes one run folder, which it locks. As a context manager, it removes the folder of a run that never began.

    Raises RunError if the folder cannot be written, is locked by another process, or has a run and `resume` is False.
    """

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        self.folder = folder
        self._made_folder = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            samples = folder / SAMPLES_FILE
            # A run killed while it loads leaves an empty samples.jsonl.
            has_run = (folder / RUN_FILE).exists() or (samples.exists() and samples.stat().st_size > 0)
            if not resume and has_run:
                raise RunError(
                    f"{folder} already has a run; use another --out, or finish it: roofscope run --resume {folder}."
                )
            self._samples = samples.open("a+", encoding="utf-8")
        except OSError as error:
            raise RunError(f"the run folder {folder} cannot be written: {error.strerror or error}.") from None
        try:
            fcntl.flock(self._samples, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._samples.close()
            raise RunError(f"another roofscope is writing {folder}; wait for it to end.") from None
        except OSError:
            pass  # The file system has no locks (ENOLCK, ENOTSUP); an unguarded run is better than none.
        if resume:
            content = samples.read_bytes()
            os.truncate(samples, content.rfind(b"\n") + 1)  # without the torn line that a kill during a write leaves

    def append(self, fact: Fact) -> None:
        """Append one fact and fsync the file. Raises RunError if it cannot be written."""
        try:
            self._samples.write(line_of(fact) + "\n")
            self._samples.flush()
            os.fsync(self._samples.fileno())
        except OSError as error:
            raise RunError(
                f"{self.folder / SAMPLES_FILE} cannot be written: {error.strerror or error};"
                " the samples before this one are saved."
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # of a full disk, which `append` reports
            self._samples.close()
        if not (self.folder / RUN_FILE).exists():
            (self.folder / SAMPLES_FILE).unlink(missing_ok=True)
            if self._made_folder:
                self.folder.rmdir()


def write_document(folder: Path, document: RunDocument) -> None:
    """Replace run.json. A reader sees the old file or the new one, never a part."""
    replace_file(folder / RUN_FILE, document_json(document))


def write_cells(folder: Path, results: Sequence[CellResult]) -> None:
    """Replace cells.csv; unknown numbers (NaN) are empty."""
    rows = ([getattr(result, name) for name in CELL_COLUMNS] for result in results)
    known = (["" if value != value else value for value in row] for row in rows)
    _replace_table(folder / CELLS_FILE, CELL_COLUMNS, known)


def write_operators(folder: Path, facts: Facts) -> None:
    rows = ([row[name] for name in OPERATOR_COLUMNS] for row in table_rows(facts))
    _replace_table(folder / OPERATORS_FILE, OPERATOR_COLUMNS, rows)


def _replace_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    replace_file(path, text.getvalue())


def write_config(folder: Path, config: Mapping[str, object]) -> None:
    """Replace config.json: the model's config, from which other cells can be counted without the model."""
    replace_file(folder / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file, or a link, atomically: a killed process leaves the old one or the new. Raises RunError."""
    draft = path.parent / f"{path.name}.part"
    try:
        if path.exists() and not path.is_file():  # root could replace a device such as /dev/null
            raise RunError(f"{path} cannot be written: it is {'a folder' if path.is_dir() else 'not a regular file'}.")
        draft.unlink(missing_ok=True)
        with draft.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}; an earlier version is unchanged."
        ) from None
