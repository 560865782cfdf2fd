"""The console of all commands, and the sections of a report on it."""

import codecs
import os
import sys
import textwrap
from collections.abc import Sequence
from functools import singledispatch
from typing import Any, Literal, TextIO

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from profiler.report.blocks import (
    Block,
    BreakdownChart,
    CellsTable,
    Lines,
    Medium,
    Section,
    Sentences,
    ShellCommand,
    TextTable,
    visible_sections,
)
from profiler.units import unbroken

WIDTH = 100
_LEAST = 40
_ASCII = str.maketrans({"─": "-", "━": "-", "±": "~", "…": ".", "│": "|", "µ": "u"})
MOST_LINES = 60
"""Lines of a first look: a terminal on half of a laptop's screen has them."""
_MOST_ITEMS = (40, 36, 32, 28, 24, 20, 18, 16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2)
"""Rows or lines that each block of a first look has at most, and twice its sentences: the first with which it fits."""
_GLUE = "\ue000"  # for Rich, as for Python, a no-break space is white space at which a line may break
_COLORS = {"slower": "red", "faster": "green", "SLOWER": "red", "pass": "green"}
_LINE_STYLES = {"plain": "", "paragraph": "", "dim": "dim", "warning": "yellow"}


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end].translate(_ASCII)
    return "".join(sign if sign.isascii() else "?" for sign in signs), error.end


codecs.register_error("spelled", _spelled)


class _Ascii:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text.translate(_ASCII))

    def flush(self) -> None:
        self._stream.flush()


def screen(*, plain: bool = False, stream: TextIO | None = None) -> Console:
    """Return a console on `stream` (default: standard output), 100 columns wide or as narrow as the terminal.

    `COLUMNS` is a width of the user's own. `plain` prints neither colour nor box drawing. Markup is off, since a
    model's name may contain brackets. Rich omits colours for NO_COLOR and for pipes.
    """
    if reconfigure := getattr(stream or sys.stdout, "reconfigure", None):
        reconfigure(errors="spelled")
    default = Console(file=stream)
    width = min(WIDTH, default.width) if default.is_terminal else WIDTH
    if (columns := os.environ.get("COLUMNS") or "").isdecimal():
        width = max(_LEAST, int(columns))
    file: Any = _Ascii(stream or sys.stdout) if plain else stream
    colors: Literal["auto"] | None = None if plain else "auto"
    return Console(file=file, width=width, color_system=colors, highlight=not plain, markup=False, emoji=False)


class UnbrokenText:
    """A text whose lines never end between a number and its unit."""

    def __init__(self, text: str, style: str = "") -> None:
        self._glued = Text(unbroken(text, _GLUE), style)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._glued, options):
            yield segment._replace(text=segment.text.replace(_GLUE, " "))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._glued)


def print_sections(
    sections: Sequence[Section | None], console: Console, most_lines: int | None = None, whole_by: str = ""
) -> None:
    """Print sections without their titles; more than `most_lines` become a first look and the number of those left.

    `whole_by` is the command that prints them all; empty if none does without measuring again.
    """
    whole = _printed(_blocks(sections, "terminal"), console)
    if most_lines is None or whole.count("\n") <= most_lines:
        console.file.write(whole)
        return
    blocks = _blocks(sections, "first look")
    left = most_lines - len(textwrap.wrap(_omitted(whole.count("\n"), whole_by), console.width))
    for most in _MOST_ITEMS:
        short = _printed([block.shortened(most) for block in blocks], console)
        if short.count("\n") <= left:
            break
    short = "".join(short.splitlines(keepends=True)[:left])
    console.file.write(short)
    _print_line(_omitted(whole.count("\n") - short.count("\n"), whole_by), "dim", console)


def _omitted(lines: int, whole_by: str) -> str:
    return f"{lines} more lines" + (f": {whole_by}" if whole_by else "")


def _blocks(sections: Sequence[Section | None], medium: Medium) -> list[Block]:
    return [block for section in visible_sections(sections, medium) for block in section.blocks]


def _printed(blocks: Sequence[Block], console: Console) -> str:
    """Return blocks as printed; a blank line separates an answer, a table or a chart from what precedes it."""
    apart = (Sentences, BreakdownChart, CellsTable, TextTable)
    before: Block | None = None
    with console.capture() as captured:
        for block in blocks:
            if (before and isinstance(block, apart)) or isinstance(before, (Sentences, BreakdownChart)):
                console.print()
            print_block(block, console)
            before = block
    return captured.get()


def _print_line(line: str, style: str, console: Console) -> None:
    """Print a line that breaks between words only: an address that is longer than the screen stays whole."""
    glued = unbroken(line, _GLUE)
    for part in textwrap.wrap(glued, console.width, break_long_words=False, break_on_hyphens=False) or [""]:
        console.print(Text(part.replace(_GLUE, " "), style), overflow="ignore", crop=False)


@singledispatch
def print_block(block: Block, console: Console) -> None:
    """Print one block. Raises TypeError for a kind that the terminal does not know."""
    raise TypeError(f"the terminal prints no {type(block).__name__}")


@print_block.register
def _(block: Sentences, console: Console) -> None:
    for number, sentence in enumerate(block.sentences):
        bold = block.plain_from is None or number < block.plain_from
        _print_line(sentence, "bold" if bold else "", console)


@print_block.register
def _(block: Lines, console: Console) -> None:
    mark = "! " if block.style == "warning" else ""
    for line in block.lines:
        _print_line(mark + line, _LINE_STYLES[block.style], console)


@print_block.register
def _(block: TextTable, console: Console) -> None:
    console.print(rich_table(block, console.width))


@print_block.register
def _(block: ShellCommand, console: Console) -> None:
    _print_line(f"{block.label}: {block.command}", "", console)


def _headings(table: TextTable, width: int, gap: int) -> tuple[list[str], int | None]:
    """Return the headings, in several lines if the table were too wide, and the width of a first column that breaks."""
    headings = [column.heading for column in table.columns]
    gaps = (gap if table.has_head else gap - 1) * (len(headings) - 1)
    longest = [_longest_word if column.wrap else len for column in table.columns]
    cells = [max((size(row[number]) for row in table.rows), default=0) for number, size in enumerate(longest)]
    natural = [max(len(heading), size) for heading, size in zip(headings, cells, strict=True)]
    if sum(natural) + gaps <= width:
        return headings, None
    least = [max(1, _longest_word(heading), size) for heading, size in zip(headings, cells, strict=True)]
    wrapped = (textwrap.wrap(heading, size) for heading, size in zip(headings, least, strict=True))
    excess = sum(least) + gaps - width
    word = max(_longest_word(text) for text in (headings[0], *(row[0] for row in table.rows)))
    return ["\n".join(parts) for parts in wrapped], max(word, least[0] - excess) if excess > 0 else None


def _longest_word(text: str) -> int:
    return max(map(len, unbroken(text, _GLUE).split()), default=0)


def rich_table(table: TextTable, width: int = WIDTH, gap: int = 2) -> Table:
    """Return a table for a terminal of `width` columns, with `gap` spaces between its columns.

    If it is too wide, its headings have several lines, and then its first column breaks.
    """
    built = Table(
        box=box.SIMPLE_HEAD if table.has_head else None,
        show_header=table.has_head,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap - 1, 0, 0),
        caption_justify="left",
    )
    headings, left = _headings(table, width, gap)
    if left and gap > 1 and left == max(map(_longest_word, (headings[0], *(row[0] for row in table.rows)))):
        return rich_table(table, width, gap - 1)  # rather than a torn word
    for number, (column, heading) in enumerate(zip(table.columns, headings, strict=True)):
        side: Literal["left", "right"] = "right" if column.number else "left"
        most = None if number else left
        built.add_column(heading, justify=side, no_wrap=not (column.wrap or most), overflow="fold", max_width=most)
    for number, row in enumerate(table.rows):
        if number and number in table.groups:
            built.add_section()
        built.add_row(*(UnbrokenText(text, _COLORS.get(text, "")) for text in row))
    if table.caption:
        built.caption = UnbrokenText(table.caption, "table.caption")  # type: ignore[assignment]  # Rich renders any
    return built
