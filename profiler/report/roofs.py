"""The roofs that a run's pictures show beside memory and compute: caches, and dispatch."""

from __future__ import annotations

from dataclasses import dataclass

from profiler.record.run import Run

# As in `hardware.ceilings`: clearly faster than memory is a cache.
_CACHE_GAIN = 1.25


@dataclass(frozen=True)
class CacheLevel:
    """A size that is read faster again and again than memory can be."""

    nbytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class DispatchRoof:
    """What the host alone allows a decode step: its bytes over the time of its dispatch."""

    step_s: float
    bytes_per_s: float
    """Model bytes of the smallest measured decode over `step_s`: the slope of its line on a roofline."""


def cache_levels(run: Run) -> list[CacheLevel]:
    """The fastest size of the curve, and the largest that a cache still serves; none where no size is faster."""
    memory = run.document.ceilings["memory_bytes_per_s"]
    points = [CacheLevel(item["nbytes"], item["bytes_per_s"]) for item in run.document.ceilings.get("curve", [])]
    cached = [point for point in points if point.bytes_per_s > _CACHE_GAIN * memory]
    if not cached:
        return []
    fastest, largest = max(cached, key=lambda point: point.bytes_per_s), cached[-1]
    return [fastest] if fastest == largest else [fastest, largest]


def dispatch_roof(run: Run) -> DispatchRoof | None:
    """The dispatch roof of the first engine's decode at its smallest batch; None where it was not measured.

    A step cannot take less than its dispatch: F FLOPs over B bytes in D seconds achieve at most F / D = I x B / D, a
    line of slope B / D for all steps of about so many bytes, as decodes along the batch are.
    """
    engine = run.document.engine["names"][0]
    by_batch = run.document.ceilings["dispatch_s"].get(engine, {}).get("decode", {})
    cells = run.cells[
        (run.cells["status"] == "ok") & (run.cells["phase"] == "decode") & (run.cells["engine"] == engine)
    ]
    if not by_batch or cells.empty:
        return None
    smallest = cells.sort_values(["batch_size", "context_len"]).iloc[0]
    step_s = by_batch.get(str(smallest["batch_size"]))
    return DispatchRoof(step_s, float(smallest["model_bytes"]) / step_s) if step_s and step_s > 0 else None
