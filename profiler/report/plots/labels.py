"""Names of points in a picture, placed where they cover neither a marker nor each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

FONT_POINTS = 9.0
_CHARACTER_POINTS = 0.6 * FONT_POINTS
_MARKER_POINTS = 7.0
_OFFSETS_POINTS = ((0, -16), (18, -16), (-18, -16), (0, 7), (30, 7), (-30, 7), (0, -28))
"""Where a name may stand, from its point, in order of preference: below it, where no roof is, or above it."""


@dataclass(frozen=True)
class PointLabel:
    """The name of a point of the data."""

    text: str
    x: float
    y: float
    color: str


def write_labels(axes: Axes, labels: Iterable[PointLabel], taken: list[Bbox]) -> None:
    """Write names, and add the places of those that are written to `taken`, in typographic points.

    A name that finds no free place is left out. The layout must be final (`Figure.draw_without_rendering`).
    """
    for label in labels:
        x, y = at_points(axes, label.x, label.y)
        half = text_points(label.text) / 2
        for right, up in _OFFSETS_POINTS:
            box = Bbox.from_extents(x + right - half, y + up, x + right + half, y + up + FONT_POINTS)
            if not box.count_overlaps(taken):
                taken.append(box)
                axes.annotate(
                    label.text,
                    (label.x, label.y),
                    xytext=(right, up),
                    textcoords="offset points",
                    ha="center",
                    fontsize=FONT_POINTS,
                    color=label.color,
                )
                break


def markers(axes: Axes, points: Iterable[tuple[float, float]]) -> list[Bbox]:
    """Return the places of the markers of these points."""
    half = _MARKER_POINTS / 2
    places = [at_points(axes, *point) for point in points]
    return [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in places]


def text_points(text: str) -> float:
    """Return the width of a text, about."""
    return _CHARACTER_POINTS * len(text)


def at_points(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """Return the place of (x, y) in typographic points."""
    right, up = axes.transData.transform((x, y)) * 72 / axes.figure.dpi
    return float(right), float(up)
