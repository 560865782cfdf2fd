"""How often ranges contain published figures of sources that they have not seen: one row per combination."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from profiler.data.published_results import EngineKind
from profiler.data.table import rows_of
from profiler.units import percent

COVERAGE_FILE = Path(__file__).with_name("published_coverage.csv")

ENGINE_WORDS: dict[EngineKind, str] = {
    "eager": "plain transformers",
    "compiled": "compiled engines",
    "llama.cpp": "llama.cpp",
}


@dataclass(frozen=True)
class Coverage:
    """The published figures of an engine kind, a format and a phase; each is compared with one range."""

    kind: EngineKind
    format: str
    phase: Literal["prefill", "decode"]
    figures: int
    publishers: int
    checked: int
    """The figures that can be compared with other sources: 0 if a single one has figures of this combination."""
    inside: int
    """The checked figures inside the range that the other sources give."""
    width: float
    """The upper end of these ranges / the lower end, at the median; 0 if none was checked."""

    @property
    def sentence(self) -> str:
        """What the ranges of this combination rest on, and how often they are right."""
        sources = "1 source" if self.publishers == 1 else f"{self.publishers} sources"
        words = _words(self.kind, self.format)
        head = f"Basis of {self.phase}: {self.figures} published figures of {words}, {sources};"
        if not self.checked:
            return f"{head} no other source has any, so it is not known how often the range is right."
        return (
            f"{head} {self.inside} of them ({percent(self.inside / self.checked)}) are inside the range that the other"
            " sources give."
        )


def _words(kind: EngineKind, format_: str) -> str:
    return f"{ENGINE_WORDS[kind]} in {'16 bits' if format_ == 'dense' else format_}"


@cache
def coverages() -> tuple[Coverage, ...]:
    """Return all rows of published_coverage.csv; `python -m tests.left_out` computes them from published.csv."""
    return rows_of(COVERAGE_FILE.name, Coverage)


def coverage_sentences(kind: EngineKind, format_: str) -> tuple[str, ...]:
    """A sentence per phase: what is published of an engine kind and a format, and how often ranges contain it."""
    by_phase = {row.phase: row.sentence for row in coverages() if row.kind == kind and row.format == format_}
    return tuple(
        by_phase.get(
            phase,
            f"Basis of {phase}: no published figure of {_words(kind, format_)}; its other formats give the range.",
        )
        for phase in ("decode", "prefill")
    )
