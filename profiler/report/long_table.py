"""A table on the screen, of which the first of very many rows are shown."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

MOST_ROWS = 200
"""A table on the screen shows so many rows, the first."""
_WRAPPED = ("moved, or why not", "ran with")
COLORS = {"slower": "red", "faster": "green", "SLOWER": "red", "pass": "green"}


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], of: int | None = None) -> Table:
    """A table of some columns, of the first rows where there are many: `rows` may be the first of so many."""
    found = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        words = name in (*_WRAPPED, "cell", "verdict", "gate", "what", "by", "regime", "where")
        found.add_column(name, justify="left" if words else "right", no_wrap=name not in _WRAPPED)
    shown = rows[:MOST_ROWS]
    for row in shown:
        found.add_row(*(Text(text, style=COLORS.get(text, "")) for text in row))
    if left := (of or len(rows)) - len(shown):
        found.caption = f"{left} more rows: --format json has them all"
    return found
