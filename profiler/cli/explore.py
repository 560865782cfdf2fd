"""The command `explore`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profiler.quant.registry import quant_help

if TYPE_CHECKING:
    from profiler.explore.document import ExploreDocument
    from profiler.predict.result import ForecastCell
    from profiler.store.folder import Run


def explore_command(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or a preset's name.")],
    gpu: Annotated[str, typer.Option("--gpu", help="GPUs or GPU profiles (default: five common ones).")] = "",
    quant: Annotated[str, typer.Option(help=f"Several of {quant_help()} (default: all).")] = "",
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="Add a run's roofs, cells and forecasts.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The page (default: MODEL-explore.html, or explore.html in the run's folder).")
    ] = None,
) -> None:
    """Write an offline page with sliders: the limits of a model on GPUs.

    With --run, the page is written into the run's folder, and its report.html links to it.
    """
    from profiler.explore.command import DEFAULT_GPUS, explore_document, page_with_forecasts
    from profiler.explore.page import explore_page
    from profiler.report.write import html_report
    from profiler.store.folder import EXPLORE_FILE, read_run
    from profiler.store.writer import replace_file

    measured = None if run is None else read_run(run)
    document = explore_document(model, _names(gpu) or DEFAULT_GPUS, _names(quant), measured)
    if measured is not None:
        document = page_with_forecasts(document, measured, _forecasts(measured, document))
    path = out or (run / EXPLORE_FILE if run else Path(f"{Path(document.model).name}-explore.html"))
    replace_file(path, explore_page(document))
    if measured is not None and path == measured.folder / EXPLORE_FILE:
        replace_file(measured.folder / "report.html", html_report(measured))
    print(path)


def _forecasts(run: Run, document: ExploreDocument) -> tuple[ForecastCell, ...]:
    """Return forecasts of the page's settings; none for a run that has no basis for them."""
    from profiler.errors import RunError
    from profiler.explore.command import FORECAST_NEW_TOKENS, forecast_sizes
    from profiler.forecast.command import ForecastRequest, forecast_run

    batches, prompts, fills = (",".join(map(str, sizes)) for sizes in forecast_sizes(document))
    request = ForecastRequest(prompts, batches, fills, FORECAST_NEW_TOKENS)
    try:
        return forecast_run(run.folder, request).cells
    except RunError:
        return ()


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
