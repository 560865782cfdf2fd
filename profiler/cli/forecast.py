"""The commands forecast and rent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profiler.cli.options import Format, Plain, one_of
from profiler.errors import RequestError
from profiler.quant.registry import quant_help

if TYPE_CHECKING:
    from profiler.forecast.command import ForecastRequest
    from profiler.forecast.tensor_parallel import RankOptions


def forecast_command(
    source: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run folder, or with --on a model.")],
    on: Annotated[str, typer.Option(help="A card.json, a profile's name, or a card such as 'L4'.")] = "",
    prompt_lens: Annotated[str, typer.Option(help="Prompt lengths: 128, or 64..4096*2 (default: the run's).")] = "",
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes (default: the run's, and two doublings).")] = "",
    context_lens: Annotated[str, typer.Option(help="Decode this deep in a filled cache.")] = "",
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt (default: the run's).")] = 0,
    dtype: Annotated[str, typer.Option(help="Another dtype: of a run one that it tried.")] = "auto",
    quant: Annotated[str, typer.Option(help=f"{quant_help()}: of a run one that it tried.")] = "none",
    engine: Annotated[str, typer.Option(help="Of a run: one of its engines, or static where it tried that.")] = "",
    threads: Annotated[int, typer.Option(help="Of a run on a CPU: half its threads, where it tried that.")] = 0,
    tp: Annotated[str, typer.Option("--tp", help="On several cards that share the model: 2,4,8.")] = "",
    link: Annotated[
        str, typer.Option(help="--tp: nvlink3, nvlink4, nvlink5, pcie4x16, pcie5x16, xgmi, or alpha_us,GB/s.")
    ] = "",
    price: Annotated[float | None, typer.Option(help="--tp: USD an hour of one card.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Then run it, and say how far off the forecast was.")] = False,
    model: Annotated[str, typer.Option(help="--check: where the run's model lies, if it was a local path.")] = "",
    budget_s: Annotated[float, typer.Option("--budget", help="--check: seconds from the start to the answer.")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="PNG or SVG of the forecast over the batch.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep it in the run's folder and its report.html.")] = False,
    plain: Plain = False,
    output_format: Format = "table",
) -> None:
    """Say what cells would take that nobody measured, and how far off such forecasts are."""
    one_of(output_format, "--format", ("table", "json"))
    from profiler.forecast.check import check_forecast
    from profiler.forecast.command import ForecastRequest, forecast_on, forecast_run
    from profiler.forecast.tensor_parallel import RankOptions
    from profiler.json_document import json_text
    from profiler.report.console import screen
    from profiler.report.forecast import forecast_document, print_check, print_forecast

    wanted = ForecastRequest(prompt_lens, batch_sizes, context_lens, new_tokens, dtype, quant, engine, threads)
    if not on and not Path(source).is_dir():
        raise RequestError(f"{source!r} is no run folder; give one, or a model with --on CARD.")
    if check and on:
        raise RequestError("--check runs on this device; leave --on out, or forecast a run of this device.")
    if tp or link or price is not None:
        if not tp or check or keep or out is not None:
            raise RequestError(
                "--link and --price belong to --tp, which is printed alone: no --check, --keep or --out."
            )
        _print_ranks(source, on, wanted, RankOptions(tp, link, price), output_format, plain)
        return
    answer = forecast_on(source, on, wanted) if on else forecast_run(Path(source), wanted)
    if keep and on:
        raise RequestError("--keep: only the forecast of a run has a folder to be kept in.")
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
    checked = check_forecast(Path(source), wanted, answer, budget_s, model) if check else None
    if output_format == "json":
        print(json_text(forecast_document(answer, checked)))
        return
    print_forecast(answer, screen(plain=plain))
    if checked:
        print_check(checked, screen(plain=plain))


def _print_ranks(
    source: str, on: str, wanted: ForecastRequest, asked: RankOptions, output_format: str, plain: bool
) -> None:
    """What several cards give."""
    from datetime import UTC, datetime

    from profiler.forecast.render import print_ranks, ranks_document
    from profiler.forecast.tensor_parallel import forecast_ranks
    from profiler.json_document import json_text
    from profiler.report.console import screen
    from profiler.report.progress import make_listener

    with make_listener(quiet=False, plain=plain) as listener:
        answer, card = forecast_ranks(source, on, wanted, asked, datetime.now(UTC).date(), listener)
    if output_format == "json":
        print(json_text(ranks_document(answer, card)))
    else:
        print_ranks(answer, card, screen(plain=plain))


def rent_command(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or a card's name.")],
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    new: Annotated[int, typer.Option(help="New tokens of an answer.")] = 128,
    batch: Annotated[int | None, typer.Option(help="Sequences at once (default: as many as fit the limits).")] = None,
    max_ttft_ms: Annotated[float | None, typer.Option(help="Milliseconds to the first token, at most.")] = None,
    max_tpot_ms: Annotated[float | None, typer.Option(help="Milliseconds a further token, at most.")] = None,
    quant: Annotated[str, typer.Option(help="One or several of none, nf4, int8wo, int4wo, fp8.")] = "none",
    engine: Annotated[str, typer.Option(help="eager (plain transformers) or compiled (graphs, fused).")] = "eager",
    price: Annotated[str, typer.Option(help="USD an hour of your own: 'T4=0.35,H100 SXM=2.99'.")] = "",
    cards: Annotated[str, typer.Option(help="These cards alone, such as 'T4,L4,H100 SXM'.")] = "",
    host_index: Annotated[
        float | None, typer.Option(help="How slow your host dispatches, as `roofscope ceilings` tells it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="PNG or SVG of the cost over the load.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the costs in this run's folder and its report.html.")] = None,
    plain: Plain = False,
    output_format: Format = "table",
) -> None:
    """Say which card to rent for a model: what fits, how fast a range, what a million tokens cost at which load."""
    one_of(output_format, "--format", ("table", "json"))
    from datetime import UTC, datetime

    from profiler.json_document import json_text
    from profiler.rent.command import RENTED_ENGINES, RentRequest, limits_of, rent
    from profiler.rent.render import print_rented, rent_document
    from profiler.report.console import screen

    one_of(engine, "--engine", RENTED_ENGINES)
    asked = RentRequest(
        prompt_len=prompt,
        new_tokens=new,
        batch=batch,
        limits=limits_of(max_ttft_ms, max_tpot_ms),
        quants=tuple(name.strip() for name in quant.split(",") if name.strip()) or ("none",),
        engine="compiled" if engine == "compiled" else "eager",
        prices=price,
        cards=cards,
        host_index=host_index,
    )
    found = rent(model, asked, datetime.now(UTC).date())
    if out is not None:
        from profiler.report.plots import save_figure
        from profiler.report.plots.costs import cost_figure

        save_figure(cost_figure(found.over_load), out)
    if keep is not None:
        from profiler.report.write import write_reports
        from profiler.store.folder import read_run
        from profiler.store.forecasts import write_costs

        run = read_run(keep)
        write_costs(keep, found.over_load)
        write_reports([run])
    if output_format == "json":
        print(json_text(rent_document(found)))
    else:
        print_rented(found, screen(plain=plain))
