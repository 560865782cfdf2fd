"""The command line of options classes, the options that several commands share, and exit codes."""

from __future__ import annotations

import inspect
import shlex
import sys
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TextIO

import typer

from profiler.options import flag_of, one_of, option

if TYPE_CHECKING:
    from profiler.report.blocks import Section
    from profiler.report.progress import Listener

EXIT_WRONG = 1
"""A gate found something slower, or roofscope itself failed."""
EXIT_REQUEST = 2
"""The request was wrong (one line says what would work), or two runs are not comparable."""
EXIT_INCOMPLETE = 3
"""Finished, but some cells have no number or a part of the run failed; or a gate is inconclusive."""
EXIT_INTERRUPTED = 130
"""Interrupted: the measurements are saved, and `--resume` finishes the run."""


@dataclass(frozen=True)
class Output:
    """How a command prints its answer."""

    plain: bool = option(False, "No colours and no box drawing.")
    format: str = option("table", "table or json (one document on stdout).")

    formats: ClassVar[tuple[str, ...]] = ("table", "json")
    full = True
    """Whether all of a long answer is printed."""

    def __post_init__(self) -> None:
        one_of(self.format, "--format", self.formats)

    def answer(
        self,
        document: Callable[[], object],
        sections: Callable[[], Sequence[Section | None]],
        whole_by: str = "",
        screen_on: TextIO | None = None,
    ) -> None:
        """Print the JSON document, or the sections of the answer on the terminal (default: stdout).

        `whole_by` is the command that prints all of them (default: this one with --full, which measures nothing).
        """
        if self.format == "json":
            from profiler.json_document import json_text

            print(json_text(document()))
        else:
            from profiler.report.terminal import MOST_LINES, print_sections, screen

            whole_by = whole_by or shlex.join(["roofscope", *sys.argv[1:], "--full"])
            most_lines = None if self.full else MOST_LINES
            print_sections(sections(), screen(plain=self.plain, stream=screen_on), most_lines, whole_by)


@dataclass(frozen=True)
class LongOutput(Output):
    """How a command prints an answer that may be longer than a screen."""

    full: bool = option(False, "Print all of a long answer, not only its first screen.")


@dataclass(frozen=True)
class Progress:
    """What a command that measures prints meanwhile."""

    quiet: bool = option(False, "No progress.", short="-q")

    def listener(self, output: Output) -> Listener:
        """Return a bar on a terminal, plain lines elsewhere, or nothing; it is also a context manager."""
        from rich.console import Console

        from profiler.report.progress import BarListener, LineListener, Listener

        if self.quiet:
            return Listener()
        console = Console(stderr=True)
        return BarListener(console) if console.is_terminal and not output.plain else LineListener()


def asks(only: Collection[str] = (), **defaults: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: on the command line, a command takes the options in the classes that it takes.

    `only` names the fields that it takes of the first class (default: all), and `defaults` replaces defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints: dict[str, Any] = typing.get_type_hints(command)
        hints.pop("return")
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[Any, list[str]]] = {}
        for name, kind in hints.items():
            own = inspect.signature(command).parameters[name].default
            if is_dataclass(kind):
                taken = [item for item in fields(kind) if item.metadata and (groups or not only or item.name in only)]
                groups[name] = kind, [item.name for item in taken]
                kinds = typing.get_type_hints(kind)
                for item in taken:
                    parameters.append(_parameter(item, kinds[item.name], defaults.get(item.name, item.default)))
            elif isinstance(own, Field):  # an option of its own
                own.name = name
                parameters.append(_parameter(own, kind, own.default))
            else:  # typer.Context
                parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind))

        def from_command_line(**given: Any) -> None:
            made = {name: kind(**{each: given.pop(each) for each in names}) for name, (kind, names) in groups.items()}
            command(**made, **given)

        from_command_line.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        from_command_line.__doc__, from_command_line.__name__ = command.__doc__, command.__name__
        return from_command_line

    return decorate


def _parameter(item: Field[Any], kind: Any, default: object) -> inspect.Parameter:
    facts, kinds = item.metadata, typing.get_args(kind)
    if kinds and typing.get_origin(kind) is not list:  # the first type of a union is that of the command line
        kind = kinds[0] | None if type(None) in kinds else kinds[0]

    def completed(incomplete: str) -> list[str]:
        """Names that a shell completes; without any it completes files."""
        from profiler.loading.source import presets  # imported late: `--help` needs no presets

        return [name for name in presets() if facts["is_model"] and name.startswith(incomplete)]

    shared: dict[str, Any] = {
        "help": facts["help"],
        "metavar": facts["metavar"] or None,
        "show_default": facts["shown"] if facts["shown"] and default is item.default else True,
        "autocompletion": completed,
    }
    if facts["is_argument"]:
        information = typer.Argument(**shared)
    else:
        information = typer.Option(*filter(None, (flag_of(item), facts["short"])), **shared)
    return inspect.Parameter(
        item.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind, information],
    )
