"""The link between ranks: latency, bandwidth and the measured messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from profiler.data.links import Link
from profiler.json_document import Document
from profiler.report.blocks import TextTable, text_table
from profiler.units import duration, scaled, significant


@dataclass(frozen=True)
class MessageEntry:
    """One message of the sweep."""

    nbytes: int
    """Bytes of the reduced tensor."""
    seconds: float
    """Mean seconds of an all-reduce."""
    alg_bytes_per_s: float
    """`nbytes` over the time (algbw of nccl-tests)."""
    bus_bytes_per_s: float
    """The rate at each rank's link (busbw of nccl-tests)."""
    fitted_s: float
    """Seconds by the fit."""


@dataclass(frozen=True)
class LinkDocument(Document):
    """`roofscope ceilings --link N --format json`."""

    name: str
    """The library, and the number of ranks."""
    ranks: int
    alpha_s: float
    """Latency: seconds of an empty all-reduce."""
    bus_bytes_per_s: float
    """Bandwidth at each rank's link."""
    half_bytes: float
    """The message whose transfer takes as long as the latency."""
    points: Sequence[MessageEntry]


def link_document(link: Link) -> LinkDocument:
    """Return the document of a measured link. Raises ValueError for a link without points."""
    if not link.points:
        raise ValueError(f"{link.name} has no measured messages")
    ranks = link.points[0].ranks
    points = [
        MessageEntry(
            point.nbytes,
            point.seconds,
            point.alg_bytes_per_s,
            point.bus_bytes_per_s,
            link.seconds("all_reduce", point.nbytes, ranks),
        )
        for point in link.points
    ]
    return LinkDocument(link.name, ranks, link.alpha_s, link.bus_bytes_per_s, link.half_bytes(ranks), points)


def link_table(document: LinkDocument) -> TextTable:
    """Return a row per message: its time, both rates, and the time by the fit."""
    rows = [
        [
            message_size(point.nbytes),
            duration(point.seconds),
            scaled(point.alg_bytes_per_s, "B/s"),
            scaled(point.bus_bytes_per_s, "B/s"),
            f"{100 * (point.fitted_s / point.seconds - 1):+.0f} %",
        ]
        for point in document.points
    ]
    caption = "algbw: bytes over time; busbw: the rate at each rank's link; fit: its time compared with measured"
    return text_table(("message", "time", "algbw", "busbw", "fit"), rows, caption=caption)


def link_lines(document: LinkDocument) -> list[str]:
    """Return what the link is, what it means for a step, and how `forecast` uses it."""
    alpha_us, gb_per_s = 1e6 * document.alpha_s, document.bus_bytes_per_s / 1e9
    return [
        f"{document.name}: an all-reduce takes {duration(document.alpha_s)}, and the time of its bytes at"
        f" {scaled(document.bus_bytes_per_s, 'B/s')} (busbw).",
        f"Messages below {message_size(document.half_bytes)} wait mostly for latency: fewer messages help, fewer bytes"
        " hardly do.",
        f"Use it: roofscope forecast RUN --tp {document.ranks} --link {significant(alpha_us)},{significant(gb_per_s)}",
    ]


def message_size(nbytes: float) -> str:
    """Return the size of a message in KiB or MiB."""
    return f"{nbytes / 2**20:.3g} MiB" if nbytes >= 1 << 20 else f"{nbytes / 2**10:.3g} KiB"
