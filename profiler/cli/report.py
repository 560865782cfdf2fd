"""The commands that read run folders: judge, export, report, plot, explain."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from profiler.cli.options import Format, Plain, one_of
from profiler.errors import RequestError


def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    output_format: Annotated[str, typer.Option("--format", help="csv, md, json, parquet or latex.")] = "csv",
    out: Annotated[Path | None, typer.Option(help="File to write (default: stdout).")] = None,
) -> None:
    """Write a run's tokens-per-second table."""
    from profiler.report.export import EXPORTERS, tokens_table
    from profiler.store.folder import read_run

    one_of(output_format, "--format", tuple(EXPORTERS))
    content = EXPORTERS[output_format](tokens_table(read_run(folder)))
    if out is None:
        if output_format == "parquet" and sys.stdout.isatty():
            raise RequestError("--format parquet is binary; name a file with --out.")
        sys.stdout.buffer.write(content)
        return
    from profiler.store.writer import replace_file

    replace_file(out, content)


def judge_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    plain: Plain = False,
    output_format: Format = "table",
) -> None:
    """Judge a run again with the current rules, without torch.

    Reads the measurements in its folder, and writes its reports again.
    """
    from profiler.report.write import write_reports
    from profiler.run.judge_folder import judge_folder

    run = judge_folder(folder)
    write_reports([run])
    if output_format == "json":
        from profiler.cli.run import run_json

        print(json.dumps(run_json(run), indent=2))
        return
    from profiler.report.console import screen
    from profiler.report.sections import print_run

    print_run(run, screen(plain=plain))


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
) -> None:
    """Write the reports and pictures of runs again.

    Writes report.html, report.md and PNG files; for two runs, also a page of what changed.
    """
    from profiler.comparison.command import compared
    from profiler.comparison.page import write_changes
    from profiler.report.write import write_reports
    from profiler.store.folder import read_run

    runs = [read_run(folder) for folder in folders]
    for run in runs:
        write_reports([run])
        print(run.folder / "report.html")
    if len(runs) == 2:
        try:
            compared(*folders, anyway=True)
            print(write_changes(*runs))
        except RequestError as reason:
            print(f"roofscope: there is no page of what changed, since {reason}", file=sys.stderr)


def plot(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN... NAME", help="Run folders, then the picture.")],
    out: Annotated[Path | None, typer.Option(help="PNG or SVG file (default: NAME.png in the run folder).")] = None,
) -> None:
    """Draw a picture of one or several runs.

    Pictures of a run: roofline, operators, split, map, intensity, throughput, depth, doubling, steps. Pictures of
    several: precisions, devices, waterfall.
    """
    from profiler.comparison import page  # noqa: F401 - it adds its picture
    from profiler.report.plots import save
    from profiler.store.folder import read_run

    *runs, last = folders
    name = str(last)
    if not runs:
        raise RequestError("plot needs a run folder and the name of a picture: roofscope plot RUN roofline.")
    path = out or runs[0] / f"{name}.png"
    save([read_run(folder) for folder in runs], name, path)
    print(path)


def explain_command(
    term: Annotated[str | None, typer.Argument(help="A word of the reports, such as MBU.", show_default=False)] = None,
    folder: Annotated[Path | None, typer.Option("--run", metavar="RUN", help="Add this run's figures.")] = None,
) -> None:
    """Explain a term of the reports; without a term, list all.

    With --run, the explanation has that run's figures.
    """
    from textwrap import fill

    from profiler.report.console import screen
    from profiler.report.glossary import GLOSSARY, explanation
    from profiler.store.folder import read_run

    run = read_run(folder) if folder is not None else None
    text = ", ".join(GLOSSARY) if term is None else explanation(term, run)
    for line in text.splitlines():
        print(fill(line, screen().width, break_on_hyphens=False))
