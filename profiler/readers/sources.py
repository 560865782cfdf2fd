"""Find the tables, JSON objects and printed reports in the text of another tool's file, with any text around them."""

import codecs
import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

from profiler.errors import RequestError
from profiler.readers.printed import console_requests, printed_records
from profiler.readers.values import Record, escaped

MOST_FILE_BYTES = 512 * 2**20
# A bracket of JSON, not of a log's line such as `[I] Loading`.
_BEGINS_JSON = re.compile(r"^\s*(?=\{|\[\s*[{\[])", re.MULTILINE)
_NEXT_OBJECT = re.compile(r"\s*(?=\{)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# The line of dashes below a table's head.
_RULE = re.compile(r":?-+:?")


@dataclass(frozen=True)
class Source:
    """One table, the objects of JSON, or the printed reports of a file."""

    records: Sequence[Record]
    text: str = ""
    """What is above a table; its lines may name the device or the options."""
    remarks: tuple[str, ...] = ()
    """Sentences about rows that were left out."""

    @property
    def only(self) -> Record:
        """The one report of a tool that writes a file for each. Raises RequestError if there are several."""
        if len(self.records) > 1:
            raise RequestError(f"it has {len(self.records)} reports; give each a file.")
        return self.records[0]


def sources_of(path: Path, text: str) -> Iterator[Iterable[Source]]:
    """What a reader may know in a text: tables and printed reports, lines of consoles, JSON, then other tables.

    Later ones are looked for only if no reader knew those before. Raises RequestError for broken JSON.
    """
    if not _BEGINS_JSON.match(text):
        yield [*_tables(text, "|"), Source(printed_records(text))]
        yield [Source(requests) for requests in console_requests(text)]
    yield [_objects(path, text)]
    for delimiter in "\t;,":
        yield _tables(text, delimiter)


def text_of(path: Path) -> str:
    """The text of a result file, with plain line ends. Raises RequestError for a file that cannot be read."""
    if path.is_dir():
        raise RequestError(f"{path} is a folder; give a result file (a run's own: `roofscope judge` or `compare`).")
    try:
        with path.open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
        # Redirected output of Windows' PowerShell is UTF-16.
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    if len(content) > MOST_FILE_BYTES:
        raise RequestError(f"{path} has more than the {MOST_FILE_BYTES} bytes that a result file may have.")
    if "\0" in text:
        raise RequestError(f"{path} is not a text file.")
    if not text.strip():
        raise RequestError(f"{path} is empty.")
    return _COLOURS.sub("", text.replace("\r\n", "\n").replace("\u00a0", " "))


def _objects(path: Path, text: str) -> Source:
    """The objects of JSON documents, of JSON lines, or of JSON between other lines."""
    end, records = 0, []
    while begin := _NEXT_OBJECT.match(text, end) or _BEGINS_JSON.search(text, end):
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin.end())
        except (RecursionError, ValueError) as error:
            raise RequestError(f"{path} is broken JSON: {escaped(error)}.") from None
        records += [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]
    return Source(records)


def _tables(text: str, delimiter: str) -> Iterator[Source]:
    """Every table whose cells have this sign between them; other lines are skipped, within a table, too.

    A head has a line of dashes below it. Without one, the first line that has as many cells as the next is the head.
    """
    lines = text.split("\n")
    if delimiter == "|":
        numbered = [(at, [cell.strip(" *`>") for cell in line.split("|")]) for at, line in enumerate(lines)]
    else:
        reader = csv.reader(lines, delimiter=delimiter)
        try:
            numbered = [(reader.line_num - 1, [cell.strip() for cell in row]) for row in reader]
        except csv.Error:
            return
    # A line with one bar is text, unless it begins with it.
    numbered = [(at, row) for at, row in numbered if len(row) > 1 + (delimiter == "|" and bool(row[0]))]
    rows = [row for _, row in numbered]
    heads = [at for at, below in enumerate(rows[1:]) if _is_rule(below)]
    if not heads and rows:
        # A title has fewer cells than the head after it.
        head = next((row for row, below in pairwise(rows) if len(row) >= len(below)), rows[0])
        heads = [at for at, row in enumerate(rows) if row == head]
    for first, last in pairwise([*heads, len(rows)]):
        names, records, remarks = rows[first], [], []
        if twice := [name for name in names if name and names.count(name) > 1]:
            if delimiter == "|":  # such as llama.cpp's list of SYCL devices, above its results
                continue
            raise RequestError(f"it has several columns called {twice[0]}.")
        for number, row in enumerate((row for row in rows[first + 1 : last] if not _is_rule(row)), 1):
            # Spreadsheets leave out empty cells at the end of a row; the last line of a file may be cut.
            is_short = len(row) < len(names) and delimiter != "|" and row is not rows[-1]
            if len(row) == len(names) or is_short:
                records.append({name: cell for name, cell in zip_longest(names, row, fillvalue="") if name})
            else:
                remarks.append(f"row {number} is cut or broken ({len(row)} cells for {len(names)}), and was left out.")
        yield Source(records, "\n".join(lines[: numbered[first][0]]), tuple(remarks))


def _is_rule(row: Sequence[str]) -> bool:
    return any(row) and all(_RULE.fullmatch(cell) or not cell for cell in row)
