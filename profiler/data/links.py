"""Links between GPUs: latency and bandwidth, from a sweep, from published all-reduces, or from `--link`."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from profiler.data import rows_of
from profiler.data.datasheets import Datasheet
from profiler.errors import RequestError

_TYPED = re.compile(r"^\s*([0-9.eE+-]+)\s*(?:us|µs)?\s*,\s*([0-9.eE+-]+)\s*(?:GB/s)?\s*$")
_MOST_BYTES = 64 << 20
"""Messages of a step are at most this large; the bandwidth for larger ones is not relevant to it."""
_LARGE_BYTES = 1 << 20

_NCCL = "NCCL's own model of a ring (github:NVIDIA/nccl@5067397 src/graph/tuning.cc)"
_LAUNCH_S = 6.6e-6
_HOP_S = {"nvlink": 0.6e-6, "pcie": 1.0e-6}
"""Seconds per hop of a small message over a kind of link, in NCCL's model. Other kinds have only published figures."""

CollectiveKind = Literal["all_reduce", "all_gather"]


def bus_share(kind: CollectiveKind, ranks: int) -> float:
    """Return the bytes that cross each rank's link per byte of the result: busbw / algbw of nccl-tests.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: 2(n-1)/n for an all-reduce, (n-1)/n for an
    all-gather, whose size is that of the gathered whole.
    """
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def nccl_latency_s(name: str, ranks: int) -> float | None:
    """Return the seconds of NCCL's smallest all-reduce between `ranks` GPUs of one machine; None for an unknown link.

    It is what NCCL itself assumes (`ncclTopoTuneModel`, algorithms Ring and Tree, protocol LL): 6.6 µs, and for each of
    the 2(n-1) hops of a ring 0.6 µs over NVLink or 1 µs over PCIe. Published figures of nccl-tests with one process per
    GPU lie at 0.84 to 1.2 times this latency. The hops are those of R. Thakur, R. Rabenseifner, W. Gropp, "Optimization
    of Collective Communication Operations in MPICH", 2005, section 4.5.
    """
    hop_s = next((seconds for kind, seconds in _HOP_S.items() if name.startswith(kind)), None)
    return None if hop_s is None else _LAUNCH_S + 2 * (ranks - 1) * hop_s


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
    """Latency: seconds of an empty all-reduce between the ranks of this link. It grows with their number."""
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

    def seconds(self, kind: CollectiveKind, nbytes: Any, ranks: int) -> Any:
        """Return the seconds of one collective whose whole result has `nbytes`, a number or an array.

        alpha is that of an all-reduce. A ring's all-gather has half as many hops, so its time is an upper bound.
        """
        return self.alpha_s + nbytes * bus_share(kind, ranks) / self.bus_bytes_per_s


def fit_link(name: str, points: Sequence[MessageTime], source: str) -> Link:
    """Fit latency and bandwidth to the points by least squares of the relative errors.

    Raises ValueError without a point.
    """
    # t = alpha + b x, both sides over t: rows (1/t, x/t), each to be 1.
    rows = [(1 / p.seconds, p.nbytes * bus_share("all_reduce", p.ranks) / p.seconds) for p in points]
    aa, ab, bb = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    alpha = slope = -1.0
    if determinant > 1e-9 * aa * bb:
        alpha, slope = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    if alpha < 0 or slope <= 0:
        alpha, slope = min(p.seconds for p in points), 1 / max(p.bus_bytes_per_s for p in points)
    return Link(name, alpha, 1 / slope, source, tuple(points))


@dataclass(frozen=True)
class _Row:
    name: str
    gpu: str
    gpu_count: int
    busbw_gb_per_s: float
    source: str
    message_bytes: int = _MOST_BYTES
    time_us: float | None = None

    @property
    def point(self) -> MessageTime:
        """A row with only a bandwidth is a large message, whose latency is negligible."""
        seconds = self.message_bytes * bus_share("all_reduce", self.gpu_count) / (self.busbw_gb_per_s * 1e9)
        return MessageTime(self.gpu_count, self.message_bytes, seconds if self.time_us is None else self.time_us * 1e-6)


@cache
def _table() -> tuple[_Row, ...]:
    return rows_of("links.csv", _Row)


def published_links() -> tuple[str, ...]:
    """Return the names that `--link` takes, sorted."""
    return tuple(sorted({row.name for row in _table()}))


def published_link(name: str, ranks: int) -> Link:
    """Return a link of the table for `ranks` GPUs of one machine. Raises RequestError for an unknown name.

    The bandwidth is fitted to the published all-reduces of this number of GPUs, or of the nearest with figures. The
    latency is that of `nccl_latency_s`, because published ones rarely have the same number of GPUs, and often include
    the host's launches. Without NCCL's figure it is fitted, too.
    """
    rows = [row for row in _table() if row.name == name]
    if not rows:
        names = ", ".join(published_links())
        raise RequestError(f"--link {name!r} is unknown; use {names}, or alpha_us,GB/s, such as 8,20.")
    counts = {row.point.ranks for row in rows if row.point.nbytes >= _LARGE_BYTES}
    nearest = min(counts, key=lambda count: abs(math.log(count / ranks)))
    chosen = [row for row in rows if row.point.ranks == nearest and row.point.nbytes <= _MOST_BYTES]
    gpus = ", ".join(dict.fromkeys(f"{row.gpu} x {row.point.ranks}" for row in chosen))
    published = f"{gpus} ({', '.join(dict.fromkeys(row.source for row in chosen))})"
    fitted = fit_link(name, [row.point for row in chosen], f"published: {published}")
    if (alpha_s := nccl_latency_s(name, ranks)) is None:
        return fitted
    return replace(fitted, alpha_s=alpha_s, source=f"latency by {_NCCL}, bandwidth published: {published}")


def link_of(sheet: Datasheet, gpus: int) -> Link | None:
    """Return the published link between GPUs of a machine; None if no figure of it is published.

    It is the first that the datasheet names, so that PCIe cards are assumed to have no bridge.
    """
    return published_link(sheet.published_link, gpus) if sheet.published_link else None


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
    return Link(f"{alpha_us:g} µs, {gb_per_s:g} GB/s", alpha_us * 1e-6, gb_per_s * 1e9, "typed in")
