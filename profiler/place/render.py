"""Another tool's figures compared with roofs: as rows, as JSON and on the screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from profiler.json_document import Document
from profiler.place.command import PlacedFile
from profiler.place.place import PlacedFigure
from profiler.readers.columns import Table
from profiler.report.blocks import Lines, Sentences, text_table
from profiler.report.terminal import MOST_ROWS, print_blocks
from profiler.units import duration, significant

PLACED_COLUMNS = ("what", "time", "tok/s", "floor", "by", "attained", "regime")
_CAPTION = "floor: the least time that the work needs; by: what sets the floor; attained: floor / time"
_MOST_NOTES = 10


def placed_rows(rows: Sequence[PlacedFigure]) -> list[list[str]]:
    """One row of texts per figure, in the order of PLACED_COLUMNS."""
    return [
        [
            _name(row),
            duration(row.latency_s),
            significant(row.tokens_per_s),
            duration(row.floor_s),
            row.bound,
            f"{significant(100 * row.attained, 2)} %",
            row.regime or "above the roof",
        ]
        for row in rows
    ]


def _name(row: PlacedFigure) -> str:
    settings = f", {row.settings}" if row.settings else ""
    if row.phase == "decode":
        return f"decode {row.batch_size} x {row.prompt_len + row.context_len}{settings}"
    context = f" after {row.context_len}" if row.context_len else ""
    generated = f" + {row.new_tokens}" if row.phase == "generate" else ""
    return f"{row.phase} {row.batch_size} x {row.prompt_len}{generated}{context}{settings}"


def print_placed(title: str, rows: Table[PlacedFigure], doubts: Sequence[str], console: Console) -> None:
    """Print a title, the warnings, a table of the figures and their notes, each note once."""
    shown = placed_rows(rows.first(MOST_ROWS))
    table = text_table(PLACED_COLUMNS, shown, texts=("by", "regime"), caption=_CAPTION, total=len(rows))
    blocks = [Sentences([title]), Lines([f"warning: {doubt}" for doubt in doubts]), table, Lines(list(_notes(rows)))]
    print_blocks(blocks, console)


def _notes(rows: Table[PlacedFigure]) -> Iterator[str]:
    notes = Counter(filter(None, rows.column("note")))
    for note, count in notes.most_common(_MOST_NOTES):
        first = rows[rows.column("note").index(note)]
        figures = _name(first) if count == 1 else f"{count} figures, first {_name(first)}"
        yield f"{figures}: {note}"


@dataclass(frozen=True)
class PlaceRoofs:
    """The roofs that the figures are compared with."""

    name: str
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """Peak FLOP/s by dtype."""


@dataclass(frozen=True)
class PlaceDocument(Document):
    """`roofscope place --format json`."""

    tool: str
    file: str
    model: str
    dtype: str
    quant: str
    roofs: PlaceRoofs
    warnings: Sequence[str]
    rows: Sequence[PlacedFigure] | Table[PlacedFigure]


def place_document(file: PlacedFile) -> PlaceDocument:
    """The JSON document of a file's figures."""
    return PlaceDocument(
        tool=file.file.tool,
        file=file.file.name,
        model=file.model,
        dtype=file.dtype,
        quant=file.quant,
        roofs=PlaceRoofs(file.under.name, file.under.bytes_per_s, file.under.flops_per_s),
        warnings=file.doubts,
        rows=file.rows,
    )
