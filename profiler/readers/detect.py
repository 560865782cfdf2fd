"""Detect the kind of another tool's file by its content: JSON, JSON lines, CSV or a Markdown table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from profiler.errors import RequestError
from profiler.readers.aiperf import read_aiperf
from profiler.readers.csv_table import read_csv_table
from profiler.readers.figures import ForeignFile, Record, escaped, refuse_impossible
from profiler.readers.guidellm import read_guidellm
from profiler.readers.llama_bench import read_llama_bench
from profiler.readers.optimum_benchmark import read_optimum_benchmark
from profiler.readers.serving import read_vllm_serving
from profiler.readers.sglang import read_sglang
from profiler.readers.transformers_benchmark import read_transformers_benchmark
from profiler.readers.vllm import read_vllm
from profiler.units import plain, visible_in


@dataclass(frozen=True)
class Reader:
    """A kind of result file: its name for messages, and its reader, which returns None for another kind.

    A reader gets at least one record.
    """

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
"""Every kind of file. The first reader that accepts a file reads it, so more specific ones come first."""


def tools() -> str:
    """The names of all kinds of result files as one text, for messages."""
    *names, last = (reader.tool for reader in READERS)
    return f"{', '.join(names)} or {last}"


def read_foreign(path: Path) -> ForeignFile:
    """Read another tool's result file. Raises RequestError if it is broken, too large, or of no known tool."""
    records = _records(path)
    for reader in READERS:
        try:
            result = reader.read(records)
            if result is not None:
                refuse_impossible(result.figures)
        except RequestError as error:
            raise RequestError(f"{path}: {error}") from None
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, ArithmeticError) as error:
            raise RequestError(f"{path} is damaged: {type(error).__name__}: {escaped(error)}.") from None
        if result is not None:
            if not result.figures:
                raise RequestError(f"{path}: {result.tool} wrote no time of a prefill or a decode into it.")
            return replace(result, name=str(path))
    raise RequestError(f"{path} is not a known result file; use one of {tools()}.")


def _records(path: Path) -> list[Record]:
    """The objects or rows of a JSON, CSV or Markdown file, with invisible characters of its texts escaped."""
    if path.is_dir():
        raise RequestError(f"{path} is a folder; give a result file (a run's own: `roofscope judge` or `compare`).")
    try:
        if path.exists() and not (path.is_file() or path.is_fifo()):
            raise RequestError(f"{path} is not a regular file.")
        size = path.stat().st_size
        with path.open(encoding="utf-8-sig") as file:
            # The size of a pipe is unknown; a text has at most as many characters as bytes.
            text = file.read(MOST_FILE_BYTES + 1) if size <= MOST_FILE_BYTES else ""
    except UnicodeDecodeError:
        raise RequestError(f"{path} is not a text file.") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    if max(size, len(text)) > MOST_FILE_BYTES:
        raise RequestError(f"{path} has more than the {MOST_FILE_BYTES} bytes that a result file may have.")
    if not text.strip():
        raise RequestError(f"{path} is empty.")
    is_json = text.lstrip()[0] in "[{"
    read = partial(_json, path) if is_json else _markdown if text.lstrip().startswith("|") else partial(_csv, path)
    records = read(text)
    if not records:
        raise RequestError(f"{path} has no rows.")
    # A quoted cell of a CSV may contain a line end, which has to be escaped.
    unchanged = plain(text) and (is_json or '"' not in text)
    return records if unchanged else cast(list[Record], visible_in(records))


def _json(path: Path, text: str) -> list[Record]:
    """The objects of one JSON document, of a list of objects, or of JSON lines."""
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
        raise RequestError(f"{path} is not a result file: it has no JSON objects.")
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
        if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise RequestError(f"{path} has several columns called {escaped(repeated[0])}.")
        records: list[Record] = [dict(zip_longest(names, row)) for row in rows]
        if too_long := next((number for number, row in enumerate(records, 1) if None in row), None):
            raise RequestError(f"{path}: row {too_long} has more cells than there are columns.")
        return records
    except csv.Error as error:
        raise RequestError(f"{path} is broken CSV: {escaped(error)}.") from None


def _markdown(text: str) -> list[Record]:
    """The rows of a table; lines that do not begin with `|` are ignored."""
    lines = [line.strip().strip("|").split("|") for line in text.splitlines() if line.strip().startswith("|")]
    header, *rows = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(header, row, strict=False)) for row in rows if not all(set(cell) <= set("-: ") for cell in row)]
