"""The commands forecast and rent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from profiler.cli.options import Format, Plain, asks
from profiler.errors import RequestError
from profiler.quant.registry import quant_help
from profiler.rent.options import RentOptions

if TYPE_CHECKING:
    from profiler.forecast.command import ForecastRequest
    from profiler.forecast.tensor_parallel import RankOptions


def forecast_command(
    source: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run folder, or with --on a model.")],
    on: Annotated[str, typer.Option(help="A GPU such as 'L4', or a profile's .json file.")] = "",
    prompt_lens: Annotated[str, typer.Option(help="Prompt lengths: 128, or 64..4096*2 (default: the run's).")] = "",
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes (default: the run's, and two doublings).")] = "",
    context_lens: Annotated[str, typer.Option(help="Decode with this many tokens in the KV cache.")] = "",
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt (0: those of the run).")] = 0,
    dtype: Annotated[str, typer.Option(help="Another dtype; with RUN, one that it tried.")] = "auto",
    quant: Annotated[str, typer.Option(help=f"{quant_help()}; with RUN, one that it tried.")] = "none",
    engine: Annotated[
        str, typer.Option(help="With RUN: one of its engines, or static if it tried that. --on: eager or compiled.")
    ] = "",
    threads: Annotated[int, typer.Option(help="With a RUN on a CPU: half its threads, if it tried that.")] = 0,
    tp: Annotated[str, typer.Option("--tp", help="Tensor parallelism over so many GPUs: 2,4,8.")] = "",
    link: Annotated[
        str, typer.Option(help="--tp: nvlink3, nvlink4, nvlink5, pcie4x16, pcie5x16, xgmi, or alpha_us,GB/s.")
    ] = "",
    price: Annotated[
        float | None, typer.Option(help="--tp: USD per hour of one GPU; costs are GPU seconds without it.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Then measure the cells, and print the error.")] = False,
    model: Annotated[str, typer.Option(help="--check: the path of the run's model if it was local.")] = "",
    budget_s: Annotated[float, typer.Option("--budget", help="--check: seconds from the start to the answer.")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="PNG or SVG file: the forecast over the batch size.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Add the forecast to the run's folder and report.html.")] = False,
    plain: Plain = False,
    output_format: Format = "table",
) -> None:
    """Predict the times of cells that were not measured.

    Prints the error of such forecasts too.
    """
    from profiler.forecast.check import check_forecast
    from profiler.forecast.command import ForecastRequest, forecast_on, forecast_run
    from profiler.forecast.tensor_parallel import RankOptions
    from profiler.json_document import json_text
    from profiler.report.console import screen
    from profiler.report.forecast import forecast_document, print_check, print_forecast

    request = ForecastRequest(prompt_lens, batch_sizes, context_lens, new_tokens, dtype, quant, engine, threads)
    if not on and not Path(source).is_dir():
        raise RequestError(f"{source!r} is not a run folder; pass one, or a model with --on GPU.")
    if check and on:
        raise RequestError("--check runs on this device; omit --on, or forecast a run of this device.")
    if tp or link or price is not None:
        if not tp or check or keep or out is not None:
            raise RequestError(
                "--link and --price need --tp, which only prints its forecast: use no --check, --keep or --out."
            )
        _print_ranks(source, on, request, RankOptions(tp, link, price), output_format, plain)
        return
    answer = forecast_on(source, on, request) if on else forecast_run(Path(source), request)
    if keep and on:
        raise RequestError("--keep needs a run folder to write to, and --on has none; omit one of the two.")
    if keep:
        from profiler.report.write import write_reports
        from profiler.store.folder import read_run
        from profiler.store.forecasts import write_forecast

        write_forecast(Path(source), answer)
        write_reports([read_run(Path(source))])
    if out is not None:
        from profiler.report.plots import save_figure
        from profiler.report.plots.forecast import forecast_band

        save_figure(forecast_band(answer), out)
    comparison = check_forecast(Path(source), request, answer, budget_s, model) if check else None
    if output_format == "json":
        print(json_text(forecast_document(answer, comparison)))
        return
    print_forecast(answer, screen(plain=plain))
    if comparison is not None:
        print_check(comparison, screen(plain=plain))


def _print_ranks(
    source: str, on: str, request: ForecastRequest, options: RankOptions, output_format: str, plain: bool
) -> None:
    from profiler.forecast.render import print_ranks, ranks_document
    from profiler.forecast.tensor_parallel import forecast_ranks
    from profiler.json_document import json_text
    from profiler.report.console import screen
    from profiler.report.progress import make_listener

    with make_listener(quiet=False, plain=plain) as listener:
        answer, card = forecast_ranks(source, on, request, options, listener)
    if output_format == "json":
        print(json_text(ranks_document(answer, card)))
    else:
        print_ranks(answer, card, screen(plain=plain))


@asks(of=RentOptions)
def rent_command(
    *,
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or a preset's name.")],
    by_utilisation: Annotated[
        bool, typer.Option("--by-utilisation", help="Also USD per million tokens at 100, 50 and 10 % load.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="PNG or SVG file: the cost over the requests per second.")] = None,
    plain: Plain = False,
    output_format: Format = "table",
    **options: Any,
) -> None:
    """Compare GPUs to rent for a model: fit, speed and cost.

    States its assumptions, then the cheapest, the fastest, and the doubt.
    """
    from datetime import UTC, datetime

    from profiler.json_document import json_text
    from profiler.rent.command import rent
    from profiler.rent.picture import cost_picture
    from profiler.rent.text import print_rented, rent_document
    from profiler.report.console import screen

    offers = rent(model, RentOptions(**options), datetime.now(UTC).date())
    if out is not None:
        from profiler.report.plots import save_figure

        save_figure(cost_picture(offers), out)
    if output_format == "json":
        print(json_text(rent_document(offers)))
    else:
        print_rented(offers, screen(plain=plain), by_utilisation=by_utilisation)
