"""Published figures, each compared with a range that was fitted without its publisher."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

from profiler.data import FOLDER
from profiler.data.published_results import Coverage, PublishedFigure, published
from profiler.predict.published_efficiency import Efficiency
from tests.published_fit import attained_by, family_of_point, fitted, steps_of, strays


@dataclass(frozen=True)
class LeftOut:
    """A figure, compared with the range for its step that was fitted to the figures of other publishers."""

    point: PublishedFigure
    inside: bool
    width: float
    """The range's upper end / its lower end."""


@cache
def left_out() -> tuple[LeftOut, ...]:
    """Every figure once, if another publisher has figures of its engine kind, format and phase.

    Both the shares and the deviations that make the range are fitted without the figure's publisher.
    """
    results: list[LeftOut] = []
    for publisher in sorted({point.publisher for point in published()}):
        held_out = [point for point in published() if point.publisher == publisher]
        others = [point for point in published() if point.publisher != publisher]
        covered = {(point.kind, point.format, point.phase) for point in others}
        for kind in sorted({point.kind for point in held_out}):
            spread = strays(others, kind)
            chosen = [
                point for point in held_out if point.kind == kind and (kind, point.format, point.phase) in covered
            ]
            for name in sorted({family_of_point(point) for point in chosen}):
                efficiency = attained_by(others, kind, name, spread)
                for point in (each for each in chosen if family_of_point(each) == name):
                    span = efficiency.range_s(steps_of([point]), point.phase)
                    low, high = float(span.low_s[0]), float(span.high_s[0])
                    results.append(LeftOut(point, 0.999 * low <= point.latency_s <= 1.001 * high, high / low))
    return tuple(results)


def coverages_again() -> tuple[Coverage, ...]:
    """The rows of published_coverage.csv, computed from published.csv."""
    rows = []
    for kind, format_, phase in sorted({(point.kind, point.format, point.phase) for point in published()}):
        figures = [point for point in published() if (point.kind, point.format, point.phase) == (kind, format_, phase)]
        checked = [one for one in left_out() if one.point in figures]
        width = statistics.median(one.width for one in checked) if checked else 0.0
        publishers, inside = {point.publisher for point in figures}, sum(one.inside for one in checked)
        counts = (len(figures), len(publishers), len(checked), inside)
        rows.append(Coverage(kind, format_, phase, *counts, round(width, 2)))
    return tuple(rows)


def main() -> None:
    """Write published_coverage.csv and published_efficiency.csv: `python -m tests.left_out`."""
    tables: dict[type[Any], Sequence[Any]] = {Coverage: coverages_again(), Efficiency: fitted()}
    for kind, file_name in ((Coverage, "published_coverage.csv"), (Efficiency, "published_efficiency.csv")):
        with (FOLDER / file_name).open("w", encoding="utf-8", newline="") as file:
            columns = sorted((field.name for field in fields(kind)), key=lambda name: name not in ("kind", "family"))
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in tables[kind])


if __name__ == "__main__":
    main()
