"""Another tool's figures compared with roofs, on the screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from profiler.place.place import ROOF_ALLOWS, PlacedFigure, PlacedFile
from profiler.report.blocks import Lines, Section, Sentences, text_table
from profiler.units import duration, significant

_CAPTION = "floor: the least time that the work needs; by: what sets the floor; attained: floor / time"


def placed_section(file: PlacedFile) -> Section:
    """A title, the warnings, a table of the figures and their notes, each note once.

    A share of a roof that is not the model's is not shown.
    """
    title = f"{file.tool}: {file.model} {file.stored} under the roofs of {file.roofs.name}"
    names = _names(file.rows)
    columns = {
        "what": names,
        "time": [duration(row.latency_s) for row in file.rows],
        "spread": ["-" if row.spread is None else f"{100 * row.spread:.1f} %" for row in file.rows],
        "tok/s": [significant(row.tokens_per_s) for row in file.rows],
        "floor": [duration(row.floor_s) for row in file.rows],
        "link": ["-" if row.link_s is None else duration(row.link_s) for row in file.rows],
        "by": [row.bound for row in file.rows],
        "attained": [f"{significant(100 * row.attained, 2)} %" if row.fits else "-" for row in file.rows],
        "regime": [row.regime or ("above the roof" if row.fits else "does not fit") for row in file.rows],
    }
    caption = _CAPTION
    if all(row.spread is None for row in file.rows):
        del columns["spread"]
    else:
        caption += "; spread: standard deviation of the repetitions"
    if not file.link:
        del columns["link"]
    else:
        caption += f"; link: about the least time of the messages over {file.link}, not in the floor"
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    table = text_table(list(columns), rows, texts=("by", "regime"), wrapped=("what",), caption=caption)
    warnings = Lines([f"warning: {text}" for text in file.warnings])
    return Section("", [Sentences([title]), warnings, table, Lines(list(_notes(file.rows, names)))])


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
    for note, figures in ordered:
        every = f"all {len(rows)} figures" if len(figures) == len(rows) else f"{len(figures)} figures like {figures[0]}"
        yield f"{figures[0] if len(figures) == 1 else every}: {note}"
