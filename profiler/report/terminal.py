"""Render the sections of a report on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from profiler.report.blocks import (
    Block,
    BreakdownChart,
    CellsTable,
    Definitions,
    Lines,
    Picture,
    Section,
    Sentences,
    ShellCommand,
    TextTable,
    visible_sections,
)

MOST_ROWS = 200
"""Rows of a table on the screen; later rows are omitted."""
_COLORS = {"slower": "red", "faster": "green", "SLOWER": "red", "pass": "green"}
_LINE_STYLES = {"plain": "", "paragraph": "", "dim": "dim", "warning": "yellow"}


def print_sections(sections: Sequence[Section | None], console: Console) -> None:
    """Print sections without their titles."""
    print_blocks([block for section in visible_sections(sections, "terminal") for block in section.blocks], console)


def print_blocks(blocks: Sequence[Block], console: Console) -> None:
    """Print blocks; a blank line separates an answer, a table or a chart from what precedes it."""
    apart = (Sentences, BreakdownChart, CellsTable, TextTable)
    before: Block | None = None
    for block in blocks:
        if isinstance(block, apart) or isinstance(before, (Sentences, BreakdownChart)):
            console.print()
        print_block(block, console)
        before = block


@singledispatch
def print_block(block: Block, console: Console) -> None:
    """Print one block. Raises TypeError for a kind that the terminal does not know."""
    raise TypeError(f"the terminal prints no {type(block).__name__}")


@print_block.register
def _(block: Sentences, console: Console) -> None:
    for number, sentence in enumerate(block.sentences):
        bold = block.plain_from is None or number < block.plain_from
        console.print(Text(sentence, style="bold" if bold else ""))


@print_block.register
def _(block: Lines, console: Console) -> None:
    mark = "! " if block.style == "warning" else ""
    for line in block.lines:
        console.print(Text(mark + line, style=_LINE_STYLES[block.style]))


@print_block.register
def _(block: TextTable, console: Console) -> None:
    console.print(rich_table(block))


@print_block.register
def _(block: Definitions, console: Console) -> None:
    for name, meaning in block.terms:
        console.print(Text(f"{name}: {meaning}"))


@print_block.register
def _(block: ShellCommand, console: Console) -> None:
    console.print(Text(f"{block.label}: {block.command}"))


@print_block.register
def _(block: Picture, console: Console) -> None:
    """A terminal has no pictures."""


def rich_table(table: TextTable) -> Table:
    """Return a table for the terminal, with at most `MOST_ROWS` rows and the number of those omitted."""
    built = Table(
        box=box.SIMPLE_HEAD if table.has_head else None,
        show_header=table.has_head,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        caption=table.caption or None,
        caption_justify="left",
    )
    for column in table.columns:
        side: Literal["left", "right"] = "right" if column.number else "left"
        built.add_column(column.heading, justify=side, no_wrap=not column.wrap, overflow="fold")
    for number, row in enumerate(table.rows[:MOST_ROWS]):
        if number and number in table.groups:
            built.add_section()
        built.add_row(*(Text(text, style=_COLORS.get(text, "")) for text in row))
    if omitted := max(table.total, len(table.rows)) - min(len(table.rows), MOST_ROWS):
        rest = f"{omitted} more rows: --format json has them all"
        built.caption = f"{table.caption}; {rest}" if table.caption else rest
    return built
