"""The command that explains a user's own script."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from profiler.cli.options import LongOutput, asks
from profiler.errors import RequestError
from profiler.options import argument, option

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


SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""Arguments after the script belong to the script."""


@dataclass(frozen=True)
class Script:
    """The script that `why` runs, and its answer's folder."""

    script: str | None = argument("Your script and its arguments.", "SCRIPT.py [ITS ARGUMENTS]", default=None)
    module: str = option("", "Run a module instead of a file.", flag="-m", metavar="MODULE")
    out: Path | None = option(None, "Folder for why.json and why.html (default: under runs/).")
    budget_s: float | None = option(
        None,
        "Most seconds for the answer (default: as long as the script took, at least 30, at most 300).",
        flag="budget",
    )

    def __post_init__(self) -> None:
        if not self.module and self.script is None:
            raise RequestError(
                "why needs a script: roofscope why SCRIPT.py [its arguments], or roofscope why -m MODULE."
            )
        if self.budget_s is not None and not self.budget_s >= 0:
            raise RequestError(f"--budget {self.budget_s:g} is not possible; give seconds of 0 or more.")


@asks()
def why(context: typer.Context, given: Script, output: LongOutput) -> None:
    """Run your own script, and report why its models are slow.

    Names the lines to change, and the seconds that each change saves. The script is not modified.
    """
    from profiler.why_slow.command import why_script

    # With -m, what typer takes for the script is the module's first argument.
    arguments = [*([given.script] if given.module and given.script is not None else []), *context.args]
    path = None if given.module or given.script is None else Path(given.script)
    streams = _script_streams(to_stderr=output.format == "json")
    show = functools.partial(_print_answer, output)
    raise typer.Exit(why_script(path, given.module, arguments, given.out, streams, show, given.budget_s))


def _print_answer(output: LongOutput, found: Why | None, folder: Path | None, hints: tuple[str, ...]) -> None:
    """Print the answer: a document on stdout, or a table on stderr, so that stdout is the script's."""
    from profiler.json_document import json_text
    from profiler.report.blocks import Lines, Section
    from profiler.report.terminal import print_sections, screen
    from profiler.why_slow.render import why_document, why_sections

    if found is None:
        print(
            "roofscope: the script's own process called and loaded no language model, so there is nothing to"
            " explain; calls in other processes are not seen.",
            file=sys.stderr,
        )
    elif output.format == "json":
        print(json_text(why_document(found)))
    else:
        page = Section("", [Lines([f"next: open {folder}/why.html"] if folder else [])])
        console = screen(plain=output.plain, stream=sys.stderr)
        print_sections([*why_sections(found), page], console, output.most_lines)
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
