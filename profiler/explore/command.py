"""Gather what the page of `explore` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress

from profiler.counting.cache import counted_model
from profiler.counting.preset_counts import CountedModel
from profiler.errors import ModelError, RequestError
from profiler.explore.document import (
    ExploreDocument,
    ModelEntry,
    gpu_option,
    link_options,
    measured_run,
    model_entry,
    run_roofs,
)
from profiler.loading.source import ModelSource, resolve
from profiler.predict.gpu_roofs import roofs_called
from profiler.predict.result import ForecastCell
from profiler.quant.registry import FORMATS, known_quant
from profiler.store.folder import Run

DEFAULT_GPUS = ("T4", "L4", "RTX 4090", "A100 80GB SXM", "H100 SXM")
RANKS = (2, 4, 8)
_UNKNOWN_POSITIONS = 131_072
"""The longest context where a config names none."""
_MOST_BATCH, _MOST_LENGTH = 1024, 131_072
"""The ends of the sliders."""


def explore_document(
    model: str,
    gpus: Sequence[str] = DEFAULT_GPUS,
    quants: Sequence[str] = (),
    run: Run | None = None,
    forecasts: Sequence[ForecastCell] = (),
) -> ExploreDocument:
    """Return a model as expressions in some precisions, with the roofs of some GPUs.

    Without `quants`, every format that counts this model is offered. Unquantised weights are also offered split over
    2, 4 and 8 ranks, where they can be. With a run, its dtype, its roofs, its cells and some forecasts of others are
    added. Raises RequestError or ModelError.
    """
    source = resolve(model)
    dtype = run.model.dtype if run else "auto"
    whole = counted_model(source, dtype)
    if run is not None and whole.work.params != run.model.params:
        raise RequestError(
            f"--run {run.folder} is a run of {run.model.id} ({run.model.params:,} parameters), not of {source.name}"
            f" ({whole.work.params:,}); name that model."
        )
    positions = whole.max_positions or _UNKNOWN_POSITIONS
    measured = measured_run(run, forecasts) if run else None
    cells = measured.cells if measured else []
    return ExploreDocument(
        model=source.name,
        max_positions=positions,
        batches=slider_values(1, _MOST_BATCH, [cell.batch for cell in cells]),
        lengths=slider_values(16, min(positions, _MOST_LENGTH), [cell.length for cell in cells]),
        entries=list(_entries(source, dtype, whole, [known_quant(quant) for quant in quants])),
        gpus=[gpu_option(roofs) for roofs in [*([run_roofs(run)] if run else []), *map(roofs_called, gpus)]],
        links=link_options(RANKS),
        run=measured,
    )


def slider_values(least: int, most: int, further: Sequence[int] = ()) -> list[int]:
    """Return powers of two and one and a half times each, from `least` to `most`, with some further values."""
    powers = [1 << bit for bit in range(most.bit_length())]
    values = {*powers, *(power + power // 2 for power in powers if power > 2), most, *further}
    return sorted(value for value in values if least <= value <= most or value in further)


def _entries(source: ModelSource, dtype: str, whole: CountedModel, named: Sequence[str]) -> Iterator[ModelEntry]:
    """A format that does not count this model, or a number of ranks that does not divide it, is left out.

    A format that was named is not: it raises.
    """
    if not named or "none" in named:
        yield model_entry(whole, "none")
        for ranks in RANKS:
            with suppress(RequestError, ModelError):
                yield model_entry(counted_model(source, dtype, ranks=ranks), "none", ranks)
    for quant in named or FORMATS:
        if quant != "none":
            with suppress(RequestError, ModelError) if not named else nullcontext():
                yield model_entry(counted_model(source, dtype, quant), quant)
