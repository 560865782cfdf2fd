"""The commands compare, gate and place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from profiler.cli.options import EXIT_INCOMPLETE, EXIT_REQUEST, EXIT_WRONG, Format, Plain, Quiet
from profiler.errors import RequestError
from profiler.grid.ranges import parse_values
from profiler.options import one_of
from profiler.quant.registry import quant_help
from profiler.run.options import Options


def compare_command(
    paths: Annotated[list[Path], typer.Argument(metavar="A B...", help="Run folders, or other tools' result files.")],
    anyway: Annotated[bool, typer.Option("--anyway", help="Show runs that are not comparable, no verdict.")] = False,
    tp: Annotated[
        str, typer.Option("--tp", help="GPUs that shared each step, such as 4,8; default: as A and B say.")
    ] = "",
    plain: Plain = False,
    output_format: Format = "table",
) -> None:
    """Compare two runs cell by cell, or several as a history.

    Reports each change with its confidence interval, and the part of the time that changed.
    """
    from profiler.comparison.command import compared, history_of
    from profiler.comparison.documents import comparison_document, history_document
    from profiler.comparison.text import print_changes, print_history
    from profiler.json_document import json_text
    from profiler.report.console import screen

    if len(paths) < 2:
        raise RequestError("compare needs two or more run folders: roofscope compare BEFORE AFTER.")
    gpus = _numbers(tp, "--tp")
    if len(paths) == 2:
        comparison = compared(paths[0], paths[1], anyway=anyway, tp=gpus)
        if output_format == "json":
            print(json_text(comparison_document(comparison)))
        else:
            print_changes(comparison, screen(plain=plain))
        return
    history = history_of(paths, anyway=anyway, tp=gpus)
    if output_format == "json":
        print(json_text(history_document(history)))
    else:
        print_history(history, screen(plain=plain))


_GATE_EXITS = {"pass": 0, "slower": EXIT_WRONG, "not comparable": EXIT_REQUEST, "inconclusive": EXIT_INCOMPLETE}


def gate_command(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The run folder to compare with.")],
    new: Annotated[Path | None, typer.Argument(metavar="[NEW]", help="The run folder of the change.")] = None,
    max_slowdown: Annotated[str, typer.Option(help="Largest slowdown: 3%, or decode=3%,prefill=5%.")] = "3%",
    rerun: Annotated[bool, typer.Option("--rerun", help="Measure BASE's grid again instead of reading NEW.")] = False,
    model: Annotated[str | None, typer.Option(help="--rerun: the path of BASE's model if it was local.")] = None,
    budget_s: Annotated[float, typer.Option("--budget", help="--rerun: seconds from the start to the answer.")] = 180.0,
    device: Annotated[str, typer.Option(help="--rerun: auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="--rerun: the new run's folder.")] = None,
    quiet: Quiet = False,
    plain: Plain = False,
    output_format: Annotated[str, typer.Option("--format", help="table, json, junit or github.")] = "table",
) -> None:
    """Fail if a change makes a run slower than allowed.

    Exit codes: 0 pass, 1 slower with high confidence, 2 not comparable, 3 inconclusive.
    """
    from profiler.comparison.command import gated
    from profiler.comparison.documents import gate_document
    from profiler.comparison.gate_formats import GATE_FORMATS, print_gate
    from profiler.json_document import json_text
    from profiler.report.console import screen

    one_of(output_format, "--format", ("table", "json", *GATE_FORMATS))
    if rerun == (new is not None):
        raise RequestError("use one of the two: roofscope gate BASE NEW, or roofscope gate BASE --rerun.")
    if new is not None:
        gate = gated(base, new, max_slowdown)
    else:
        options = Options(model=model, budget_s=budget_s, device=device, out=out)
        from profiler.report.progress import make_listener

        with make_listener(quiet=quiet, plain=plain) as listener:
            from profiler.comparison.rerun import rerun as measure_again

            gate = measure_again(base, max_slowdown, options, listener)
    if output_format == "table":
        print_gate(gate, screen(plain=plain))
    elif output_format == "json":
        print(json_text(gate_document(gate)))
    else:
        print(GATE_FORMATS[output_format](gate), end="" if output_format == "junit" else "\n")
    raise typer.Exit(_GATE_EXITS[gate.outcome])


def place_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Another tool's result file, or a table.")],
    model: Annotated[str, typer.Option(help="The model that ran: hub id, folder, .gguf file, or a preset's name.")],
    gpu: Annotated[str, typer.Option("--gpu", help="The GPU that it ran on, such as 'H100 SXM'.")] = "",
    here: Annotated[bool, typer.Option("--here", help="Measure and use the roofs of this device.")] = False,
    quant: Annotated[str, typer.Option(help=f"{quant_help()}; not for GGUF, whose results name their bits.")] = "none",
    tp: Annotated[int, typer.Option("--tp", help="GPUs that shared each step; default: as the file says, or 1.")] = 0,
    link: Annotated[str, typer.Option("--link", help="Their link, as in `forecast`; default: the datasheet's.")] = "",
    prompt_lens: Annotated[str, typer.Option(help="Prompt lengths, for a file without shapes.")] = "",
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes, for a file without shapes.")] = "",
    new_tokens: Annotated[str, typer.Option(help="New tokens, for a file without shapes.")] = "",
    plain: Plain = False,
    output_format: Format = "table",
) -> None:
    """Compare another tool's results with the roofs.

    Prints the floor of each result, the share of the roof that it attains, and doubts about it.
    """
    if here and gpu:
        raise RequestError("--here and --gpu name two devices; use one of the two.")
    from profiler.json_document import json_text
    from profiler.place.command import Shapes, place
    from profiler.place.render import print_placed
    from profiler.report.console import screen

    shapes = Shapes(
        _numbers(prompt_lens, "--prompt-lens"),
        _numbers(batch_sizes, "--batch-sizes"),
        _numbers(new_tokens, "--new-tokens"),
    )
    placed = place(file, model, gpu=gpu, here=here, quant=quant, tp=tp, link=link, shapes=shapes)
    if output_format == "json":
        print(json_text(placed))
        return
    print_placed(placed, screen(plain=plain))


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """Parse numbers such as `128` or `128,256`, in their order."""
    return tuple(number for part in text.split(",") if part.strip() for number in parse_values(part.strip(), option))
