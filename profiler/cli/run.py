"""The commands that run a model: run and batch-test."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from profiler.cli.options import EXIT_INCOMPLETE, EXIT_INTERRUPTED, QUANT_HELP, Debug, Format, Plain, one_of
from profiler.errors import RequestError

if TYPE_CHECKING:
    from profiler.job.request import Options
    from profiler.job.run import Listener
    from profiler.record.run import Run


def run(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, folder, .gguf file, or a card's name.", show_default="smollm2-135m")
    ] = None,
    prompt_lens: Annotated[
        str | None,
        typer.Option(help="Prompt lengths: 128, or 64,256, or 64..2048*2.", show_default="64,128,256,512"),
    ] = None,
    context_lens: Annotated[str, typer.Option(help="Decode this deep in a filled cache, without a prefill.")] = "",
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes, in the same grammar.")] = "1,2,4,8",
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode after each prompt.")] = 32,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quant: Annotated[str, typer.Option(help=f"{QUANT_HELP}; or several: none,nf4.")] = "none",
    double_quant: Annotated[bool, typer.Option("--double-quant", help="nf4, fp4: quantise the scales too.")] = False,
    compute_dtype: Annotated[str, typer.Option(help="nf4, fp4: the dtype of their products.")] = "auto",
    weights: Annotated[str, typer.Option(help="auto, checkpoint or random (nothing is downloaded).")] = "auto",
    engine: Annotated[
        str, typer.Option(help="How the model is stepped: eager, static, compile, graph, or several: eager,static.")
    ] = "eager",
    attn: Annotated[str | None, typer.Option(help="Attention implementation, such as sdpa or eager.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Run folder (default: a new one under runs/).")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Finish an interrupted run.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds for the sweep; its first round always ends.")] = 70.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure the roofs again, though kept for a day.")] = False,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Add a pass that tells where inside a step the time goes.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="The same, and keep a Chrome trace of one decode step.")
    ] = False,
    check_quality: Annotated[
        bool, typer.Option("--check-quality", help="Hold a quantised checkpoint's answers against the original's.")
    ] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load .bin checkpoints, which can run code.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    plain: Plain = False,
    output_format: Format = "table",
    debug: Debug = False,
) -> None:
    """Profile a model: roofs, prefill and decode over the grid, and what bounds each cell."""
    one_of(output_format, "--format", ("table", "json"))
    from profiler.report.progress import make_listener

    listener = make_listener(quiet=quiet, plain=plain)
    with listener:
        from profiler.job.request import Options, prepare, prepare_resume
        from profiler.job.run import execute
        from profiler.loading.catalog import DEFAULT_MODEL

        options = Options(
            model=model or DEFAULT_MODEL,
            prompt_lens=prompt_lens,
            batch_sizes=batch_sizes,
            context_lens=context_lens,
            new_tokens=new_tokens,
            dtype=dtype,
            quant=quant,
            double_quant=double_quant,
            compute_dtype=compute_dtype,
            weights=weights,
            engine=engine,
            attn=attn,
            device=device,
            out=out,
            budget_s=budget,
            fresh=fresh,
            breakdown=breakdown,
            trace=trace,
            check_quality=check_quality,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
        )
        precisions = [name.strip() for name in quant.split(",") if name.strip()]
        if len(precisions) > 1:
            if resume is not None:
                raise RequestError("--resume finishes one run; give the folder of one precision and no --quant.")
            _run_precisions(options, precisions, listener, output_format, plain)
            return
        prepared = prepare(options) if resume is None else prepare_resume(resume, model, options)
        try:
            result = execute(prepared, listener)
        except KeyboardInterrupt:
            listener.close()
            print(f"interrupted; what was measured is in {prepared.out}", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if output_format == "json":
        print(_as_json(result))
    else:
        from profiler.report.console import screen
        from profiler.report.terminal import print_run

        print_run(result, screen(plain=plain))
    if (result.cells["status"] != "ok").any():
        raise typer.Exit(EXIT_INCOMPLETE)


def _run_precisions(
    options: Options, precisions: list[str], listener: Listener, output_format: str, plain: bool
) -> None:
    from profiler.job.precisions import run_precisions

    runs = run_precisions(options, precisions, listener)
    if output_format == "json":
        print(json.dumps([json.loads(_as_json(run)) for run in runs], indent=2))
        return
    from profiler.report.console import screen
    from profiler.report.precision_table import print_precisions

    print_precisions(runs, screen(plain=plain))


def batch_test(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, folder, .gguf file, or a card's name.", show_default="smollm2-135m")
    ] = None,
    phase: Annotated[str, typer.Option(help="prefill or decode.")] = "decode",
    prompt: Annotated[int, typer.Option(help="Prompt tokens.")] = 128,
    context: Annotated[int, typer.Option(help="Decode this deep in a filled cache instead.")] = 0,
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode.")] = 16,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quant: Annotated[str, typer.Option(help=f"{QUANT_HELP}.")] = "none",
    weights: Annotated[str, typer.Option(help="auto, checkpoint or random (nothing is downloaded).")] = "auto",
    engine: Annotated[str, typer.Option(help="eager, static, compile or graph.")] = "eager",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Run folder (default: a new one under runs/).")] = None,
    budget: Annotated[float, typer.Option(help="Seconds for the sweep; its first round always ends.")] = 60.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    plain: Plain = False,
    output_format: Format = "table",
    debug: Debug = False,
) -> None:
    """Double the batch until memory is full or the knee is past: slopes beside those that bytes and FLOPs predict."""
    one_of(output_format, "--format", ("table", "json"))
    from profiler.report.progress import make_listener

    with make_listener(quiet=quiet, plain=plain) as listener:
        from profiler.job.request import Options
        from profiler.job.run import execute
        from profiler.job.several import prepare_batch_test
        from profiler.loading.catalog import DEFAULT_MODEL

        options = Options(
            model=model or DEFAULT_MODEL,
            prompt_lens=() if context else [prompt],
            context_lens=[context] if context else (),
            new_tokens=new_tokens,
            dtype=dtype,
            quant=quant,
            weights=weights,
            engine=engine,
            device=device,
            out=out,
            budget_s=budget,
        )
        listener.stage("choosing batches: roofs, counts and memory")
        result = execute(prepare_batch_test(options, phase), listener)
    if output_format == "json":
        print(_as_json(result))
        return
    from profiler.report.console import screen
    from profiler.report.scaling_table import print_doubling

    print_doubling(result, phase, screen(plain=plain))


def _as_json(run: Run) -> str:
    document: dict[str, Any] = json.loads(run.document.model_dump_json())
    cells = json.loads(run.cells.to_json(orient="records", double_precision=15))
    return json.dumps({**document, "folder": str(run.folder), "cells": cells}, indent=2)
