"""The commands that explain: a script (why), and runs (explain, judge, report, plot, export)."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from profiler.cli.measure import run_json
from profiler.cli.options import LongOutput, asks
from profiler.cli.removed import removed
from profiler.errors import RequestError
from profiler.options import argument, one_of, option

if TYPE_CHECKING:
    from profiler.why_slow.findings import Why

_WITH_VALUE = ("--out", "--format", "--budget")


class WhyCommand(TyperCommand):
    """A command in which arguments after `-m MODULE` belong to the module, as with Python's `-m`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = 0
        while at < len(args) and args[at].startswith("-"):
            if args[at].startswith("-m"):
                end = at + 1 + (args[at] == "-m")
                return list(super().parse_args(ctx, [*args[:end], "--", *args[end:]]))
            at += 1 + (args[at] in _WITH_VALUE)
        return list(super().parse_args(ctx, args))


OF_WHY: dict[str, Any] = {
    "cls": WhyCommand,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
}
"""How typer reads `why`: arguments after the script belong to the script."""


@asks()
def why(
    context: typer.Context,
    *,
    script: str | None = argument("Your script and its arguments.", "SCRIPT.py [ITS ARGUMENTS]", default=None),
    module: str = option("", "Run a module instead of a file.", flag="-m", metavar="MODULE"),
    out: Path | None = option(None, "Folder for why.json and why.html (default: under runs/)."),
    budget_s: float | None = option(
        None,
        "Most seconds for the answer (default: as long as the script took, at least 30, at most 300).",
        flag="budget",
    ),
    output: LongOutput,
) -> None:
    """Run your own script, and report why its models are slow.

    Names the lines to change, and the seconds that each change saves. The script is not modified.
    """
    if not module and script is None:
        raise RequestError("why needs a script: roofscope why SCRIPT.py [its arguments], or roofscope why -m MODULE.")
    if budget_s is not None and not budget_s >= 0:
        raise RequestError(f"--budget {budget_s:g} is not possible; give seconds of 0 or more.")
    from profiler.why_slow.command import why_script

    # With -m, what typer takes for the script is the module's first argument.
    arguments = [*([script] if module and script is not None else []), *context.args]
    path = None if module or script is None else Path(script)
    streams = _script_streams(to_stderr=output.format == "json")
    show = functools.partial(_print_answer, output)
    raise typer.Exit(why_script(path, module, arguments, out, streams, show, budget_s))


def _print_answer(output: LongOutput, found: Why | None, folder: Path | None, hints: tuple[str, ...]) -> None:
    from profiler.report.blocks import Lines, Section
    from profiler.why_slow.render import why_document, why_sections

    if found is None:
        print(
            "roofscope: the script's own process called and loaded no language model, so there is nothing to"
            " explain; calls in other processes are not seen.",
            file=sys.stderr,
        )
    else:
        page = f"open {folder}/why.html"
        end = Section("", [Lines([f"next: {page}"] if folder else [])])
        output.answer(lambda: why_document(found), lambda: [*why_sections(found), end], page, sys.stderr)
    for hint in hints:
        print(hint, file=sys.stderr)


@contextlib.contextmanager
def _script_streams(*, to_stderr: bool) -> Iterator[None]:
    """Run a script with its own streams, or with its output on stderr, so that stdout has only the document."""
    if not to_stderr:
        yield
        sys.stdout.flush()
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


@asks()
def export(
    folder: Path = argument("A run folder.", "RUN"),
    kind: str = option("csv", "csv, md, json, parquet or latex.", flag="format"),
    out: Path | None = option(None, "File to write (default: stdout)."),
) -> None:
    """Write a run's tokens-per-second table."""
    from profiler.report.columns import EXPORTERS, tokens_table
    from profiler.store.folder import read_run, replace_file

    one_of(kind, "--format", EXPORTERS)
    content = EXPORTERS[kind](tokens_table(read_run(folder)))
    if out is not None:
        replace_file(out, content)
    elif kind == "parquet" and sys.stdout.isatty():
        raise RequestError("--format parquet is binary; name a file with --out.")
    else:
        sys.stdout.buffer.write(content)


@asks()
def judge(*, folder: Path = argument("A run folder.", "RUN"), output: LongOutput) -> None:
    """Judge a run again with the current rules, without torch.

    Reads the measurements in its folder, and writes run.json, cells.csv and operators.csv again. It draws nothing:
    `report` writes the pages.
    """
    from profiler.report.sections import run_sections
    from profiler.run.judge_folder import judge_folder

    judged = judge_folder(folder)
    output.answer(lambda: run_json(judged), lambda: run_sections(judged), f"roofscope judge {folder} --full")


@asks()
def report(folders: list[Path] = argument("Run folders.", "RUN...")) -> None:
    """Write the reports of runs again.

    Writes report.html with its pictures.
    """
    from profiler.report.html import write_report
    from profiler.store.folder import read_run

    for run in [read_run(folder) for folder in folders]:
        write_report(run)
        print(run.folder / "report.html")


@asks()
def plot(
    folders: list[Path] = argument("Run folders, then the picture.", "RUN... NAME"),
    out: Path | None = option(None, "PNG or SVG file (default: NAME.png in the run folder)."),
) -> None:
    """Draw a picture of one or several runs.

    Pictures: roofline, map, breakdown, throughput, doubling, waterfall, operators, memory.
    Of several runs only throughput.
    """
    from profiler.report.plots import draw, save_figure
    from profiler.store.folder import read_run

    *folders, last = folders
    if not folders:
        raise RequestError("plot needs a run folder and the name of a picture: roofscope plot RUN roofline.")
    if sentence := removed(f"plot {last}"):
        raise RequestError(sentence)
    path = out or folders[0] / f"{last}.png"
    save_figure(draw([read_run(folder) for folder in folders], str(last)), path)
    print(path)


@asks()
def explain(
    term: str | None = argument("A word of the reports, such as MBU.", default=None),
    run: Path | None = option(None, "Add this run's figures.", metavar="RUN"),
) -> None:
    """Explain a term of the reports; without a term, list all.

    With --run, the explanation has that run's figures.
    """
    from profiler.report import glossary, terminal
    from profiler.store.folder import read_run

    figures_of = read_run(run) if run is not None else None
    text = ", ".join(glossary.GLOSSARY) if term is None else glossary.explanation(term, figures_of)
    for line in text.splitlines():
        print(textwrap.fill(line, terminal.screen().width, break_on_hyphens=False))
