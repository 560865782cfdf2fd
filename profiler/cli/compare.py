"""The commands compare, gate and place."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profiler.cli.options import EXIT_INCOMPLETE, EXIT_REQUEST, EXIT_WRONG, Format, Plain, Quiet, one_of
from profiler.errors import RequestError
from profiler.grid.ranges import parse_values
from profiler.quant.registry import quant_help
from profiler.run.options import Options

if TYPE_CHECKING:
    from profiler.comparison.gate import Gate


@contextmanager
def _uncollected() -> Iterator[None]:
    """Looks for no reference cycles meanwhile, nor in what is left: a hundred thousand figures hold none, and it
    is a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.freeze()
            gc.enable()


@_uncollected()
def compare_command(
    paths: Annotated[list[Path], typer.Argument(metavar="A B...", help="Run folders, or other tools' result files.")],
    anyway: Annotated[bool, typer.Option("--anyway", help="Show what is not comparable, without a verdict.")] = False,
    plain: Plain = False,
    output_format: Format = "table",
) -> None:
    """Hold two runs against each other, cell by cell: what changed, how surely, and which term moved; of more than two,
    the history."""
    one_of(output_format, "--format", ("table", "json"))
    from profiler.comparison.command import compared, history_of
    from profiler.comparison.documents import comparison_document, history_document
    from profiler.comparison.render import print_changes, print_history
    from profiler.json_document import json_rows
    from profiler.report.console import screen

    if len(paths) < 2:
        raise RequestError("give two run folders or more: roofscope compare BEFORE AFTER.")
    if len(paths) == 2:
        comparison = compared(paths[0], paths[1], anyway=anyway)
        if output_format == "json":
            print(json_rows(comparison_document(comparison)))
        else:
            print_changes(comparison, screen(plain=plain))
        return
    history = history_of(paths, anyway=anyway)
    if output_format == "json":
        print(json_rows(history_document(history)))
    else:
        print_history(history, screen(plain=plain))


_GATE_EXITS = {"pass": 0, "slower": EXIT_WRONG, "not comparable": EXIT_REQUEST, "inconclusive": EXIT_INCOMPLETE}


def gate_command(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The run folder to hold against.")],
    new: Annotated[Path | None, typer.Argument(metavar="[NEW]", help="The run folder of the change.")] = None,
    max_slowdown: Annotated[str, typer.Option(help="Allowed: 3%, or decode=3%,prefill=5%.")] = "3%",
    rerun: Annotated[bool, typer.Option("--rerun", help="Measure BASE's grid now, instead of giving NEW.")] = False,
    model: Annotated[str | None, typer.Option(help="--rerun: where BASE's model lies, if it was a local path.")] = None,
    budget_s: Annotated[float, typer.Option("--budget", help="--rerun: seconds from the start to the answer.")] = 180.0,
    device: Annotated[str, typer.Option(help="--rerun: auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="--rerun: the new run's folder.")] = None,
    quiet: Quiet = False,
    plain: Plain = False,
    output_format: Annotated[str, typer.Option("--format", help="table, json, junit or github.")] = "table",
) -> None:
    """Let a change pass (exit 0) or not: 1 slower than that beyond doubt, 3 cannot tell, 2 not comparable."""
    from profiler.comparison.command import gated
    from profiler.comparison.documents import gate_document
    from profiler.comparison.gate_formats import GATE_FORMATS
    from profiler.comparison.render import print_gate
    from profiler.json_document import json_text
    from profiler.report.console import screen

    one_of(output_format, "--format", ("table", "json", *GATE_FORMATS))
    if rerun == (new is not None):
        raise RequestError("give one of the two: roofscope gate BASE NEW, or roofscope gate BASE --rerun.")
    if new is not None:
        found = gated(base, new, max_slowdown)
    else:
        options = Options(model=model, budget_s=budget_s, device=device, out=out)
        found = _measured(base, max_slowdown, options, quiet, plain)
    if output_format == "table":
        print_gate(found, screen(plain=plain))
    elif output_format == "json":
        print(json_text(gate_document(found)))
    else:
        print(GATE_FORMATS[output_format](found), end="" if output_format == "junit" else "\n")
    raise typer.Exit(_GATE_EXITS[found.outcome])


def _measured(base: Path, max_slowdown: str, options: Options, quiet: bool, plain: bool) -> Gate:
    """Measure the new side now."""
    from profiler.report.progress import make_listener

    with make_listener(quiet=quiet, plain=plain) as listener:
        from profiler.comparison.rerun import rerun

        return rerun(base, max_slowdown, options, listener)


@_uncollected()
def place_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Another tool's result file, or a table.")],
    model: Annotated[str, typer.Option(help="The model that ran: hub id, folder, .gguf file, or a card's name.")],
    gpu: Annotated[str, typer.Option("--gpu", help="The card that it ran on, such as 'H100 SXM'.")] = "",
    here: Annotated[bool, typer.Option("--here", help="Under the roofs of this device, measured.")] = False,
    quant: Annotated[str, typer.Option(help=f"{quant_help()}; a GGUF file's own bits are in its figures.")] = "none",
    prompt_lens: Annotated[str, typer.Option(help="For a file that names no shapes.")] = "",
    batch_sizes: Annotated[str, typer.Option(help="For a file that names no shapes.")] = "",
    new_tokens: Annotated[str, typer.Option(help="For a file that names no shapes.")] = "",
    plain: Plain = False,
    output_format: Format = "table",
) -> None:
    """Put another tool's figures under the roofs: the floor of each, the share attained, and what is wrong with it."""
    one_of(output_format, "--format", ("table", "json"))
    if here and gpu:
        raise RequestError("--here and --gpu: give one of the two.")
    from profiler.json_document import json_rows
    from profiler.place.command import Shapes, place
    from profiler.place.render import place_document, print_placed
    from profiler.report.console import screen

    shapes = Shapes(
        _numbers(prompt_lens, "--prompt-lens"),
        _numbers(batch_sizes, "--batch-sizes"),
        _numbers(new_tokens, "--new-tokens"),
    )
    found = place(file, model, gpu=gpu, here=here, quant=quant, shapes=shapes)
    if output_format == "json":
        print(json_rows(place_document(found)))
        return
    title = f"{found.file.tool}: {found.model} {found.stored} under the roofs of {found.under.name}"
    print_placed(title, found.rows, found.doubts, screen(plain=plain))


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """`128` or `128,256`, in their order."""
    return tuple(number for part in text.split(",") if part.strip() for number in parse_values(part.strip(), option))
