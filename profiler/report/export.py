"""The tokens-per-second table in other formats: one function per format."""

from __future__ import annotations

import io
from collections.abc import Callable

import pandas as pd

from profiler.store.folder import Run
from profiler.units import escape_formula


def _csv(frame: pd.DataFrame) -> bytes:
    """Return the frame as CSV, with texts escaped so that no spreadsheet reads one as a formula."""
    texts = {name: frame[name].map(_no_formula) for name in frame.columns if frame[name].dtype.kind not in "biuf"}
    return frame.assign(**texts).to_csv(index=False).encode()


def _no_formula(value: object) -> object:
    return escape_formula(value) if isinstance(value, str) else value


def _markdown(frame: pd.DataFrame) -> bytes:
    return markdown_table(frame).encode()


def _json(frame: pd.DataFrame) -> bytes:
    return (frame.to_json(orient="records", indent=2, double_precision=15) + "\n").encode()


def _parquet(frame: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    return buffer.getvalue()


def _latex(frame: pd.DataFrame) -> bytes:
    """A booktabs table; underscores in names are escaped."""
    return frame.to_latex(index=False, escape=True, float_format="%.4g", na_rep="").encode()


EXPORTERS: dict[str, Callable[[pd.DataFrame], bytes]] = {
    "csv": _csv,
    "md": _markdown,
    "json": _json,
    "parquet": _parquet,
    "latex": _latex,
}


TOKENS_TABLE_COLUMNS = (
    "phase",
    "batch_size",
    "prompt_len",
    "context_len",
    "status",
    "latency_s",
    "latency_low_s",
    "latency_high_s",
    "tokens_per_s",
    "tokens_per_s_per_seq",
    "flops_per_s",
    "bytes_per_s",
    "mfu",
    "mbu",
    "attained",
    "regime",
    "confidence",
    "engine",
    "ttft_s",
    "p90_s",
    "p99_s",
    "visits",
)


def tokens_table(run: Run) -> pd.DataFrame:
    """The columns of the tokens-per-second table, one row per phase and cell, as numbers with their units in names."""
    return run.cells[list(TOKENS_TABLE_COLUMNS)]


def markdown_table(frame: pd.DataFrame) -> str:
    """A GitHub-flavoured Markdown table of any frame; numbers with four significant digits."""
    lines = ["| " + " | ".join(map(str, frame.columns)) + " |", "|" + "---|" * len(frame.columns)]
    for row in frame.itertuples(index=False):
        lines.append("| " + " | ".join(_markdown_cell(value) for value in row) + " |")
    return "\n".join(lines) + "\n"


def _markdown_cell(value: object) -> str:
    if isinstance(value, float):
        return "" if pd.isna(value) else f"{value:.4g}"
    return markdown_text(str(value))


def markdown_text(text: str) -> str:
    """Escape a text for Markdown: it starts no element, link, picture or code, and ends no table cell."""
    return text.replace("\\", "\\\\").translate(_MARKDOWN)


_MARKDOWN = str.maketrans({"<": "&lt;", **{sign: f"\\{sign}" for sign in "|[]`"}})
