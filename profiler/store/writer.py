"""Write a run folder: append and fsync samples, replace whole files at once."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from profiler.errors import RunError
from profiler.facts.fact import Fact
from profiler.facts.run_facts import Facts
from profiler.judge.cells import CellResult
from profiler.store.document import RunDocument, document_parts
from profiler.store.folder import CELLS_FILE, CONFIG_FILE, RUN_FILE, cells_text
from profiler.store.operators_csv import OPERATORS_FILE, operators_csv
from profiler.store.samples import SAMPLES_FILE, line_of


class RunStore:
    """Writes one run folder, alone; as a context, leaves no empty folder behind when the run never began."""

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        self.folder = folder
        self._made_folder = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not resume and _holds_a_run(folder):
                raise RunError(
                    f"{folder} already holds a run; give another --out, or finish it: roofscope run --resume {folder}."
                )
            self._samples = (folder / SAMPLES_FILE).open("a+", encoding="utf-8")
        except OSError as error:
            raise RunError(f"the run folder {folder} cannot be written: {error.strerror or error}.") from None
        try:
            fcntl.flock(self._samples, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._samples.close()
            raise RunError(f"another roofscope is writing {folder}; wait for it to end.") from None
        except OSError:
            pass  # A file system without locks (ENOLCK, ENOTSUP): nobody else can be told, and the run is worth more.
        if resume:
            _drop_torn_line(self.folder / SAMPLES_FILE)

    def append(self, fact: Fact) -> None:
        """Append one fact and push it to the disk. Raises RunError when the disk does not take it."""
        try:
            self._samples.write(line_of(fact) + "\n")
            self._samples.flush()
            os.fsync(self._samples.fileno())
        except OSError as error:
            raise RunError(
                f"{self.folder} takes no more samples: {error.strerror or error}; what was written before is kept."
            ) from None

    def write_document(self, document: RunDocument) -> None:
        """Write run.json whole."""
        write_document(self.folder, document)

    def write_cells(self, results: Sequence[CellResult]) -> None:
        """Write cells.csv whole."""
        write_cells(self.folder, results)

    def write_operators(self, facts: Facts) -> None:
        """Write operators.csv whole."""
        write_operators(self.folder, facts)

    def write_config(self, config: Mapping[str, object]) -> None:
        """Write config.json: the model's config, so that other cells can be counted without the model."""
        replace_file(self.folder / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")

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


def write_document(folder: Path, document: RunDocument) -> None:
    """Write run.json whole; a reader sees the old one or the new one, never a part."""
    replace_file(folder / RUN_FILE, document_parts(document))


def write_cells(folder: Path, results: Sequence[CellResult]) -> None:
    """Write cells.csv whole."""
    replace_file(folder / CELLS_FILE, cells_text(results))


def write_operators(folder: Path, facts: Facts) -> None:
    """Write operators.csv whole."""
    replace_file(folder / OPERATORS_FILE, map(str.encode, operators_csv(facts)))


def _holds_a_run(folder: Path) -> bool:
    """Whether there is anything to resume: a run that was killed while it loaded leaves an empty file of samples."""
    samples = folder / SAMPLES_FILE
    return (folder / RUN_FILE).exists() or (samples.exists() and samples.stat().st_size > 0)


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that was being written when the run was killed."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))


def replace_file(path: Path, content: str | bytes | Iterator[bytes]) -> None:
    """Write a file whole, in the place of one that may be there: a link is replaced, not followed.

    What is too much to hold at once comes part by part.
    Whoever ends this process meanwhile, there is the old file or the new one. Raises RunError where it cannot be
    written.
    """
    draft = path.parent / f"{path.name}.part"
    try:
        if path.exists() and not path.is_file():  # a device would be gone: /dev/null, where root writes
            raise RunError(f"{path} cannot be written: it is {'a folder' if path.is_dir() else 'no plain file'}.")
        draft.unlink(missing_ok=True)
        with draft.open("xb") as file:
            whole = content.encode() if isinstance(content, str) else content
            file.writelines([whole] if isinstance(whole, bytes) else whole)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}; what was written before is kept."
        ) from None
