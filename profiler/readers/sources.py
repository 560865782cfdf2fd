"""Find the tables, JSON objects and printed reports in the text of another tool's file, with any text around them."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path

from profiler.errors import RequestError
from profiler.readers.printed import printed_records
from profiler.readers.values import Record, escaped
from profiler.units import plain, visible_in

MOST_FILE_BYTES = 512 * 2**20
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_BEGINS_JSON = re.compile(r"^\s*(?=[{\[])", re.MULTILINE)
# The line of dashes below a table's head.
_RULE = re.compile(r"[\s>]*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*")
_QUOTED = re.compile(r"^[\s>]*")


@dataclass(frozen=True)
class Source:
    """One table, one list of objects, or the printed reports of a file."""

    records: Sequence[Record]
    text: str = ""
    """The whole file, whose other lines may name the device or the options."""
    remarks: tuple[str, ...] = ()
    """Sentences about rows that were left out."""


def sources_of(path: Path, text: str) -> Iterator[list[Source]]:
    """What a reader may know in the text of a file: tables and printed reports, then JSON, then a CSV.

    Each is asked for only if no reader knew the one before. Raises RequestError for broken JSON or CSV.
    """
    is_json = text.lstrip()[0] in "[{"
    # A quoted cell of a CSV may contain a line end, which has to be escaped.
    unchanged = plain(text) and (is_json or '"' not in text)
    groups = iter([[_objects(path, text, strict=True)]]) if is_json else _within(path, text)
    for group in groups:
        yield [
            source if unchanged else replace(source, records=visible_in(list(source.records)))
            for source in group
            if source.records
        ]


def _within(path: Path, text: str) -> Iterator[list[Source]]:
    yield [*_markdown(text), Source(printed_records(text), text)]
    yield [_objects(path, text, strict=False)]
    yield [_csv(path, text)]


def text_of(path: Path) -> str:
    """The text of a result file, with plain line ends. Raises RequestError for a file that cannot be read."""
    if path.is_dir():
        raise RequestError(f"{path} is a folder; give a result file (a run's own: `roofscope judge` or `compare`).")
    try:
        if path.exists() and not (path.is_file() or path.is_fifo()):
            raise RequestError(f"{path} is not a regular file.")
        size = path.stat().st_size
        with path.open("rb") as file:
            # The size of a pipe is unknown.
            content = file.read(MOST_FILE_BYTES + 1) if size <= MOST_FILE_BYTES else b""
        # Redirected output of Windows' PowerShell is UTF-16.
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        raise RequestError(f"{path} is not a text file.") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    if max(size, len(content)) > MOST_FILE_BYTES:
        raise RequestError(f"{path} has more than the {MOST_FILE_BYTES} bytes that a result file may have.")
    if not text.strip():
        raise RequestError(f"{path} is empty.")
    return _COLOURS.sub("", text.replace("\r\n", "\n").replace("\u00a0", " "))


def _objects(path: Path, text: str, *, strict: bool) -> Source:
    """The objects of a JSON document, of JSON lines, or of JSON between other lines.

    With `strict`, as for a text that begins with JSON, broken JSON raises RequestError; otherwise it is left out.
    """
    decoder, end, values, broken = json.JSONDecoder(), 0, [], False
    for begin in _BEGINS_JSON.finditer(text):
        if begin.end() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, begin.end())
        except RecursionError:
            raise RequestError(f"{path} is nested too deeply to be a result file.") from None
        except ValueError as error:
            if strict:
                line = text.count("\n", 0, begin.end()) + 1
                raise RequestError(f"{path} is broken JSON in line {line}: {escaped(error)}.") from None
            broken = True
            continue
        values += value if isinstance(value, list) else [value]
    if strict and not all(isinstance(value, dict) for value in values):
        raise RequestError(f"{path} is not a result file: it has no JSON objects.")
    records = [value for value in values if isinstance(value, dict)]
    return Source(records, text, ("a part of its JSON is broken, and was left out.",) if broken else ())


def _csv(path: Path, text: str) -> Source:
    """The rows of a table; lines of one cell are text around it, and so is what comes before its head."""
    delimiter = next((sign for sign in ",;\t" if sign in text), ",")
    try:
        rows = [row for row in csv.reader(io.StringIO(text), strict=True, delimiter=delimiter) if len(row) > 1]
    except csv.Error as error:
        raise RequestError(f"{path} is broken CSV: {escaped(error)}.") from None
    # A title has fewer cells than the head after it.
    head = next((index for index, (row, after) in enumerate(pairwise(rows)) if len(row) >= len(after)), 0)
    names = [name.strip() for name in rows[head]] if rows else []
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1 and name]:
        raise RequestError(f"{path} has several columns called {escaped(repeated[0])}.")
    numbered = list(enumerate(rows[head + 1 :], 1))
    remarks = [
        f"row {number} has {len(row)} cells for {len(names)} columns, and was left out."
        for number, row in numbered
        if len(row) > len(names)
    ]
    records = [dict(zip_longest(names, row)) for _, row in numbered if len(row) <= len(names)]
    return Source(records, text, tuple(remarks))


def _markdown(text: str) -> list[Source]:
    """Every table with a head and a line of dashes; other lines are skipped, within a table, too."""
    lines = [_QUOTED.sub("", line).rstrip() for line in text.splitlines()]
    heads = [
        number - 1
        for number, line in enumerate(lines)
        if number and "|" in line and "|" in lines[number - 1] and _RULE.fullmatch(line)
    ]
    return [_table(lines[first:last], text) for first, last in pairwise([*heads, len(lines)])]


def _table(lines: Sequence[str], text: str) -> Source:
    head, _, *rest = lines
    names, records, remarks = _cells(head), [], []
    rows = [line for line in rest if line.startswith("|") or ("|" in line and not head.startswith("|"))]
    for number, line in enumerate(rows, 1):
        cells = _cells(line)
        if len(cells) == len(names) and line.endswith("|") == head.endswith("|"):
            records.append(dict(zip(names, cells, strict=True)))
        else:
            remarks.append(f"row {number} is cut or broken ({len(cells)} of {len(names)} cells), and was left out.")
    return Source(records, text, tuple(remarks))


def _cells(line: str) -> list[str]:
    return [cell.strip(" *`") for cell in line.removeprefix("|").removesuffix("|").split("|")]
