"""The tokens-per-second table in other formats: one function a format."""

from __future__ import annotations

import io
from collections.abc import Callable

import pandas as pd

from profiler.report.tables import markdown_table


def _csv(frame: pd.DataFrame) -> bytes:
    return frame.to_csv(index=False).encode()


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
