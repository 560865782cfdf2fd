"""The command that explains a user's own script."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from profiler.cli.options import Format, Plain
from profiler.errors import RequestError

if TYPE_CHECKING:
    from profiler.why_slow.command import ScriptAnswer

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


def why_command(
    context: typer.Context,
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT.py [ITS ARGUMENTS]", help="Your script and its arguments.")
    ] = None,
    module: Annotated[str, typer.Option("-m", metavar="MODULE", help="Run a module instead of a file.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for why.json and why.html (default: under runs/).")] = None,
    budget_s: Annotated[
        float | None,
        typer.Option(
            "--budget",
            min=0.0,
            show_default=False,
            help="Most seconds for the answer (default: as long as the script took, at least 30, at most 300).",
        ),
    ] = None,
    plain: Plain = False,
    output_format: Format = "table",
) -> None:
    """Run your own script, and report why its models are slow.

    Names the lines to change, and the seconds that each change saves. The script is not modified.
    """
    if not module and script is None:
        raise RequestError("why needs a script: roofscope why SCRIPT.py [its arguments], or roofscope why -m MODULE.")
    from profiler.why_slow.command import why_script

    # With -m, what typer takes for the script is the module's first argument.
    arguments = [*([script] if module and script is not None else []), *context.args]
    path = None if module or script is None else Path(script)
    as_json = output_format == "json"
    print_answer = functools.partial(_print_answer, plain=plain, as_json=as_json)
    streams = _script_streams(to_stderr=as_json)
    raise typer.Exit(why_script(path, module, arguments, out, streams, print_answer, budget_s))


def _print_answer(answer: ScriptAnswer, *, plain: bool, as_json: bool) -> None:
    """Print the answer: a document on stdout, or a table on stderr, so that stdout is the script's."""
    from profiler.json_document import json_text
    from profiler.report.console import screen
    from profiler.why_slow.render import print_why, why_document

    if answer.why is None:
        print(
            "roofscope: the script's own process called and loaded no language model, so there is nothing to"
            " explain; calls in other processes are not seen.",
            *answer.hints,
            sep="\n",
            file=sys.stderr,
        )
    elif as_json:
        print(json_text(why_document(answer.why)))
    else:
        print_why(answer.why, screen(plain=plain, stream=sys.stderr))
        print(f"next: open {answer.folder}/why.html", file=sys.stderr)


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
