"""The tokens-per-second table in other formats: one function per format."""

from __future__ import annotations

import io
from collections.abc import Callable

import pandas as pd

from profiler.report.columns import EXPORTED_COLUMNS
from profiler.store.folder import Run
from profiler.units import escape_formula


def _csv(frame: pd.DataFrame) -> bytes:
    """Return the frame as CSV; texts are escaped, because a spreadsheet would read some as formulas."""
    texts = {
        name: frame[name].map(lambda value: escape_formula(value) if isinstance(value, str) else value)
        for name in frame.columns
        if frame[name].dtype.kind not in "biuf"
    }
    return frame.assign(**texts).to_csv(index=False).encode()


def _json(frame: pd.DataFrame) -> bytes:
    return (frame.to_json(orient="records", indent=2, double_precision=15) + "\n").encode()


def _parquet(frame: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    return buffer.getvalue()


def _latex(frame: pd.DataFrame) -> bytes:
    """Return a booktabs table; underscores in names are escaped."""
    return frame.to_latex(index=False, escape=True, float_format="%.4g", na_rep="").encode()


EXPORTERS: dict[str, Callable[[pd.DataFrame], bytes]] = {
    "csv": _csv,
    "md": lambda frame: markdown_table(frame).encode(),
    "json": _json,
    "parquet": _parquet,
    "latex": _latex,
}


def tokens_table(run: Run) -> pd.DataFrame:
    """Return `EXPORTED_COLUMNS` of every cell and phase: numbers, with units in the names of the columns."""
    return run.cells[list(EXPORTED_COLUMNS)]


def markdown_table(frame: pd.DataFrame) -> str:
    """Return any frame as a GitHub-flavoured Markdown table; numbers have four significant digits."""
    lines = ["| " + " | ".join(map(str, frame.columns)) + " |", "|" + "---|" * len(frame.columns)]
    for row in frame.itertuples(index=False):
        lines.append("| " + " | ".join(_markdown_cell(value) for value in row) + " |")
    return "\n".join(lines) + "\n"


def _markdown_cell(value: object) -> str:
    if isinstance(value, float):
        return "" if pd.isna(value) else f"{value:.4g}"
    return markdown_text(str(value))


def markdown_text(text: str) -> str:
    """Return a text escaped for Markdown: it starts no element, link, picture or code, and ends no table cell."""
    return text.replace("\\", "\\\\").translate(_MARKDOWN)


_MARKDOWN = str.maketrans({"<": "&lt;", **{sign: f"\\{sign}" for sign in "|[]`"}})
