"""The pages under docs/reference, rendered from the code: `python -m tests.docs.reference` writes them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

import profiler
from profiler import rent, theory
from profiler.cli import compare
from profiler.cli import options as shared
from profiler.cli.app import app
from profiler.errors import RoofscopeError
from profiler.judge.cells import CellResult
from profiler.report.glossary import GLOSSARY
from profiler.store.operators_csv import OPERATOR_COLUMN_MEANINGS

from .schemas import TITLES, attribute_docs, constant_docs, one_line, schema_text, schemas

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
SCHEMAS = FOLDER / "schemas"
_MADE = "<!-- Rendered from the code by `python -m tests.docs.reference`; do not edit. -->\n\n"


@functools.cache
def pages() -> dict[str, str]:
    """Return every page by its file name."""
    return {name: _MADE + page() for name, page in PAGES.items()}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def described(kind: str, meanings: Mapping[str, str]) -> str:
    """Return a Markdown table of names and their meanings."""
    return table((kind, "what it is"), [(f"`{name}`", meaning) for name, meaning in meanings.items()])


def commands_page() -> str:
    """Return the page of all commands with their arguments and options, read from the command line itself."""
    root: Any = typer.main.get_command(app)
    context = root.make_context("roofscope", [], resilient_parsing=True)
    parts = ["# Commands\n\n`roofscope COMMAND --help` shows the same.\n\n"]
    parts.append(
        table(("command", "what it does"), [(f"[`{n}`](#{n})", one_line(c.help)) for n, c in root.commands.items()])
    )
    parts.append("\nBefore any command:\n\n" + _options(root, context))
    for name, command in root.commands.items():
        here = command.make_context(name, [], parent=context, resilient_parsing=True)
        usage = f"```text\nroofscope {name} {_usage(command, here)}\n```"
        parts.append(f"\n## {name}\n\n{one_line(command.help)}\n\n{usage}\n\n{_options(command, here)}")
    return "".join(parts)


def _options(command: Any, context: Any) -> str:
    rows = []
    for parameter in command.get_params(context):
        if parameter.param_type_name == "argument":
            rows.append((f"`{_placeholder(parameter)}`", "", one_line(parameter.help)))
        elif parameter.name != "help":
            names = ", ".join(f"`{name}`" for name in parameter.opts)
            rows.append((names, _default(parameter), one_line(parameter.help)))
    return table(("option", "default", "what it says"), rows)


def _placeholder(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _usage(command: Any, context: Any) -> str:
    """Return the usage line; optional arguments are in brackets."""
    arguments = [each for each in command.get_params(context) if each.param_type_name == "argument"]
    names = [(_placeholder(each), each.required) for each in arguments]
    return " ".join(
        ["[OPTIONS]", *(name if required or name.startswith("[") else f"[{name}]" for name, required in names)]
    )


def _default(parameter: Any) -> str:
    shown = parameter.show_default
    if isinstance(shown, str):
        return f"`{shown}`"
    value = parameter.default
    return "" if value is None or value is False or value == "" or callable(value) else f"`{value}`"


def columns_page() -> str:
    """Return the page of the columns of cells.csv and operators.csv, from the docstrings of their fields."""
    docs = attribute_docs(CellResult)
    cells = {item.name: docs.get(item.name, "") for item in fields(CellResult)}
    return (
        "# Columns\n\nThe names end in the unit: `_s` seconds, `_bytes` bytes, `_flops` a count, `_per_s` a rate."
        " An empty field is not known.\n\n"
        "## cells.csv\n\nOne row per phase and cell. The terms of the split add up to `latency_s`.\n\n"
        + described("column", cells)
        + "\n## operators.csv\n\nOne row per operator and cell.\n\n"
        + described("column", OPERATOR_COLUMN_MEANINGS)
    )


def exit_codes_page() -> str:
    """Return the page of the exit codes, general ones and those of each command."""
    assert RoofscopeError.exit_code == shared.EXIT_WRONG
    docs = constant_docs(shared)
    codes = sorted((value, docs.get(name, "")) for name, value in vars(shared).items() if name.startswith("EXIT_"))
    gate = [(outcome, f"`{code}`") for outcome, code in compare._GATE_EXITS.items()]
    return (
        "# Exit codes\n\n"
        + table(("code", "meaning"), [("`0`", "Done."), *((f"`{code}`", meaning) for code, meaning in codes)])
        + "\n`roofscope why` ends with the exit code of the script it ran.\n\n## gate\n\n"
        + table(("outcome", "code"), gate)
    )


def glossary_page() -> str:
    """Return the page of all terms of `explain`, in alphabetical order, each with an anchor."""
    terms = sorted(GLOSSARY.items(), key=lambda item: item[0].lower())
    entries = [f"\n## {name}\n\n{term.meaning[0].upper()}{term.meaning[1:]}\n" for name, term in terms]
    return (
        "# Glossary\n\n`roofscope explain TERM` prints the same; with `--run RUN` it adds that run's figures.\n"
        + "".join(entries)
    )


def python_page() -> str:
    """Return the page of the public functions and classes, whose docstrings mkdocstrings adds to the built pages."""
    public = [
        (f"{module.__name__}.{name}", getattr(module, name))
        for module in (profiler, theory, rent)
        for name in module.__all__
        if name != "__version__"
    ]
    meanings = {name: one_line(inspect.getdoc(thing)).split(". ")[0].rstrip(".") + "." for name, thing in public}
    details = [f"\n::: {name}\n" for name, _ in public]
    return (
        "# Python API\n\nThe distribution is called `roofscope`, the package `profiler`. These names are public; all"
        " others may change in any release.\n\n" + described("name", meanings) + "\n```python\nimport profiler\n\n"
        'run = profiler.profile("smollm2-135m", prompt_lens=[64], batch_sizes=[1, 2])\n'
        "run.answer  # the answer, one string per sentence\n"
        "run.cells  # a pandas DataFrame: one row per phase and cell\n"
        "again = profiler.read_run(run.folder)\n"
        "profiler.compare(run.folder, again.folder)  # a DataFrame: the change of each cell\n\n"
        "with profiler.why() as watching:  # what `roofscope why` does, around a part of your own program\n"
        "    model.generate(**prompt)\n"
        "watching.answer  # what to change, with the time that it saves\n"
        "watching.calls  # a DataFrame: one row per line, kind and settings of calls\n```\n\n"
        "In a notebook, `%load_ext profiler` registers `%%why`, which explains its cell and returns `watching`.\n"
        + "".join(details)
    )


TEN = {
    "RunDocument": "A run",
    "CellResult": "A cell of a run",
    "CellEvidence": "The evidence of a cell",
    "Lever": "A lever: a change, and what it saves",
    "Roof": "A roof",
    "Change": "A cell of two runs",
    "GateDocument": "A gate",
    "ForecastCell": "A cell of a forecast",
    "Offer": "A GPU to rent",
    "Finding": "A finding of why",
}
"""The objects that people use most, by their type: the headings of their page."""


def json_page() -> str:
    """Return the page of the documents' schemas, and of the keys of ten objects."""
    parts = [
        "# JSON documents\n\n`--format json` prints one document on stdout; progress goes to stderr."
        " What is not known is `null`. A key that has a default in the schema may be left out.\n\n## Schemas\n\n"
        "Each document has a [JSON Schema](https://json-schema.org), with the meaning of each key.\n\n",
        table(
            ("document", "schema"), [(title, f"[{name}.json](schemas/{name}.json)") for name, title in TITLES.items()]
        ),
        "\nThe tables below describe the ten objects that people use most.\n",
    ]
    types = object_schemas()
    for name, heading in TEN.items():
        about = types[name]
        rows = [
            (f"`{key}`", _kind(item, types), item.get("description", "")) for key, item in about["properties"].items()
        ]
        parts.append(f"\n## {heading}\n\n{about['description']}\n\n{table(('key', 'type', 'what it is'), rows)}")
    return "".join(parts)


def object_schemas() -> dict[str, dict[str, Any]]:
    """Return the schema of every type of object, by the type's name."""
    found: dict[str, dict[str, Any]] = {}
    for schema in schemas().values():
        found |= schema.get("$defs", {})
        if schema.get("type") == "object" and "title" in schema:
            found[schema["title"]] = schema
    return found


def _kind(item: Mapping[str, Any], types: Mapping[str, Any]) -> str:
    """Return a JSON type in words; types of the ten link to their tables."""
    if "$ref" in item:
        name = item["$ref"].rpartition("/")[2]
        return f"[object](#{anchor(TEN[name])})" if name in TEN else "object"
    if "anyOf" in item:
        return " or ".join(dict.fromkeys(_kind(one, types) for one in item["anyOf"]))
    if "enum" in item:
        return " or ".join(f"`{value}`" if value else "empty" for value in item["enum"])
    if item.get("type") == "array":
        inner = item.get("items") or {}
        return f"list of {_kind(inner, types)}" if inner else "list"
    if item.get("type") == "object":
        inner = item.get("additionalProperties")
        return f"{_kind(inner, types)} by name" if isinstance(inner, dict) else "object"
    words = {"string": "text", "boolean": "true or false"}
    return words.get(item.get("type", ""), item.get("type", ""))


PAGES = {
    "commands.md": commands_page, "columns.md": columns_page, "json.md": json_page, "exit-codes.md": exit_codes_page,
    "glossary.md": glossary_page, "python.md": python_page,
}  # fmt: skip


def anchor(head: str) -> str:
    """Return a heading's anchor as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")


def main() -> None:
    """Write the pages."""
    SCHEMAS.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    for old in SCHEMAS.glob("*.json"):
        old.unlink()
    for name in schemas():
        (SCHEMAS / f"{name}.json").write_text(schema_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
