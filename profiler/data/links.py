"""Links between GPUs: latency and bandwidth, from a sweep, from published all-reduces, or from `--link`."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from profiler.errors import RequestError

_TABLE = Path(__file__).with_name("links.csv")
_TYPED = re.compile(r"^\s*([0-9.eE+-]+)\s*(?:us)?\s*,\s*([0-9.eE+-]+)\s*(?:GB/s)?\s*$")
_MOST_BYTES = 64 << 20
"""Messages of a step are at most this large; the bandwidth for larger ones is not relevant to it."""
_LARGE_BYTES = 1 << 20

CollectiveKind = Literal["all_reduce", "all_gather"]


def bus_share(kind: CollectiveKind, ranks: int) -> float:
    """Return the bytes that cross each rank's link per byte of the result: busbw / algbw of nccl-tests.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: 2(n-1)/n for an all-reduce, (n-1)/n for an
    all-gather, whose size is that of the gathered whole.
    """
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


@dataclass(frozen=True)
class MessageTime:
    """The measured time of an all-reduce of `nbytes` over `ranks`."""

    ranks: int
    nbytes: int
    seconds: float

    @property
    def alg_bytes_per_s(self) -> float:
        """`algbw` of nccl-tests: S / t."""
        return self.nbytes / self.seconds

    @property
    def bus_bytes_per_s(self) -> float:
        """`busbw` of nccl-tests: algbw x 2(n-1)/n."""
        return self.alg_bytes_per_s * bus_share("all_reduce", self.ranks)


@dataclass(frozen=True)
class Link:
    """Model of a collective's time for S bytes: alpha + S x (busbw / algbw) / bandwidth."""

    name: str
    alpha_s: float
    """Latency: seconds of an empty collective."""
    bus_bytes_per_s: float
    source: str
    points: tuple[MessageTime, ...] = ()
    """The measurements of the fit; empty for a link given as two numbers."""

    def half_bytes(self, ranks: int) -> float:
        """Return the bytes of an all-reduce that takes twice the latency.

        Smaller messages wait for the latency, larger ones for the bandwidth. It is n_1/2 of R. W. Hockney, "The
        communication challenge for MPP", Parallel Computing 20 (1994).
        """
        return self.alpha_s * self.bus_bytes_per_s / bus_share("all_reduce", ranks)

    def seconds(self, kind: CollectiveKind, nbytes: float, ranks: int) -> float:
        """Return the seconds of one collective whose whole result has `nbytes`.

        alpha is that of an all-reduce. A ring's all-gather has half as many hops, so its time is an upper bound.
        """
        return self.alpha_s + nbytes * bus_share(kind, ranks) / self.bus_bytes_per_s


def fit_link(name: str, points: Sequence[MessageTime], source: str) -> Link:
    """Fit latency and bandwidth to the points by least squares of the relative errors.

    Raises ValueError without a point.
    """
    if not points:
        raise ValueError("a link cannot be fitted without a point")
    # t = alpha + b x, both sides over t: rows (1/t, x/t), each to be 1.
    rows = [(1 / p.seconds, p.nbytes * bus_share("all_reduce", p.ranks) / p.seconds) for p in points]
    aa, ab, bb = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    alpha = slope = -1.0
    if determinant > 1e-9 * aa * bb:
        alpha, slope = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    if alpha < 0 or slope <= 0:
        alpha = min(p.seconds for p in points)
        slope = 1 / max(p.bus_bytes_per_s for p in points)
    return Link(name, alpha, 1 / slope, source, tuple(points))


@dataclass(frozen=True)
class _Row:
    name: str
    gpu: str
    point: MessageTime
    source: str


@cache
def _table() -> tuple[_Row, ...]:
    """Rows of links.csv; one with only a bandwidth becomes a large message, whose latency is negligible."""
    rows = []
    with _TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            ranks = int(row["gpu_count"])
            nbytes = int(row["message_bytes"] or _MOST_BYTES)
            if row["time_us"]:
                seconds = float(row["time_us"]) * 1e-6
            else:
                seconds = nbytes * bus_share("all_reduce", ranks) / (float(row["busbw_gb_per_s"]) * 1e9)
            rows.append(_Row(row["name"], row["gpu"], MessageTime(ranks, nbytes, seconds), row["source"]))
    return tuple(rows)


def published_links() -> tuple[str, ...]:
    """Return the names that `--link` takes, sorted."""
    return tuple(sorted({row.name for row in _table()}))


def published_link(name: str, ranks: int) -> Link:
    """Return a link of the table for `ranks`, or for the nearest number with figures. Raises RequestError."""
    rows = [row for row in _table() if row.name == name]
    if not rows:
        names = ", ".join(published_links())
        raise RequestError(f"--link {name!r} is unknown; use {names}, or alpha_us,GB/s, such as 8,20.")
    counts = {row.point.ranks for row in rows}
    nearest = min(counts, key=lambda count: abs(math.log(count / ranks)))
    chosen = [row for row in rows if row.point.ranks == nearest]
    sizes = [row.point.nbytes for row in chosen]
    if not min(sizes) < _LARGE_BYTES <= max(sizes):  # latency and bandwidth come from different measurements
        chosen = rows
    within = [row for row in chosen if row.point.nbytes <= _MOST_BYTES]
    gpus = ", ".join(dict.fromkeys(f"{row.gpu} x {row.point.ranks}" for row in within))
    sources = ", ".join(dict.fromkeys(row.source for row in within))
    return fit_link(name, [row.point for row in within], f"published: {gpus} ({sources})")


def link_called(text: str, ranks: int) -> Link:
    """Return the link for `--link`: a name of the table, or `alpha_us,GB/s` (bus bandwidth). Raises RequestError."""
    typed = _TYPED.match(text)
    if typed is None:
        return published_link(text.strip(), ranks)
    try:
        alpha_us, gb_per_s = float(typed[1]), float(typed[2])
    except ValueError:
        alpha_us = gb_per_s = math.nan
    if not (alpha_us >= 0 and gb_per_s > 0 and math.isfinite(alpha_us) and math.isfinite(gb_per_s)):
        raise RequestError(f"--link {text!r} is not possible; give microseconds and GB/s above 0, such as 8,20.")
    return Link(f"{alpha_us:g} us, {gb_per_s:g} GB/s", alpha_us * 1e-6, gb_per_s * 1e9, "typed in")
