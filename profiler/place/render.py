"""Another tool's figures compared with roofs: as rows, as JSON and on the screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from profiler.json_document import Document
from profiler.place.command import PlacedFile
from profiler.place.place import ROOF_ALLOWS, PlacedFigure
from profiler.report.blocks import Lines, Sentences, text_table
from profiler.report.terminal import MOST_ROWS, print_blocks
from profiler.units import duration, significant

PLACED_COLUMNS = ("what", "time", "tok/s", "floor", "by", "attained", "regime")
_CAPTION = "floor: the least time that the work needs; by: what sets the floor; attained: floor / time"
_LINK_CAPTION = "; link: about the least time of the messages over {link}, not in the floor"
_MOST_NOTES = 10


def print_placed(file: PlacedFile, console: Console) -> None:
    """Print a title, the warnings, a table of the figures and their notes, each note once."""
    title = f"{file.file.tool}: {file.model} {file.stored} under the roofs of {file.under.name}"
    names = _names(file.rows)
    rows = [_cells(row, name) for row, name in zip(file.rows[:MOST_ROWS], names, strict=False)]
    headings, caption = list(PLACED_COLUMNS), _CAPTION
    if file.link:
        headings.insert(4, "link")
        caption += _LINK_CAPTION.format(link=file.link)
        for cells, row in zip(rows, file.rows, strict=False):
            cells.insert(4, "-" if row.link_s is None else duration(row.link_s))
    table = text_table(headings, rows, texts=("by", "regime"), wrapped=("what",), caption=caption, total=len(file.rows))
    warnings = [Lines([f"warning: {doubt}" for doubt in file.doubts])] if file.doubts else []
    print_blocks([Sentences([title]), *warnings, table, Lines(list(_notes(file.rows, names)))], console)


def _cells(row: PlacedFigure, name: str) -> list[str]:
    """The texts of a figure in the order of PLACED_COLUMNS. A share of a roof that is not the model's is not shown."""
    return [
        name,
        duration(row.latency_s),
        significant(row.tokens_per_s),
        duration(row.floor_s),
        row.bound,
        f"{significant(100 * row.attained, 2)} %" if row.fits else "-",
        row.regime or ("above the roof" if row.fits else "does not fit"),
    ]


def _names(rows: Sequence[PlacedFigure]) -> list[str]:
    """A name for each row; decode steps of one context also have their number of tokens."""
    counts = Counter(map(_name, rows))
    return [
        _name(
            row, f" + {row.new_tokens}" if row.phase == "decode" and row.new_tokens and counts[_name(row)] > 1 else ""
        )
        for row in rows
    ]


def _name(row: PlacedFigure, generated: str = "") -> str:
    settings = f", {row.settings}" if row.settings else ""
    if row.phase == "decode":
        return f"decode {row.batch_size} x {row.prompt_len + row.context_len}{generated}{settings}"
    context = f" after {row.context_len}" if row.context_len else ""
    generated = f" + {row.new_tokens}" if row.phase == "generate" else ""
    return f"{row.phase} {row.batch_size} x {row.prompt_len}{generated}{context}{settings}"


def _notes(rows: Sequence[PlacedFigure], names: Sequence[str]) -> Iterator[str]:
    """Each remark once, with the figures that it is about: those above the roof first, then the most frequent."""
    by_note: dict[str, list[str]] = {}
    for row, name in zip(rows, names, strict=True):
        for note in filter(None, row.note.split("; ")):
            by_note.setdefault(note, []).append(name)
    ordered = sorted(by_note.items(), key=lambda item: (ROOF_ALLOWS not in item[0], -len(item[1])))
    for note, figures in ordered[:_MOST_NOTES]:
        every = f"all {len(rows)} figures" if len(figures) == len(rows) else f"{len(figures)} figures like {figures[0]}"
        yield f"{figures[0] if len(figures) == 1 else every}: {note}"


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
    gpus: int
    """GPUs that work on one step together."""
    rows: Sequence[PlacedFigure]


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
        gpus=file.gpus,
        rows=file.rows,
    )
