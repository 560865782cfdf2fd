"""The commands that say what would happen: forecast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from profiler.cli.options import Format, Plain, one_of
from profiler.job.options import QUANT_HELP


def forecast(
    source: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run folder, or with --on a model.")],
    prompt_lens: Annotated[str, typer.Option(help="Prompt lengths: 128, or 64..4096*2 (default: the run's).")] = "",
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes (default: the run's, and two doublings).")] = "",
    context_lens: Annotated[str, typer.Option(help="Decode this deep in a filled cache.")] = "",
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt (default: the run's).")] = 0,
    form: Annotated[str, typer.Option("--as", help="In a form that the run tried: bfloat16, nf4, int4wo ...")] = "",
    engine: Annotated[str, typer.Option(help="Of a run of several engines, which one.")] = "",
    plain: Plain = False,
    output_format: Format = "table",
) -> None:
    """Say what cells would take that nobody measured, and how far off such forecasts are."""
    one_of(output_format, "--format", ("table", "json"))
    from profiler.job.forecast import Wanted, forecast_run
    from profiler.report.console import screen
    from profiler.report.forecasting import forecast_json, print_forecast

    wanted = Wanted(prompt_lens, batch_sizes, context_lens, new_tokens, form)
    _, answer = forecast_run(Path(source), wanted, engine)
    if output_format == "json":
        print(json.dumps(forecast_json(answer), indent=2))
    else:
        print_forecast(answer, screen(plain=plain))
