"""Bars of the time breakdown: each cell's terms, in order and to scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from profiler.judge.breakdown import TERMS
from profiler.judge.cells import CellResult
from profiler.report.selection import spanning
from profiler.units import percent

WORTH_SHOWING = 0.01
"""Share of a cell's time below which a term is not mentioned."""


@dataclass(frozen=True)
class Segment:
    """One term of a bar, in shares of the cell's time."""

    term: str
    share: float
    """Negative where a roof or a count is too low."""
    start: float
    """The left end of the segment; negative terms extend to the left of zero."""

    @property
    def name(self) -> str:
        return TERMS[self.term].name

    @property
    def end(self) -> float:
        return self.start + abs(self.share)


@dataclass(frozen=True)
class BreakdownBar:
    """The time of one cell, divided into its terms."""

    result: CellResult
    segments: tuple[Segment, ...]

    @property
    def name(self) -> str:
        return self.result.key.name

    @property
    def below_zero(self) -> str:
        """Return the most negative term with its share, as text; empty without a negative term."""
        least = min(self.segments, key=lambda segment: segment.share)
        return f"{least.name} {percent(least.share)}" if least.share <= -WORTH_SHOWING else ""


def breakdown_bars(results: Sequence[CellResult], most_a_phase: int) -> list[BreakdownBar]:
    """Return a bar per measured cell, at most `most_a_phase` per phase, evenly picked from the first to the last.

    Cells whose terms add up to more than twice their time get none: the machine changed between the measurements.
    """
    drawable = [result for result in results if not result.unexplained_s < -result.latency_s]
    return [BreakdownBar(result, tuple(_segments(result))) for result in spanning(drawable, most_a_phase)]


def terms_of(bars: Sequence[BreakdownBar]) -> list[str]:
    """Return the terms that occur in any of these bars, in the order of TERMS."""
    shown = {segment.term for bar in bars for segment in bar.segments if abs(segment.share) > 0}
    return [term for term in TERMS if term in shown]


def _segments(result: CellResult) -> Iterator[Segment]:
    above = below = 0.0
    for term in TERMS:
        share = getattr(result, term) / result.latency_s
        if share < 0:
            below += share
            yield Segment(term, share, below)
        else:
            yield Segment(term, share, above)
            above += share
