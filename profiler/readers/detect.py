"""Detect the kind of another tool's file by its content: JSON, JSON lines, CSV or a Markdown table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from profiler.errors import RequestError
from profiler.readers.aiperf import read_aiperf
from profiler.readers.csv_table import read_csv_table
from profiler.readers.figures import ForeignFile, escaped, refuse_impossible
from profiler.readers.guidellm import read_guidellm
from profiler.readers.llama_bench import read_llama_bench
from profiler.readers.optimum_benchmark import read_optimum_benchmark
from profiler.readers.serving import read_vllm_serving
from profiler.readers.sglang import read_sglang
from profiler.readers.transformers_benchmark import read_transformers_benchmark
from profiler.readers.vllm import read_vllm
from profiler.units import plain, visible_in

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Reader:
    """A kind of result file: its name for messages, and what reads it (None: the file is of another kind)."""

    tool: str
    read: Callable[[list[Record]], ForeignFile | None]


MOST_FILE_BYTES = 512 * 2**20
READERS = [
    Reader("llama-bench (json, jsonl, csv, md)", read_llama_bench),
    Reader("optimum-benchmark", read_optimum_benchmark),
    Reader("GuideLLM", read_guidellm),
    Reader("AIPerf, genai-perf", read_aiperf),
    Reader("SGLang bench", read_sglang),
    Reader("transformers' benchmark", read_transformers_benchmark),
    Reader("vllm bench", read_vllm),
    Reader("vllm bench serve", read_vllm_serving),
    Reader("a CSV with batch_size, prompt_len, new_tokens, tokens_per_s", read_csv_table),
]
"""Every kind of file; the first that knows a file reads it, so that the more particular ones stand first."""


def tools() -> str:
    """The names of all kinds of files, for messages."""
    *names, last = (reader.tool for reader in READERS)
    return f"{', '.join(names)} or {last}"


def read_foreign(path: Path) -> ForeignFile:
    """Another tool's file. Raises RequestError with one line for what is broken, too large, or of no known tool."""
    records = _records(path)
    for reader in READERS:
        try:
            found = reader.read(records)
        except RequestError as error:
            raise RequestError(f"{path}: {error}") from None
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, ArithmeticError) as error:
            raise RequestError(f"{path} is damaged: {type(error).__name__}: {escaped(error)}.") from None
        if found is not None:
            if not found.figures:
                raise RequestError(f"{path}: {found.tool} wrote no figure of a prefill or a decode into it.")
            try:
                refuse_impossible(found.figures)
            except RequestError as error:
                raise RequestError(f"{path}: {error}") from None
            return ForeignFile(str(path), found.tool, found.figures, found.created, found.settings)
    raise RequestError(f"{path} is no result file that is known here; known are {tools()}.")


def _records(path: Path) -> list[Record]:
    """The file's objects or rows, whatever it is written in, with texts that act on nothing."""
    if path.is_dir():
        raise RequestError(f"{path} is a folder; give a result file (a run's own: `roofscope judge` or `compare`).")
    try:
        if path.exists() and not (path.is_file() or path.is_fifo()):
            raise RequestError(f"{path} is no plain file.")
        size = path.stat().st_size
        with path.open(encoding="utf-8-sig") as file:
            # What a pipe gives, nobody knows before; characters are not more than their bytes.
            text = file.read(MOST_FILE_BYTES + 1) if size <= MOST_FILE_BYTES else ""
    except UnicodeDecodeError:
        raise RequestError(f"{path} is no text file.") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    if max(size, len(text)) > MOST_FILE_BYTES:
        raise RequestError(f"{path} has more than the {MOST_FILE_BYTES} bytes that are read of a result file.")
    if not text.strip():
        raise RequestError(f"{path} is empty.")
    is_json = text.lstrip()[0] in "[{"
    read = partial(_json, path) if is_json else _markdown if text.lstrip().startswith("|") else partial(_csv, path)
    found = read(text)
    if not found:
        raise RequestError(f"{path} holds no rows.")
    # Within quotes a line may end in the middle of a CSV's cell.
    kept = plain(text) and (is_json or '"' not in text)
    return found if kept else cast(list[Record], visible_in(found))


def _json(path: Path, text: str) -> list[Record]:
    """One document, a list of objects, or an object a line."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise RequestError(f"{path} is nested too deeply to be a result file.") from None
    except ValueError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2 or not lines[0].rstrip().endswith("}"):
            raise RequestError(f"{path} is broken JSON: {escaped(error)}.") from None
        content = [_line(path, number, line) for number, line in enumerate(lines, 1)]
    records = content if isinstance(content, list) else [content]
    if not all(isinstance(record, dict) for record in records):
        raise RequestError(f"{path} is no result file: it holds no objects.")
    return records


def _line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is broken in line {number}: {escaped(error)}.") from None


def _csv(path: Path, text: str) -> list[Record]:
    try:
        rows = filter(None, csv.reader(io.StringIO(text), strict=True))
        names = [name.strip() for name in next(rows, ())]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise RequestError(f"{path} has several columns called {escaped(twice[0])}.")
        found: list[Record] = [dict(zip_longest(names, row)) for row in rows]
        if longer := next((number for number, row in enumerate(found, 1) if None in row), None):
            raise RequestError(f"{path}: row {longer} has more cells than there are columns.")
        return found
    except csv.Error as error:
        raise RequestError(f"{path} is broken CSV: {escaped(error)}.") from None


def _markdown(text: str) -> list[Record]:
    """The rows of the first table; lines around it are left out."""
    lines = [line.strip().strip("|").split("|") for line in text.splitlines() if line.strip().startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    header, *rows = cells
    return [dict(zip(header, row, strict=False)) for row in rows if not all(set(cell) <= set("-: ") for cell in row)]
