"""Find the tables, JSON objects and printed reports in the text of another tool's file, with any text around them."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, zip_longest
from pathlib import Path

from profiler.errors import RequestError
from profiler.readers.printed import printed_records
from profiler.readers.values import Record, escaped
from profiler.units import visible_in

MOST_FILE_BYTES = 512 * 2**20
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
# A bracket of JSON, not of a log's line such as `[I] Loading`.
_BEGINS_JSON = re.compile(r"^\s*(?=\{|\[\s*[{\[])", re.MULTILINE)
_NEXT_OBJECT = re.compile(r"[\s,]*(?=\{)")
# The line of dashes below a table's head.
_RULE = re.compile(r":?-+:?")
_DELIMITERS = "\t;,"
# A fraction where the decimal sign is a comma, as in tables of a spreadsheet with these delimiters; else thousands.
_UNCLEAR = re.compile(r"(?<![\d.,])[1-9]\d{0,2},\d{3}(?![\d.,])")
_UNCLEAR_IN = "\t;"
_UNESCAPED = re.compile(r"(?<!\\)\|")
_QUOTED = re.compile(r"^[ \t>]*", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One table, one list of objects, or the printed reports of a file."""

    records: Sequence[Record]
    text: str = ""
    """What is above a table, or the whole file; its lines may name the device or the options."""
    remarks: tuple[str, ...] = ()
    """Sentences about rows that were left out."""
    fault: str = ""
    """Why its values cannot be trusted, as a sentence; empty if they can."""

    @property
    def only(self) -> Record:
        """The one report of a tool that writes a file for each. Raises RequestError if there are several."""
        if len(self.records) > 1:
            raise RequestError(f"it has {len(self.records)} reports; give each a file.")
        return self.records[0]


def sources_of(path: Path, text: str) -> Iterator[list[Source]]:
    """What a reader may know in the text of a file: tables and printed reports, then JSON, then other tables.

    Each is asked for only if no reader knew the one before. Raises RequestError for broken JSON or CSV.
    """
    for group in [[_objects(path, text, strict=True)]] if _BEGINS_JSON.match(text) else _within(path, text):
        yield [replace(each, records=visible_in(list(each.records))) for each in group if each.records]


def _within(path: Path, text: str) -> Iterator[list[Source]]:
    yield [*_tables(path, _QUOTED.sub("", text), "|"), Source(printed_records(text), text)]
    yield [_objects(path, text, strict=False)]
    for delimiter in _DELIMITERS:
        yield _tables(path, text, delimiter)


def text_of(path: Path) -> str:
    """The text of a result file, with plain line ends. Raises RequestError for a file that cannot be read."""
    if path.is_dir():
        raise RequestError(f"{path} is a folder; give a result file (a run's own: `roofscope judge` or `compare`).")
    if path.exists() and not (path.is_file() or path.is_fifo()):
        raise RequestError(f"{path} is not a regular file.")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            # The size of a pipe is unknown.
            content = file.read(MOST_FILE_BYTES + 1) if size <= MOST_FILE_BYTES else b""
        # Redirected output of Windows' PowerShell is UTF-16.
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        raise RequestError(f"{path} is not a text file in UTF-8 or UTF-16.") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    if max(size, len(content)) > MOST_FILE_BYTES:
        raise RequestError(f"{path} has more than the {MOST_FILE_BYTES} bytes that a result file may have.")
    if not text.strip():
        raise RequestError(f"{path} is empty.")
    return _COLOURS.sub("", text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " "))


def _objects(path: Path, text: str, *, strict: bool) -> Source:
    """The objects of a JSON document, of JSON lines, or of JSON between other lines, and the whole ones of a cut list.

    With `strict`, as for a text that begins with JSON, a text without a whole object raises RequestError.
    """
    decoder, end, values, fault = json.JSONDecoder(), 0, [], ""
    while begin := _NEXT_OBJECT.match(text, end) or _BEGINS_JSON.search(text, end):
        try:
            value, end = decoder.raw_decode(text, begin.end())
        except RecursionError:
            raise RequestError(f"{path} is nested too deeply to be a result file.") from None
        except ValueError as error:
            fault, end = escaped(error), begin.end() + 1
            if strict and text[begin.end()] == "{":
                break
        else:
            values += value if isinstance(value, list) else [value]
    records = [value for value in values if isinstance(value, dict)]
    if strict and not records:
        raise RequestError(f"{path} is broken JSON: {fault}." if fault else f"{path} is JSON without an object.")
    return Source(records, text, ("a part of its JSON is broken or cut, and was left out.",) if fault else ())


def _tables(path: Path, text: str, delimiter: str) -> list[Source]:
    """Every table whose cells have this sign between them; other lines are skipped, within a table, too.

    A head has a line of dashes below it. Without one, the first line that has as many cells as the next is the head.
    """
    numbered = [(line, row) for line, row in _rows(path, text, delimiter) if len(row) > 1]
    rows = [row for _, row in numbered]
    heads = [at for at, (row, below) in enumerate(pairwise(rows)) if _is_rule(below) and not _is_rule(row)]
    if not heads and rows:
        # A title has fewer cells than the head after it.
        head = next((row for row, below in pairwise(rows) if len(row) >= len(below)), rows[0])
        heads = [at for at, row in enumerate(rows) if row == head]
    lines = text.split("\n")
    return [
        _table(rows[first:last], "\n".join(lines[: numbered[first][0] - 1]), delimiter, is_last=last == len(rows))
        for first, last in pairwise([*heads, len(rows)])
    ]


def _rows(path: Path, text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    """(number of its last line from 1, cells) of each row of a text. Raises RequestError for a quote without an end."""
    if delimiter == "|":
        split = [_UNESCAPED.split(line.rstrip()) for line in text.split("\n")]
        cells = [[cell.strip(" *`").replace("\\|", "|") for cell in row] for row in split]
        return list(enumerate(cells, 1))
    reader = csv.reader(io.StringIO(text), strict=True, delimiter=delimiter)
    try:
        return [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except csv.Error as error:
        if delimiter != _DELIMITERS[-1]:
            return []
        raise RequestError(f"{path} is broken CSV: {escaped(error)}.") from None


def _is_rule(row: Sequence[str]) -> bool:
    return any(row) and all(_RULE.fullmatch(cell) or not cell for cell in row)


def _table(rows: Sequence[Sequence[str]], above: str, delimiter: str, *, is_last: bool) -> Source:
    """The records of a table by the names in its head; a row that is cut is left out and named."""
    names, *rest = rows
    is_framed = delimiter == "|" and not names[0]
    rest = [row for row in rest if not _is_rule(row) and not (is_framed and row[0])]
    records, remarks = [], []
    for number, row in enumerate(rest, 1):
        # Spreadsheets leave out empty cells at the end of a row.
        may_be_short = delimiter != "|" and not (is_last and number == len(rest))
        if len(row) == len(names) or (len(row) < len(names) and may_be_short):
            records.append({name: cell for name, cell in zip_longest(names, row) if name})
        else:
            remarks.append(f"row {number} is cut or broken ({len(row)} cells for {len(names)}), and was left out.")
    fault = ""
    if repeated := next((name for name in names if name and names.count(name) > 1), ""):
        fault = f"it has several columns called {escaped(repeated)}."
    elif delimiter in _UNCLEAR_IN and (unclear := next(filter(_UNCLEAR.search, chain(*rest)), "")):
        fault = f"{escaped(unclear)} may be a fraction or thousands; write numbers with a point and without commas."
    return Source(records, above, tuple(remarks), fault)
