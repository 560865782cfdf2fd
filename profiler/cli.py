"""The command line. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from profiler._version import __version__
from profiler.errors import RequestError, RoofscopeError, near_misses

if TYPE_CHECKING:
    from profiler.job import Listener, Options
    from profiler.runstore import Run

EXIT_WRONG = 1
EXIT_REQUEST = 2
EXIT_INCOMPLETE = 3
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="roofscope",
    help="How fast is this model on this device, what bounds it, and what would change it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_QUANT_HELP = "none, int8, nf4, fp4 (bitsandbytes), int8wo, int4wo or fp8 (torchao)"
Plain = Annotated[bool, typer.Option("--plain", help="No colours and no box drawing.")]
Format = Annotated[str, typer.Option("--format", help="table or json (one document on stdout)")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"roofscope {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
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
    quant: Annotated[str, typer.Option(help=f"{_QUANT_HELP}; or several: none,nf4.")] = "none",
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
    _one_of(output_format, "--format", ("table", "json"))
    from profiler.report.progress import make_listener

    listener = make_listener(quiet=quiet, plain=plain)
    with listener:
        from profiler.catalog import DEFAULT_MODEL
        from profiler.job import Options, execute, prepare, prepare_resume

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
    from profiler.precision import run_precisions

    runs = run_precisions(options, precisions, listener)
    if output_format == "json":
        print(json.dumps([json.loads(_as_json(run)) for run in runs], indent=2))
        return
    from profiler.report.console import screen
    from profiler.report.precision_table import print_precisions

    print_precisions(runs, screen(plain=plain))


@app.command("batch-test")
def batch_test(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, folder, .gguf file, or a card's name.", show_default="smollm2-135m")
    ] = None,
    phase: Annotated[str, typer.Option(help="prefill or decode.")] = "decode",
    prompt: Annotated[int, typer.Option(help="Prompt tokens.")] = 128,
    context: Annotated[int, typer.Option(help="Decode this deep in a filled cache instead.")] = 0,
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode.")] = 16,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quant: Annotated[str, typer.Option(help=f"{_QUANT_HELP}.")] = "none",
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
    _one_of(output_format, "--format", ("table", "json"))
    from profiler.report.progress import make_listener

    with make_listener(quiet=quiet, plain=plain) as listener:
        from profiler.catalog import DEFAULT_MODEL
        from profiler.doubling import prepare_batch_test
        from profiler.job import Options, execute

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


@app.command()
def count(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or a card's name.")],
    phase: Annotated[str, typer.Option(help="prefill or decode.")] = "decode",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    prompt: Annotated[int, typer.Option(help="Prompt tokens.")] = 512,
    context: Annotated[int | None, typer.Option(help="Cached tokens (default: none, or the prompt in decode).")] = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    quant: Annotated[str, typer.Option(help=f"{_QUANT_HELP}.")] = "none",
    attn: Annotated[str, typer.Option(help="What is executed: sdpa (a fused kernel) or eager.")] = "sdpa",
    gpu: Annotated[str, typer.Option("--gpu", help="GPUs to hold it against, such as 'T4,H100 SXM'.")] = "",
    gemm_census: Annotated[bool, typer.Option("--gemm-census", help="Every matrix product's shape.")] = False,
    crosscheck: Annotated[bool, typer.Option("--crosscheck", help="Count again with torch's own counter.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    output_format: Annotated[str, typer.Option("--format", help="table, json or csv (the operators).")] = "table",
    debug: Debug = False,
) -> None:
    """Count a step's FLOPs and bytes from the config alone, without running it."""
    _one_of(output_format, "--format", ("table", "json", "csv"))
    from profiler import counting
    from profiler.report.count_table import operators_csv, print_count

    counted = counting.count(
        model,
        phase=phase,
        batch=batch,
        prompt=prompt,
        context=context,
        dtype=dtype,
        quant=quant,
        attn=attn,
        census=gemm_census,
        gpu_names=gpu,
        second_opinion=crosscheck,
        trust_remote_code=trust_remote_code,
    )
    document = counted.as_json()
    if output_format == "json":
        print(json.dumps(document, indent=2))
    elif output_format == "csv":
        print(operators_csv(document), end="")
    else:
        from rich.console import Console

        print_count(document, Console(width=100))


@app.command()
def ceilings(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    output_format: Format = "table",
    debug: Debug = False,
) -> None:
    """Measure this device's roofs: every dtype's matrix product, streams over sizes, launches."""
    _one_of(output_format, "--format", ("table", "json"))
    from dataclasses import asdict, replace

    from profiler.hardware.ceilings import links_of, measurable_dtypes, measure, measure_links
    from profiler.hardware.device import describe
    from profiler.loading import resolve_device
    from profiler.notices import device_warnings, health_warnings

    where = resolve_device(device)
    info = describe(where)
    dtypes = measurable_dtypes(where)
    model_dtype = "float32" if where.type == "cpu" else "bfloat16"
    measured = measure(where, info, dtypes, model_dtype=model_dtype).only(dtypes, model_dtype)
    measured = replace(measured, links=measure_links(links_of(where), where))
    sheet = info.datasheet
    peaks = {name: sheet.peak_flops_per_s(name) for name in dtypes} if sheet else {}
    document = {
        "device": {**asdict(info), "datasheet": sheet.gpu if sheet else None},
        **asdict(measured),
        "memory_bytes_per_s": measured.memory_bytes_per_s,
        "datasheet_per_s": {**peaks, **({"bandwidth": sheet.bandwidth_bytes_per_s} if sheet else {})},
        "warnings": device_warnings(info) + health_warnings(info, measured),
    }
    if output_format == "json":
        print(json.dumps(document, indent=2))
        return
    from rich.console import Console

    from profiler.report.device_tables import ceilings_table
    from profiler.units import scaled

    console = Console(width=100)
    console.print(f"{info.name}, {info.threads} {'threads' if info.kind == 'cpu' else 'SMs'}", highlight=False)
    for warning in document["warnings"]:
        console.print(f"warning: {warning}", highlight=False)
    console.print(ceilings_table(document))
    curve = ", ".join(f"{point.nbytes >> 20} MiB {scaled(point.bytes_per_s, 'B/s')}" for point in measured.curve)
    console.print(f"read again and again: {curve}", highlight=False)
    for name, link in measured.links.items():
        console.print(f"from {name}: {scaled(link.per_s, 'B/s')}", highlight=False)


@app.command()
def gpus(output_format: Format = "table", debug: Debug = False) -> None:
    """List the datasheets: dense peaks, bandwidth, ridge points."""
    _one_of(output_format, "--format", ("table", "json"))
    from dataclasses import asdict

    from profiler.hardware import datasheet

    if output_format == "json":
        dtypes = ("float32", "tfloat32", "float16", "bfloat16", "float8_e4m3fn", "int8")
        print(
            json.dumps(
                [
                    {
                        **asdict(gpu),
                        "ridge_flops_per_byte": {name: gpu.ridge_flops_per_byte(name) for name in dtypes},
                    }
                    for gpu in datasheet.gpus()
                ],
                indent=2,
            )
        )
        return
    from rich.console import Console

    from profiler.report.device_tables import gpus_table

    Console(width=100).print(gpus_table(datasheet.gpus()))


@app.command()
def selftest(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    output_format: Format = "table",
    debug: Debug = False,
) -> None:
    """Check the verdicts on known kernels on this device; a wrong label is exit code 1."""
    _one_of(output_format, "--format", ("table", "json"))
    from dataclasses import asdict

    from profiler.hardware.ceilings import measure
    from profiler.hardware.device import describe
    from profiler.loading import resolve_device
    from profiler.selftest import run_selftest

    where = resolve_device(device)
    info = describe(where)
    results = run_selftest(where, info, measure(where, info, ["float32"], model_dtype="float32"))
    documents = [
        {
            "name": result.name,
            "expected": result.expected,
            "regime": result.verdict.regime,
            "confidence": result.verdict.confidence,
            "right": result.right,
            "latency_s": result.latency_s,
            "signals": [asdict(item) for item in result.verdict.evidence],
        }
        for result in results
    ]
    if output_format == "json":
        print(json.dumps(documents, indent=2))
    else:
        from rich.console import Console

        from profiler.report.device_tables import selftest_table

        Console(width=100).print(selftest_table(documents))
    if not all(result.right for result in results):
        raise typer.Exit(EXIT_WRONG)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    output_format: Annotated[str, typer.Option("--format", help="csv, md, json, parquet or latex.")] = "csv",
    out: Annotated[Path | None, typer.Option(help="File to write (default: stdout).")] = None,
    debug: Debug = False,
) -> None:
    """Write a run's tokens-per-second table."""
    from profiler.report.export import EXPORTERS
    from profiler.report.tables import tokens_table
    from profiler.runstore import read_run

    _one_of(output_format, "--format", tuple(EXPORTERS))
    content = EXPORTERS[output_format](tokens_table(read_run(folder)))
    if out is None:
        if output_format == "parquet" and sys.stdout.isatty():
            raise RequestError("--format parquet is binary; give a file with --out.")
        sys.stdout.buffer.write(content)
        return
    try:
        out.write_bytes(content)
    except OSError as error:
        raise RequestError(f"{out} cannot be written: {error.strerror}.") from None


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    debug: Debug = False,
) -> None:
    """Write a run's report.html, report.md and pictures again, from its folder alone."""
    from profiler.report.page import write_reports
    from profiler.runstore import read_run

    for folder in folders:
        write_reports(read_run(folder))
        print(folder / "report.html")


@app.command()
def plot(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN... NAME", help="Run folders, then the picture.")],
    out: Annotated[Path | None, typer.Option(help="PNG or SVG file (default: NAME.png in the run folder).")] = None,
    debug: Debug = False,
) -> None:
    """Draw a picture of a run (roofline, split, map, intensity, throughput, depth, doubling, steps) or of several
    (precisions, devices) from their folders alone."""
    from profiler.report.plots import save
    from profiler.runstore import read_run

    *runs, last = folders
    name = str(last)
    if not runs:
        raise RequestError("give a run folder and then the name of a picture: roofscope plot RUN roofline.")
    path = out or runs[0] / f"{name}.png"
    if path.suffix.lower() not in (".png", ".svg"):
        raise RequestError(f"--out {path}: the name must end in .png or .svg.")
    save([read_run(folder) for folder in runs], name, path)
    print(path)


@app.command()
def explain(
    term: Annotated[str | None, typer.Argument(help="A word of the reports, such as MBU.", show_default=False)] = None,
    folder: Annotated[Path | None, typer.Option("--run", metavar="RUN", help="Add this run's figures.")] = None,
    debug: Debug = False,
) -> None:
    """Say in two lines what a word means, with a run's own figures; without a word, list them."""
    from profiler.report.glossary import TERMS
    from profiler.report.glossary import explain as explain_term
    from profiler.runstore import read_run

    run = read_run(folder) if folder is not None else None
    print(", ".join(TERMS) if term is None else explain_term(term, run))


@app.command()
def models(output_format: Format = "table", debug: Debug = False) -> None:
    """List the model cards that come with roofscope."""
    _one_of(output_format, "--format", ("table", "json"))
    from profiler.catalog import card_names, load_card

    cards = {name: load_card(name) for name in card_names()}
    if output_format == "json":
        print(json.dumps({name: card.model_dump() for name, card in cards.items()}, indent=2))
        return
    for name, card in cards.items():
        gated = " (gated)" if card.gated else ""
        print(f"{name:18} {card.params / 1e9:7.3f} B  {card.hub_id}{gated}")


def main() -> None:
    """Run the command line; every error a user can make ends in one line on stderr and an exit code."""
    debug = "--debug" in sys.argv
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(standalone_mode=False)
    except RoofscopeError as error:
        if debug:
            raise
        code = _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        code = _complain("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        code = _complain_unexpected(error)
    sys.exit(code or 0)


def _interrupt(_number: int, _frame: object) -> None:
    """A polite request to end (SIGTERM) keeps what was measured, as Ctrl-C does."""
    raise KeyboardInterrupt


def _complain(message: str, code: int) -> int:
    print(f"roofscope: {message}", file=sys.stderr)
    return code


def _complain_unexpected(error: Exception) -> int:
    """A usage error of the command line itself, or a fault of ours."""
    usage_message = getattr(error, "format_message", None)
    if callable(usage_message):
        return _complain(f"{usage_message()} See `roofscope --help`.", EXIT_REQUEST)
    first_line = str(error).splitlines()[0] if str(error) else ""
    return _complain(f"internal error: {type(error).__name__}: {first_line} (--debug shows more)", 1)


def _one_of(value: str, option: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RequestError(f"{option} {value!r} is unknown; use {', '.join(known)}.{near_misses(value, known)}")


def _as_json(run: Run) -> str:
    document: dict[str, Any] = json.loads(run.document.model_dump_json())
    cells = json.loads(run.cells.to_json(orient="records", double_precision=15))
    return json.dumps({**document, "folder": str(run.folder), "cells": cells}, indent=2)


if __name__ == "__main__":
    main()
