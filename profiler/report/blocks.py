"""What a report consists of: sections of typed blocks. Terminal and HTML each render them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from profiler.judge.cells import CellResult
    from profiler.store.folder import Run

Medium = Literal["first look", "terminal", "html"]
"""The first look is the screen of a long answer; the terminal has all of it with `--full`."""
MEDIA: frozenset[Medium] = frozenset({"first look", "terminal", "html"})
FULL: frozenset[Medium] = frozenset({"terminal", "html"})
TERMINAL: frozenset[Medium] = frozenset({"first look", "terminal"})
FIRST_LOOK: frozenset[Medium] = frozenset({"first look"})
FULL_SCREEN: frozenset[Medium] = frozenset({"terminal"})
HTML: frozenset[Medium] = frozenset({"html"})
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Block:
    """A part of a section. Each renderer registers a function per kind. A block without content is not shown."""

    media: frozenset[Medium] = field(default=MEDIA, kw_only=True)
    """Who renders it."""

    @property
    def has_content(self) -> bool:
        """Whether none of its sentences, lines, rows and so on are empty."""
        return all(getattr(self, name, True) for name in ("sentences", "lines", "rows", "tiles"))

    def shortened(self, most: int) -> Block:
        """Return the block with at most `most` rows, sentences or lines."""
        return self


@dataclass(frozen=True)
class Sentences(Block):
    """The answer, printed in bold and framed on a page."""

    sentences: Sequence[str]
    plain_from: int | None = None
    """From this sentence on the terminal prints plain text; None: never."""

    def shortened(self, most: int) -> Sentences:
        return replace(self, sentences=self.sentences[: (most + 1) // 2])  # a sentence takes two lines or more


@dataclass(frozen=True)
class Lines(Block):
    """One line each. A page makes a list of them; a `paragraph` is running text."""

    lines: Sequence[str]
    style: Literal["plain", "dim", "warning", "paragraph"] = "plain"

    def shortened(self, most: int) -> Lines:
        return replace(self, lines=self.lines[:most])


@dataclass(frozen=True)
class TextColumn:
    """The heading of a column and how its texts are set."""

    heading: str
    number: bool = False
    """Aligned at the right."""
    wrap: bool = False
    """Whether its texts may break into several lines."""


@dataclass(frozen=True)
class TextTable(Block):
    """A table of texts. One without a heading has no head."""

    columns: tuple[TextColumn, ...]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    groups: frozenset[int] = frozenset()
    """Rows that begin a group, which a line separates from the one before."""
    ranked: bool = False
    """Whether the first rows matter most: a short screen has those, and of other tables evenly picked ones."""

    @property
    def has_head(self) -> bool:
        return any(column.heading for column in self.columns)

    def shortened(self, most: int) -> TextTable:
        if len(self.rows) <= most:
            return self
        numbers = list(range(most)) if self.ranked else evenly(range(len(self.rows)), most)
        groups = {at for at in range(1, most) if self.groups & {*range(numbers[at - 1] + 1, numbers[at] + 1)}}
        caption = "; ".join(filter(None, (self.caption.removesuffix("."), f"{most} of {len(self.rows)} rows")))
        return replace(self, rows=[self.rows[at] for at in numbers], caption=caption, groups=frozenset(groups))


def text_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    texts: Collection[str] = (),
    wrapped: Collection[str] = (),
    caption: str = "",
    groups: Collection[int] = (),
    ranked: bool = False,
    media: frozenset[Medium] = MEDIA,
) -> TextTable:
    """Return a table whose columns are numbers, except for the first, `texts`, and `wrapped` (texts that may break)."""
    columns = tuple(
        TextColumn(heading, number=number > 0 and heading not in (*texts, *wrapped), wrap=heading in wrapped)
        for number, heading in enumerate(headings)
    )
    return TextTable(columns, rows, caption, frozenset(groups), ranked, media=media)


@dataclass(frozen=True)
class Picture(Block):
    """A picture of `plots.PLOTS`, which a page has."""

    name: str
    alt: str
    runs: tuple[Run, ...]
    tooltips: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Tooltips and CSS classes by the id of an element."""
    media: frozenset[Medium] = field(default=HTML, kw_only=True)


@dataclass(frozen=True)
class CellsTable(Block):
    """Every cell of a run with its time, rates and regime."""

    run: Run
    most: int | None = None
    """Measured rows of a first look, evenly picked from each phase; None: all, with those that were only forecast."""

    def shortened(self, most: int) -> CellsTable:
        return replace(self, most=most)


@dataclass(frozen=True)
class BreakdownChart(Block):
    """Bars with the time breakdown of a run's cells."""

    run: Run
    short: bool = False
    """Whether it is on a first look, which has the ends of each phase and their largest terms."""
    only: CellResult | None = None
    """The one cell that it shows; None: those of the first engine."""

    def shortened(self, most: int) -> BreakdownChart:
        return replace(self, short=True)


@dataclass(frozen=True)
class Tiles(Block):
    """The figures at the top of a page: each in large type, what it is, and the cell that has it."""

    tiles: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class ShellCommand(Block):
    """A command to type, after a label."""

    label: str
    command: str


@dataclass(frozen=True)
class Section:
    """A part of a report. The terminal prints its blocks without the title."""

    title: str
    blocks: Sequence[Block]
    note: str = ""
    """Where its figures come from, next to the title."""
    media: frozenset[Medium] = MEDIA
    link: str = ""
    """The address that the title of an HTML section leads to."""
    folded: bool = False
    """Whether a page shows its title only, until a reader opens it."""


def visible_sections(sections: Sequence[Section | None], medium: Medium) -> list[Section]:
    """Return the sections that a medium renders and their blocks, without those that have nothing to say."""
    shown = []
    for section in sections:
        if section is not None and medium in section.media:
            blocks = [block for block in section.blocks if block.has_content and medium in block.media]
            shown += [replace(section, blocks=blocks)] if blocks else []
    return shown


def evenly(items: Sequence[_Item], most: int) -> list[_Item]:
    """Return at most `most` items, evenly picked from the first to the last."""
    number = min(most, len(items))
    return [items[round(index * (len(items) - 1) / max(1, number - 1))] for index in range(number)]
