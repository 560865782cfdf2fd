"""Options of a run, exit codes, and checks of choices that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from profiler.errors import RequestError, near_misses
from profiler.run.options import Options, flag_of

EXIT_WRONG = 1
"""A self-test found a wrong label, a gate found something slower, or roofscope itself failed."""
EXIT_REQUEST = 2
"""The request was wrong (one line says what would work), or two runs are not comparable."""
EXIT_INCOMPLETE = 3
"""Finished, but some cells have no number or a part of the run failed; or a gate or a self-test is inconclusive."""
EXIT_INTERRUPTED = 130
"""Interrupted: the measurements are saved, and `--resume` finishes the run."""


def one_of(value: str, option: str, known: tuple[str, ...]) -> None:
    """Raises RequestError with similar values if `value` is not in `known`."""
    if value not in known:
        raise RequestError(f"{option} {value!r} is unknown; use {', '.join(known)}.{near_misses(value, known)}")


def _table_or_json(value: str) -> str:
    one_of(value, "--format", ("table", "json"))
    return value


Plain = Annotated[bool, typer.Option("--plain", help="No colours and no box drawing.")]
Format = Annotated[
    str, typer.Option("--format", callback=_table_or_json, help="table or json (one document on stdout).")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]

Command = TypeVar("Command", bound=Callable[..., None])


def asks(
    *names: str, of: type[Any] = Options, defaults: Mapping[str, object] | None = None
) -> Callable[[Command], Command]:
    """Return a decorator that adds the named fields of the dataclass `of` (by default all) to a command's own options.

    They are fields of `run.options.option`, and come first. The command takes them as keywords; `defaults` replaces
    some of their defaults.
    """
    options = [item for item in fields(of) if item.name in names or not names]

    def decorate(command: Command) -> Command:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        shared = [_parameter(item, (defaults or {}).get(item.name, item.default)) for item in options]
        listed = sorted([*shared, *own], key=lambda parameter: parameter.name != "model")
        command.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(item: Field[object], default: object) -> inspect.Parameter:
    """Return a field of a command's options as a parameter for typer."""
    text, shown = item.metadata["help"], item.metadata.get("shown") or None
    if item.name == "model":
        information = typer.Argument(help=text)
    else:
        information = typer.Option(flag_of(item), help=text, show_default=shown or True)
    return inspect.Parameter(
        item.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[_kind(item, default), information],
    )


def _kind(item: Field[object], default: object) -> object:
    """Return the type of an option: that of its default, or text without a default."""
    if item.name == "out":
        return Path | None
    if default is not None:
        return type(default)
    return {"float | None": float | None, "int | None": int | None}.get(str(item.type), str | None)
