"""The commands that read run folders: judge, export, report, plot, explain."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from profiler.cli.options import LongOutput, RunFolder, asks
from profiler.cli.removed import removed
from profiler.errors import RequestError
from profiler.options import argument, one_of, option


@dataclass(frozen=True)
class TableFile:
    """The file that `export` writes."""

    format: str = option("csv", "csv, md, json, parquet or latex.")
    out: Path | None = option(None, "File to write (default: stdout).")


@asks()
def export(run: RunFolder, file: TableFile) -> None:
    """Write a run's tokens-per-second table."""
    from profiler.report.columns import EXPORTERS, tokens_table
    from profiler.store.folder import read_run

    one_of(file.format, "--format", EXPORTERS)
    content = EXPORTERS[file.format](tokens_table(read_run(run.folder)))
    if file.out is None:
        if file.format == "parquet" and sys.stdout.isatty():
            raise RequestError("--format parquet is binary; name a file with --out.")
        sys.stdout.buffer.write(content)
        return
    from profiler.store.writer import replace_file

    replace_file(file.out, content)


@asks()
def judge(run: RunFolder, output: LongOutput) -> None:
    """Judge a run again with the current rules, without torch.

    Reads the measurements in its folder, and writes run.json, cells.csv and operators.csv again. It draws nothing:
    `report` writes the pages.
    """
    from profiler.cli.run import run_json
    from profiler.report.sections import run_sections
    from profiler.run.judge_folder import judge_folder

    judged = judge_folder(run.folder)
    output.answer(lambda: run_json(judged), lambda: run_sections(judged), f"roofscope judge {run.folder} --full")


@dataclass(frozen=True)
class RunFolders:
    """The runs that `report` reads."""

    folders: list[Path] = argument("Run folders.", "RUN...")


@asks()
def report(given: RunFolders) -> None:
    """Write the reports of runs again.

    Writes report.html with its pictures, and report.md.
    """
    from profiler.report.write import write_reports
    from profiler.store.folder import read_run

    for run in [read_run(folder) for folder in given.folders]:
        write_reports([run])
        print(run.folder / "report.html")


@dataclass(frozen=True)
class PictureOfRuns:
    """What `plot` draws, and its file."""

    folders: list[Path] = argument("Run folders, then the picture.", "RUN... NAME")
    out: Path | None = option(None, "PNG or SVG file (default: NAME.png in the run folder).")


@asks()
def plot(picture: PictureOfRuns) -> None:
    """Draw a picture of one or several runs.

    Pictures: roofline, map, split, throughput, doubling, waterfall, operators, memory. Of several runs only throughput.
    """
    from profiler.report.plots import save
    from profiler.store.folder import read_run

    *folders, last = picture.folders
    if not folders:
        raise RequestError("plot needs a run folder and the name of a picture: roofscope plot RUN roofline.")
    if sentence := removed(f"plot {last}"):
        raise RequestError(sentence)
    path = picture.out or folders[0] / f"{last}.png"
    save([read_run(folder) for folder in folders], str(last), path)
    print(path)


@dataclass(frozen=True)
class Term:
    """The term that `explain` explains."""

    term: str | None = argument("A word of the reports, such as MBU.", default=None)
    run: Path | None = option(None, "Add this run's figures.", metavar="RUN")


@asks()
def explain(asked: Term) -> None:
    """Explain a term of the reports; without a term, list all.

    With --run, the explanation has that run's figures.
    """
    from textwrap import fill

    from profiler.report.glossary import GLOSSARY, explanation
    from profiler.report.terminal import screen
    from profiler.store.folder import read_run

    run = read_run(asked.run) if asked.run is not None else None
    text = ", ".join(GLOSSARY) if asked.term is None else explanation(asked.term, run)
    for line in text.splitlines():
        print(fill(line, screen().width, break_on_hyphens=False))
