"""The commands that predict: explore, forecast and rent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from profiler.cli.options import LongOutput, asks
from profiler.errors import RequestError
from profiler.forecast.options import ForecastRequest
from profiler.options import argument, listed, option
from profiler.quant.registry import quant_help
from profiler.rent.options import RentOptions


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


@asks()
def rent(options: RentOptions, output: LongOutput) -> None:
    """Compare GPUs to rent for a model: fit, speed and cost.

    Names the engine, then which ranges of cost overlap.
    """
    from profiler.rent.command import rent
    from profiler.rent.text import rent_sections

    offers = rent(options)
    output.answer(lambda: offers, lambda: rent_sections(offers))


@dataclass(frozen=True)
class Page:
    """What the page of `explore` shows, and its file."""

    model: str = argument("Hub id, folder, .gguf file, or a preset's name.")
    gpu: str = option("", "GPUs (default: five common ones).")
    quant: str = option("", f"Several of {quant_help()} (default: all).")
    out: Path | None = option(None, "The page (default: MODEL-explore.html).")


@asks()
def explore(page: Page) -> None:
    """Write an offline page with sliders: the limits of a model on GPUs.

    It looks up what `count` prints, on a grid of batches and contexts.
    """
    from profiler.explore.command import explore_page
    from profiler.explore.document import DEFAULT_GPUS, explore_document
    from profiler.store.writer import replace_file

    document = explore_document(page.model, listed(page.gpu) or DEFAULT_GPUS, listed(page.quant))
    path = page.out or Path(f"{Path(document.model).name}-explore.html")
    replace_file(path, explore_page(document))
    print(path)
