"""Read and write a run folder: samples are appended and fsynced, whole files replaced at once."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import TypeAdapter, ValidationError

from profiler.errors import RunError
from profiler.facts.ceilings import Ceilings
from profiler.facts.fact import Fact, MergedFacts
from profiler.facts.operators import OperatorWork
from profiler.facts.overhead import bounded_by_steps
from profiler.facts.run_facts import Facts, ModelFacts
from profiler.grid.cells import Cell, CellKey, Grid
from profiler.json_document import view
from profiler.judge.cells import CELL_COLUMNS, CellResult
from profiler.store.document import (
    OLDEST_SCHEMA,
    RUN_DOCUMENT,
    SCHEMA_VERSION,
    RunDocument,
    content_now,
    document_json,
    name_now,
)
from profiler.store.operators_csv import OPERATOR_COLUMNS, OPERATORS_FILE, read_operators, table_rows
from profiler.units import visible

if TYPE_CHECKING:
    import pandas as pd

RUN_FILE = "run.json"
SAMPLES_FILE = "samples.jsonl"
CELLS_FILE = "cells.csv"
CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Run:
    """A run: its document and its results."""

    folder: Path
    document: RunDocument
    results: tuple[CellResult, ...]
    """The rows of cells.csv, one per cell, phase and engine."""

    def __repr__(self) -> str:
        """The answer and the folder, as a notebook shows a run."""
        return "\n".join([*self.answer, f"run: {self.folder}"])

    @property
    def cells(self) -> pd.DataFrame:
        """The results as a DataFrame with the columns of cells.csv."""
        return cells_frame(self.results)

    @property
    def model(self) -> ModelFacts:
        """The model that ran."""
        return self.document.model

    @property
    def answer(self) -> Sequence[str]:
        """The sentences of the answer."""
        return self.document.answer

    @property
    def measured(self) -> list[CellResult]:
        """The results whose status is `ok`."""
        return [result for result in self.results if result.status == "ok"]

    def by_key(self) -> dict[CellKey, CellResult]:
        """The results by cell, phase and engine."""
        return {result.key: result for result in self.results}


def cells_frame(results: Sequence[CellResult]) -> pd.DataFrame:
    import pandas as pd  # it takes a third of a second and 65 MB, which a run does not need while it measures

    rows = [[getattr(result, name) for name in CELL_COLUMNS] for result in results]
    return pd.DataFrame(rows, columns=list(CELL_COLUMNS))


def read_document(folder: Path) -> RunDocument:
    """Read run.json. Raises RunError if it is missing, damaged or from a newer version."""
    document_path = folder / RUN_FILE
    if not folder.is_dir():
        raise RunError(f"there is no run folder at {folder}.")
    if not document_path.is_file():
        raise RunError(f"{folder} is not a run folder: it has no {RUN_FILE}.")
    try:
        content = content_now(json.loads(document_path.read_text(encoding="utf-8")))
        version = content.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise RunError(f"{folder} was written by a newer roofscope (schema {version}); upgrade to read it.")
        if isinstance(version, int) and version < OLDEST_SCHEMA:
            raise RunError(  # 0.3.0 is the last release that reads older schemas
                f"{folder} was written by an older roofscope (schema {version}); read it with roofscope 0.3.0, or"
                " measure again."
            )
        return RUN_DOCUMENT.validate_python(content)
    except (ValidationError, ValueError, AttributeError, KeyError, TypeError, OSError, RecursionError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise RunError(f"{document_path} is damaged or from another version: {problem}.") from None


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run folder. Raises RunError naming the missing or damaged file."""
    folder = Path(folder)
    document = read_document(folder)
    results = read_results(folder)
    unknown = [result.engine for result in results if result.engine not in document.engine.names]
    if unknown:
        raise RunError(f"{folder / CELLS_FILE} is from another run: {RUN_FILE} has no engine {unknown[0]!r}.")
    return Run(folder, document, results)


def read_results(folder: Path) -> tuple[CellResult, ...]:
    """Read cells.csv, one result per row. Raises RunError if the file is missing or damaged."""
    cells_path = folder / CELLS_FILE
    try:
        with cells_path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            reader.fieldnames = [name_now(name) for name in reader.fieldnames or ()]
            missing = [name for name in _REQUIRED if name not in reader.fieldnames]
            if missing:
                raise RunError(f"{cells_path} lacks the column {missing[0]!r}.")
            # Without empty texts, a field's default applies; an integer field takes no `.0`.
            texts = ({name: text for name in CELL_COLUMNS if (text := row.get(name))} for row in reader)
            clean = ({name: name_now(visible(text).removesuffix(".0")) for name, text in row.items()} for row in texts)
            return tuple(map(_adapter(CellResult).validate_python, clean))
    except FileNotFoundError:
        raise RunError(f"{folder} has no {CELLS_FILE}: the run ended before its first cell.") from None
    except ValidationError as error:
        problem = error.errors()[0]
        raise RunError(f"{cells_path} is damaged: {problem['loc'][0]}: {problem['msg']}.") from None
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise RunError(f"{cells_path} is damaged: {error}.") from None


_REQUIRED = (*(item.name for item in fields(CellResult) if item.default is MISSING), "latency_s")
"""Columns without which a row says nothing; a run that was written before another column existed lacks it."""


_LEFT = ("after_silence", "fresh_start", "packed_batches", "queue", "ranks")
"""Kinds of facts that older versions stored and nothing reads any more; a tuple, since a damaged kind may be a list."""
_CELL = tuple(item.name for item in fields(Cell))
_adapter = cache(TypeAdapter)


def line_of(fact: Fact) -> str:
    """A fact as one line of JSON without a line end; the fields of its cell are keys of the object."""
    values = asdict(cast(Any, fact))
    key = values.pop("key", None)
    cell = key["cell"] if key else values.pop("cell", None)
    flat = {**({"phase": key["phase"]} if key else {}), **(cell or {})}
    return json.dumps({"kind": fact.KIND, **flat, **values}, allow_nan=False)


def fact_of(record: Mapping[str, Any]) -> Fact:
    """The fact of a parsed line. Raises ValidationError, KeyError or TypeError if the record is not a fact."""
    values = dict(record)
    kind: Any = Fact.kinds[values.pop("kind")]
    names = {item.name for item in fields(kind)}
    if "key" in names or "cell" in names:
        cell = {name: values.pop(name) for name in _CELL if name in values}
        if "key" in names:
            values["key"] = {"phase": values.pop("phase"), "cell": cell}
        else:
            values["cell"] = cell
    return cast(Fact, _adapter(kind).validate_python(values))


def read_facts_of(folder: Path) -> list[Fact]:
    """All facts of samples.jsonl. Raises RunError naming the first line that cannot be read."""
    facts = []
    try:
        file = (folder / SAMPLES_FILE).open("rb")
    except OSError:
        raise RunError(f"{folder} has no {SAMPLES_FILE}.") from None
    with file:
        for number, raw in enumerate(file, start=1):
            try:
                record = content_now(json.loads(raw))
            except (ValueError, RecursionError):
                raise RunError(f"{folder / SAMPLES_FILE}, line {number} is damaged.") from None
            if not isinstance(record, dict):
                raise RunError(f"{folder / SAMPLES_FILE}, line {number} is not a JSON object.")
            if record.get("kind") in _LEFT:
                continue
            try:
                facts.append(fact_of(record))
            except (ValidationError, KeyError, TypeError):
                raise RunError(f"{folder / SAMPLES_FILE}, line {number} is not a fact of a run.") from None
    return facts


def read_gathered(folder: Path) -> MergedFacts:
    """All facts in samples.jsonl, merged. Raises RunError for a damaged file, and for the same repetition twice."""
    merged = MergedFacts()
    for fact in read_facts_of(folder):
        fact.merge_into(merged)
    for cell, repetitions in merged.repetitions.items():
        if len({(repetition.round, repetition.at_unix_s) for repetition in repetitions}) < len(repetitions):
            raise RunError(
                f"{folder / SAMPLES_FILE} contains a repetition of {cell.name} twice, and a copy is not a second"
                " measurement; remove the copied lines."
            )
    return merged


def facts_of(document: RunDocument, operators: Mapping[CellKey, Sequence[OperatorWork]], merged: MergedFacts) -> Facts:
    """The input of a judgement. It shares the collections of `merged`, so it grows with them, except for overhead."""
    shared = vars(merged)
    if document.device.hides_overhead:
        shared = {**shared, "overhead": bounded_by_steps(merged.overhead, merged.repetitions)}
    return Facts(
        **shared,
        model=document.model,
        device=document.device,
        grid=view(Grid, document.grid, engines=document.engine.names),
        ceilings=merged.latest(Ceilings) or document.ceilings.ceilings,
        operators=operators,
        graph_engines=frozenset(document.engine.replay_as_graph),
        generate_engines=frozenset(document.engine.generate),
        owning_engines=frozenset(document.engine.owned),
    )


def read_facts(folder: Path, document: RunDocument, gathered: MergedFacts) -> Facts:
    """The input of a judgement of a run folder. Raises RunError if facts are missing."""
    facts = facts_of(document, read_operators(folder), gathered)
    for key in facts.grid.keys:
        if key not in facts.operators or key.cell not in facts.predicted_peak_bytes:
            raise RunError(f"{folder} cannot be judged: the facts of {key.name} are missing.")
    return facts


def refuse_another(old: RunDocument, new: RunDocument) -> None:
    """Raises RunError if a run cannot be resumed here, because its device, model or software differs."""
    parts = (
        ("device", vars(old.device), vars(new.device), ("name", "threads", "memory_bytes")),
        ("model", vars(old.model), vars(new.model), ("id", "params", "dtype", "quant")),
        ("software", old.software, new.software, ("torch", "transformers")),
    )
    for part, before, now, names in parts:
        for name in names:
            if before.get(name) != now.get(name):
                change = f"was {before.get(name)} and is now {now.get(name)}"
                raise RunError(f"this run cannot be resumed here: its {part}'s {name} {change}.")


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
