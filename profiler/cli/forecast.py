"""The commands forecast and rent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from profiler.cli.options import LongOutput, Output, asks
from profiler.errors import RequestError
from profiler.forecast.options import ForecastOptions, RankOptions
from profiler.options import argument, option
from profiler.rent.options import RentOptions

if TYPE_CHECKING:
    from profiler.forecast.command import ForecastRequest


@dataclass(frozen=True)
class Source:
    """What is forecast, and on what."""

    source: str = argument("A run folder, or with --on a model.", "RUN|MODEL")
    on: str = option("", "A GPU such as 'L4', or a profile's .json file.")


@dataclass(frozen=True)
class Use:
    """What is done with a forecast."""

    check: bool = option(False, "Then measure the cells, and print the error.")
    model: str = option("", "--check: the path of the run's model if it was local.")
    budget_s: float = option(60.0, "--check: seconds from the start to the answer.", flag="budget")
    out: Path | None = option(None, "PNG or SVG file: the forecast over the batch size.")
    keep: bool = option(False, "Add the forecast to the run's folder and report.html.")


@asks()
def forecast(source: Source, options: ForecastOptions, ranks: RankOptions, use: Use, output: LongOutput) -> None:
    """Predict the times of cells that were not measured.

    Prints the error of such forecasts too.
    """
    from profiler.forecast.check import check_forecast
    from profiler.forecast.command import ForecastRequest, forecast_on, forecast_run
    from profiler.forecast.screen import check_section, forecast_document, forecast_section

    folder, on, request = Path(source.source), source.on, ForecastRequest(**vars(options))
    if not on and not folder.is_dir():
        raise RequestError(f"{source.source!r} is not a run folder; pass one, or a model with --on GPU.")
    if use.check and on:
        raise RequestError("--check runs on this device; omit --on, or forecast a run of this device.")
    if ranks != RankOptions():
        if not ranks.tp or use.check or use.keep or use.out is not None:
            raise RequestError(
                "--link and --price need --tp, which only prints its forecast: use no --check, --keep or --out."
            )
        _forecast_ranks(source, request, ranks, output)
        return
    answer = forecast_on(source.source, on, request) if on else forecast_run(folder, request)
    if use.keep and on:
        raise RequestError("--keep needs a run folder to write to, and --on has none; omit one of the two.")
    if use.keep:
        from profiler.report.write import write_reports
        from profiler.store.folder import read_run
        from profiler.store.forecasts import write_forecast

        write_forecast(folder, answer)
        write_reports([read_run(folder)])
    if use.out is not None:
        from profiler.report.plots import save_figure
        from profiler.report.plots.curves import forecast_band

        save_figure(forecast_band(answer), use.out)
    checked = check_forecast(folder, request, answer, use.budget_s, use.model) if use.check else None
    check = [] if checked is None else [check_section(checked)]
    output.answer(lambda: forecast_document(answer, checked), lambda: [*check, forecast_section(answer)])


def _forecast_ranks(source: Source, request: ForecastRequest, ranks: RankOptions, output: Output) -> None:
    from profiler.forecast.render import ranks_section
    from profiler.forecast.tensor_parallel import forecast_ranks
    from profiler.report.progress import make_listener

    with make_listener(quiet=False, plain=output.plain) as listener:
        answer = forecast_ranks(source.source, source.on, request, ranks, listener)
    output.answer(lambda: answer, lambda: [ranks_section(answer)])


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
