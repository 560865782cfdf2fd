"""Gather what the page of `explore` shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from profiler.counting.cache import counted_model
from profiler.errors import tolerate_errors
from profiler.explore.document import ExploreDocument, PrecisionEntry, gpu_option, measured_points, precision_entry
from profiler.loading.source import ModelSource, resolve
from profiler.predict.gpu_roofs import roofs_called
from profiler.quant.registry import FORMATS, known_quant
from profiler.store.folder import read_run

DEFAULT_GPUS = ("T4", "L4", "RTX 4090", "A100 80GB SXM", "H100 SXM")
_MOST_POSITIONS = 131_072
"""The longest context of the sliders, where a config names none or a longer one."""


def explore_document(
    model: str, gpus: Sequence[str] = DEFAULT_GPUS, quants: Sequence[str] = (), run: Path | None = None
) -> ExploreDocument:
    """Return a model as expressions in some precisions, with the roofs of some GPUs and the measured cells of a run.

    Without `quants`, every format that counts this model is offered. The dtype is the run's, else the model's. Raises
    RequestError or ModelError.
    """
    source = resolve(model)
    measured = read_run(run) if run is not None else None
    dtype = measured.model.dtype if measured else "auto"
    first = counted_model(source, dtype)
    named = [known_quant(quant) for quant in quants]
    precisions = [precision_entry(first, "none")] if not named or "none" in named else []
    for quant in named or [name for name in FORMATS if name != "none"]:
        if quant != "none":
            precisions += _precision(source, dtype, quant, is_named=bool(named))
    return ExploreDocument(
        model=source.name,
        params=first.work.params,
        max_positions=min(first.max_positions or _MOST_POSITIONS, _MOST_POSITIONS),
        precisions=precisions,
        gpus=[gpu_option(roofs_called(name)) for name in gpus],
        measured=measured_points(measured) if measured else [],
        run=f"{measured.model.id}, {measured.model.precision}, {measured.document.device.name}" if measured else "",
    )


def _precision(source: ModelSource, dtype: str, quant: str, *, is_named: bool) -> list[PrecisionEntry]:
    """A format that does not count this model is left out, unless it was named."""
    if is_named:
        return [precision_entry(counted_model(source, dtype, quant), quant)]
    found: list[PrecisionEntry] = []
    with tolerate_errors():
        found.append(precision_entry(counted_model(source, dtype, quant), quant))
    return found
