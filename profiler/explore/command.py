"""Gather what the page of `explore` shows, and write that page: one HTML file that opens offline."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from profiler import report
from profiler.counting.cache import counted_model
from profiler.counting.preset_counts import CountedModel
from profiler.data.roof_set import roofs_called
from profiler.errors import ModelError, RequestError
from profiler.explore.document import (
    ExploreDocument,
    ModelEntry,
    gpu_row,
    link_rows,
    measured_run,
    model_entry,
    run_roofs,
)
from profiler.loading.source import ModelSource, resolve
from profiler.predict.result import ForecastCell
from profiler.quant.registry import FORMATS, known_quant
from profiler.store.folder import Run

DEFAULT_GPUS = ("T4", "L4", "RTX 4090", "A100 80GB SXM", "H100 SXM")
RANKS = (2, 4, 8)
_UNKNOWN_POSITIONS = 131_072
"""The longest context where a config names none."""
_MOST_BATCH, _MOST_LENGTH = 1024, 131_072
"""The ends of the sliders."""
_BEYOND = 4
FORECAST_NEW_TOKENS = 4
"""The new tokens of a forecast cell, at whose middle its decode step is."""


def explore_document(
    model: str,
    gpus: Sequence[str] = DEFAULT_GPUS,
    quants: Sequence[str] = (),
    run: Run | None = None,
) -> ExploreDocument:
    """Return a model as expressions in some precisions, with the roofs of some GPUs.

    Without `quants`, every format that counts this model is offered. Unquantised weights are also offered split over
    2, 4 and 8 ranks, where they can be. With a run, the dtype is the run's, and its roofs
    and cells are added. Raises RequestError or ModelError.
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
    measured = measured_run(run) if run else None
    cells = measured.cells if measured else []
    return ExploreDocument(
        model=source.name,
        max_positions=positions,
        batches=slider_values(1, _MOST_BATCH, [cell["batch"] for cell in cells]),
        lengths=slider_values(16, min(positions, _MOST_LENGTH), [cell["length"] for cell in cells]),
        entries=list(_entries(source, dtype, whole, [known_quant(quant) for quant in quants])),
        gpus=[gpu_row(roofs) for roofs in [*([run_roofs(run)] if run else []), *map(roofs_called, gpus)]],
        links=link_rows(RANKS),
        run=measured,
    )


def forecast_sizes(document: ExploreDocument) -> tuple[list[int], list[int], list[int]]:
    """Return the batch sizes, prompts and cache fills to forecast for a page with a run.

    They are the sliders' settings up to _BEYOND times the largest measured batch and length. A decode step has half of
    the new tokens more in its cache than the cache was filled with.
    """
    cells = document.run.cells if document.run else []
    most_batch = _BEYOND * max((cell["batch"] for cell in cells), default=1)
    most_length = min(
        _BEYOND * max((cell["length"] for cell in cells), default=16), document.max_positions - FORECAST_NEW_TOKENS
    )
    lengths = [length for length in document.lengths if length <= most_length]
    fills = [length - FORECAST_NEW_TOKENS // 2 for length in lengths]
    return [batch for batch in document.batches if batch <= most_batch], lengths, fills


def page_with_forecasts(document: ExploreDocument, run: Run, forecasts: Sequence[ForecastCell]) -> ExploreDocument:
    """Return the page of a run with forecasts of cells that it did not measure."""
    return replace(document, run=measured_run(run, forecasts))


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


_FOLDER = Path(__file__).parent
_STYLE = Path(report.__file__).parent / "templates" / "style.css"


def explore_page(document: ExploreDocument) -> str:
    """Return the page of a model. Its policy allows its own style and script, and no connection."""
    script = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in ("theory.js", "explore.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    content = json.dumps(asdict(document), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    return environment.get_template("explore.html.j2").render(
        document=document,
        # Ours, not a user's: the script and the style of this package, and JSON without a `<`.
        script=Markup(script),
        style=Markup(_STYLE.read_text(encoding="utf-8")),
        document_json=Markup(content),
        policy=(
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none';"
            " form-action 'none'"
        ),
    )
