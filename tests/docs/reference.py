"""The pages under docs/reference, rendered from the code: `python -m tests.docs.reference` writes them."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
import typer

import profiler
from profiler.cli import compare
from profiler.cli import options as shared
from profiler.cli.app import app
from profiler.errors import RoofscopeError
from profiler.judge.cells import CellResult
from profiler.report.glossary import GLOSSARY
from profiler.store.document import RunDocument
from profiler.store.operators_csv import OPERATOR_COLUMN_MEANINGS

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
_MADE = "<!-- Rendered from the code by `python -m tests.docs.reference`; do not edit. -->\n\n"
_DEEPEST = 4


@functools.cache
def pages() -> dict[str, str]:
    """Return every page by its file name."""
    rendered = {
        "commands.md": commands_page(),
        "columns.md": columns_page(),
        "json.md": json_page(),
        "exit-codes.md": exit_codes_page(),
        "glossary.md": glossary_page(),
        "python.md": python_page(),
    }
    return {name: _MADE + text for name, text in rendered.items()}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


# Commands


def commands_page() -> str:
    """Return the page of all commands with their arguments and options, read from the command line itself."""
    root: Any = typer.main.get_command(app)
    context = root.make_context("roofscope", [], resilient_parsing=True)
    parts = ["# Commands\n\n`roofscope COMMAND --help` shows the same.\n\n"]
    parts.append(table(("command", "what it does"), [(f"[`{n}`](#{n})", _text(c.help)) for n, c in _commands(root)]))
    parts.append("\nBefore any command:\n\n" + _options(root, context))
    for name, command in _commands(root):
        here = command.make_context(name, [], parent=context, resilient_parsing=True)
        usage = " ".join(["[OPTIONS]", *_arguments(command, here)])
        parts.append(f"\n## {name}\n\n{_text(command.help)}\n\n```text\nroofscope {name} {usage}\n```\n\n")
        parts.append(_options(command, here))
    return "".join(parts)


def command_names() -> tuple[str, ...]:
    """Return the names of all commands."""
    root: Any = typer.main.get_command(app)
    return tuple(root.commands)


def _commands(root: Any) -> list[tuple[str, Any]]:
    return list(root.commands.items())


def _options(command: Any, context: Any) -> str:
    rows = []
    for parameter in command.get_params(context):
        if parameter.param_type_name == "argument":
            rows.append((f"`{parameter.metavar or parameter.name.upper()}`", "", _text(parameter.help)))
        elif parameter.name != "help":
            names = ", ".join(f"`{name}`" for name in parameter.opts)
            rows.append((names, _default(parameter), _text(parameter.help)))
    return table(("option", "default", "what it says"), rows)


def _arguments(command: Any, context: Any) -> list[str]:
    """Return the arguments in the usage line; optional ones are in brackets."""
    found = []
    for parameter in command.get_params(context):
        if parameter.param_type_name == "argument":
            name = parameter.metavar or parameter.name.upper()
            found.append(name if parameter.required or name.startswith("[") else f"[{name}]")
    return found


def _default(parameter: Any) -> str:
    shown = parameter.show_default
    if isinstance(shown, str):
        return f"`{shown}`"
    value = parameter.default
    return "" if value is None or value is False or value == "" or callable(value) else f"`{value}`"


def _text(text: str | None) -> str:
    return " ".join((text or "").split())


# Columns


def columns_page() -> str:
    """Return the page of the columns of cells.csv and operators.csv, from the docstrings of their fields."""
    docs = attribute_docs(CellResult)
    cells = [(f"`{item.name}`", docs.get(item.name, "")) for item in fields(CellResult)]
    operators = [(f"`{name}`", meaning) for name, meaning in OPERATOR_COLUMN_MEANINGS.items()]
    return (
        "# Columns\n\nThe names end in the unit: `_s` seconds, `_bytes` bytes, `_flops` a count, `_per_s` a rate."
        " An empty field is not known.\n\n"
        "## cells.csv\n\nOne row per phase and cell. The terms of the split add up to `latency_s`.\n\n"
        + table(("column", "what it is"), cells)
        + "\n## operators.csv\n\nOne row per operator and cell.\n\n"
        + table(("column", "what it is"), operators)
    )


def attribute_docs(kind: type) -> dict[str, str]:
    """Return the text below each attribute of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("profiler"):
            continue
        body = _tree(base).body
        for item, after in itertools.pairwise(body):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(after, ast.Expr):
                found[item.target.id] = _text(ast.literal_eval(after.value))
    return found


# Exit codes


def exit_codes_page() -> str:
    """Return the page of the exit codes, general ones and those of each command."""
    constants = {name: value for name, value in vars(shared).items() if name.startswith("EXIT_")}
    docs = attribute_docs_of_module(shared)
    assert RoofscopeError.exit_code == shared.EXIT_WRONG
    rows = [
        ("`0`", "Done."),
        *((f"`{value}`", docs.get(name, "")) for name, value in sorted(constants.items(), key=_code)),
    ]
    gate = [(outcome, f"`{code}`") for outcome, code in compare._GATE_EXITS.items()]
    return (
        "# Exit codes\n\n"
        + table(("code", "meaning"), rows)
        + "\n`roofscope why` ends with the exit code of the script it ran.\n\n## gate\n\n"
        + table(("outcome", "code"), gate)
    )


def _code(item: tuple[str, int]) -> int:
    return item[1]


def attribute_docs_of_module(module: types.ModuleType) -> dict[str, str]:
    """Return the text below each constant of a module."""
    body = ast.parse(inspect.getsource(module)).body
    return {
        item.targets[0].id: _text(after.value.value)
        for item, after in itertools.pairwise(body)
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }


# Glossary


def glossary_page() -> str:
    """Return the page of all terms of `explain`, in alphabetical order, each with an anchor."""
    terms = sorted(GLOSSARY.items(), key=lambda item: item[0].lower())
    entries = [f"\n## {name}\n\n{term.meaning[0].upper()}{term.meaning[1:]}\n" for name, term in terms]
    return (
        "# Glossary\n\n`roofscope explain TERM` prints the same; with `--run RUN` it adds that run's figures.\n"
        + "".join(entries)
    )


# Python


def python_page() -> str:
    """Return the page of the public functions and classes, whose docstrings mkdocstrings adds to the built pages."""
    public = [(name, getattr(profiler, name)) for name in profiler.__all__ if name != "__version__"]
    rows = [
        (f"`profiler.{name}`", _text(inspect.getdoc(thing)).split(". ")[0].rstrip(".") + ".") for name, thing in public
    ]
    details = [f"\n::: profiler.{name}\n" for name, _ in public]
    return (
        "# Python API\n\nThe distribution is called `roofscope`, the package `profiler`. These names are public; all"
        " others may change in any release.\n\n"
        + table(("name", "what it is"), rows)
        + "\n```python\nimport profiler\n\n"
        'run = profiler.profile("smollm2-135m", prompt_lens=[64], batch_sizes=[1, 2])\n'
        "run.answer  # the answer, a list of sentences\n"
        "run.cells  # a pandas DataFrame: one row per phase and cell\n"
        "again = profiler.read_run(run.folder)\n"
        "profiler.compare(run.folder, again.folder)  # a DataFrame: the change of each cell\n\n"
        "with profiler.why() as watching:  # what `roofscope why` does, around a part of your own program\n"
        "    model.generate(**prompt)\n```\n" + "".join(details)
    )


# JSON


@dataclass(frozen=True)
class Key:
    """One key of a document: `cells[].latency_s`."""

    path: str
    kind: str
    meaning: str


def json_page() -> str:
    """Return the page of the keys of every document, from its types."""
    parts = [
        "# JSON documents\n\n`--format json` prints one document on stdout; progress goes to stderr. `[]` is a list,"
        " `{}` an object by name. What is not known is `null`.\n"
    ]
    for title, keys in documents().items():
        rows = [(f"`{key.path}`", key.kind, key.meaning) for key in {key.path: key for key in keys}.values()]
        parts.append(f"\n## {title}\n\n" + table(("key", "type", "what it is"), rows))
    return "".join(parts)


@functools.cache
def documents() -> dict[str, list[Key]]:
    """Return the keys of every document by its title."""
    from profiler.checks.doctor import Examination
    from profiler.checks.render import SelftestRow
    from profiler.comparison.documents import ComparisonDocument, GateDocument, HistoryDocument
    from profiler.counting.document import CountDocument
    from profiler.forecast.render import RanksDocument
    from profiler.loading.source import Card
    from profiler.place.render import PlaceDocument
    from profiler.rent.render import RentDocument
    from profiler.report.count_grid import GridDocument
    from profiler.report.device import CeilingsDocument, GpuEntry
    from profiler.report.forecast import ForecastDocument
    from profiler.report.link import LinkDocument
    from profiler.why_slow.render import WhyDocument

    types = {
        "compare A B": ComparisonDocument,
        "compare A B C ...": HistoryDocument,
        "gate": GateDocument,
        "place": PlaceDocument,
        "forecast": ForecastDocument,
        "forecast --tp": RanksDocument,
        "rent": RentDocument,
        "why, and why.json": WhyDocument,
        "count": CountDocument,
        "count over a grid": GridDocument,
        "ceilings": CeilingsDocument,
        "ceilings --link": LinkDocument,
        "doctor": Examination,
        "gpus: a list of": GpuEntry,
        "selftest: a list of": SelftestRow,
        "models: by the preset's name": Card,
    }
    return {
        "run.json": [key for key in _of_type(RunDocument, "", 0) if not key.path.endswith(".seconds")],
        "run, batch-test, judge": [
            Key("...", "", "everything of run.json, and"),
            Key("folder", "text", "The run folder."),
            Key("cells", "list", "The rows of cells.csv."),
            *_of_type(CellResult, "cells[].", 0),
        ],
        **{title: _of_type(kind, "", 0) for title, kind in types.items()},
    }


def _tree(thing: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def _hints(thing: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(thing, localns={"torch": torch})  # some import it only for types
    except (NameError, TypeError):
        return {}


def _shown(kind: Any) -> tuple[str, Any, str]:
    """Return a type's name in JSON, the dataclass within, and the text between the two paths."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = [item for item in inner if item is not type(None)]
        word, within, between = _shown(kinds[0])
        others = [_shown(item)[0] for item in kinds[1:]]
        both = " or ".join(dict.fromkeys(text for text in [word, *others] if text))
        return both + (" or null" if type(None) in inner else ""), within, between
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" if value else "empty" for value in inner), None, ""
    if isinstance(origin, type) and issubclass(origin, Mapping):
        _, within, between = _shown(inner[1])
        return "object by name", within, "{}" + between
    if isinstance(origin, type) and issubclass(origin, Sequence):
        _, within, between = _shown(inner[0])
        return "list", within, "[]" + between
    if is_dataclass(kind):
        return "object", kind, ""
    words = {str: "text", bool: "true or false", int: "integer", float: "number", Path: "text"}
    if isinstance(kind, type) and issubclass(kind, str):
        return "text", None, ""
    return words.get(kind, ""), None, ""


def _of_type(kind: Any, before: str, depth: int) -> list[Key]:
    """Return the keys of a dataclass as `asdict` writes it, or of a pydantic model."""
    docs, hints = attribute_docs(kind), _hints(kind)
    names = [item.name for item in fields(kind)] if is_dataclass(kind) else list(kind.model_fields)
    found = []
    for name in names:
        word, within, between = _shown(hints.get(name))
        found.append(Key(before + name, word, docs.get(name, "")))
        if within is not None and depth < _DEEPEST:
            found += _of_type(within, f"{before}{name}{between}.", depth + 1)
    return found


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
