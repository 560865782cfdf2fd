"""The commands that predict: explore, forecast and rent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.cli.options import LongOutput, asks
from profiler.errors import RequestError
from profiler.forecast.options import ForecastRequest
from profiler.options import argument, listed, option
from profiler.quant.registry import quant_help
from profiler.rent.options import RentOptions

if TYPE_CHECKING:
    from profiler.explore.document import ExploreDocument
    from profiler.predict.result import ForecastCell
    from profiler.store.folder import Run


@dataclass(frozen=True)
class Source:
    """What is forecast, and on what."""

    source: str = argument("A run folder, or with --on a model.", "RUN|MODEL")
    on: str = option("", "A GPU such as 'L4'.")


@asks()
def forecast(source: Source, request: ForecastRequest, output: LongOutput) -> None:
    """Predict the times of cells that were not measured.

    Prints the error of such forecasts too.
    """
    from profiler.forecast.command import forecast_on, forecast_run
    from profiler.forecast.screen import forecast_section

    folder = Path(source.source)
    if not source.on and not folder.is_dir():
        raise RequestError(f"{source.source!r} is not a run folder; pass one, or a model with --on GPU.")
    answer = forecast_on(source.source, source.on, request) if source.on else forecast_run(folder, request)
    output.answer(lambda: answer, lambda: [forecast_section(answer)])


@dataclass(frozen=True)
class Shown:
    """What `rent` shows besides its table."""

    by_utilisation: bool = option(False, "Also USD per million tokens at 100, 50 and 10 % load.")
    out: Path | None = option(None, "PNG or SVG file: the cost over the requests per second.")


@asks()
def rent(options: RentOptions, shown: Shown, output: LongOutput) -> None:
    """Compare GPUs to rent for a model: fit, speed and cost.

    Names the cheapest, the fastest and the doubt, then the assumptions.
    """
    from datetime import UTC, datetime

    from profiler.rent.command import rent
    from profiler.rent.text import cost_picture, rent_sections

    offers = rent(options, datetime.now(UTC).date())
    if shown.out is not None:
        from profiler.report.plots import save_figure

        save_figure(cost_picture(offers), shown.out)
    output.answer(lambda: offers, lambda: rent_sections(offers, by_utilisation=shown.by_utilisation))


@dataclass(frozen=True)
class Page:
    """What the page of `explore` shows, and its file."""

    model: str = argument("Hub id, folder, .gguf file, or a preset's name.")
    gpu: str = option("", "GPUs (default: five common ones).")
    quant: str = option("", f"Several of {quant_help()} (default: all).")
    run: Path | None = option(None, "Add a run's roofs, cells and forecasts.", metavar="RUN")
    out: Path | None = option(None, "The page (default: MODEL-explore.html, or explore.html in the run's folder).")


@asks()
def explore(page: Page) -> None:
    """Write an offline page with sliders: the limits of a model on GPUs.

    With --run, the page is written into the run's folder, and its report.html links to it.
    """
    from profiler.explore.command import DEFAULT_GPUS, explore_document, explore_page, page_with_forecasts
    from profiler.report.write import html_report
    from profiler.store.folder import EXPLORE_FILE, read_run
    from profiler.store.writer import replace_file

    measured = None if page.run is None else read_run(page.run)
    document = explore_document(page.model, listed(page.gpu) or DEFAULT_GPUS, listed(page.quant), measured)
    if measured is not None:
        document = page_with_forecasts(document, measured, _forecasts(measured, document))
    path = page.out or (page.run / EXPLORE_FILE if page.run else Path(f"{Path(document.model).name}-explore.html"))
    replace_file(path, explore_page(document))
    if measured is not None and path == measured.folder / EXPLORE_FILE:
        replace_file(measured.folder / "report.html", html_report(measured))
    print(path)


def _forecasts(run: Run, document: ExploreDocument) -> Sequence[ForecastCell]:
    """Return forecasts of the page's settings; none for a run that has no basis for them."""
    from profiler.errors import RunError
    from profiler.explore.command import FORECAST_NEW_TOKENS, forecast_sizes
    from profiler.forecast.command import forecast_run

    batches, prompts, fills = (",".join(map(str, sizes)) for sizes in forecast_sizes(document))
    request = ForecastRequest(prompts, batches, fills, new_tokens=FORECAST_NEW_TOKENS)
    try:
        return forecast_run(run.folder, request).cells
    except RunError:
        return ()
