"""The pages under docs/reference, rendered from the code: `python -m tests.docs.reference` writes them."""

import ast
import functools
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

import profiler
from profiler import rent, theory
from profiler.cli import compare
from profiler.cli import options as shared
from profiler.cli.app import app
from profiler.errors import RoofscopeError
from profiler.judge.cells import CellResult
from profiler.report.glossary import GLOSSARY
from profiler.store.operators_csv import OPERATOR_COLUMN_MEANINGS

from . import measured
from .schemas import TITLES, attribute_docs, docs_below, one_line, schema_text, schemas

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
SCHEMAS = FOLDER / "schemas"
_MADE = "<!-- Rendered from the code by `python -m tests.docs.reference`; do not edit. -->\n\n"


@functools.cache
def pages() -> dict[str, str]:
    return {name: _MADE + page() for name, page in PAGES.items()}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def described(kind: str, meanings: Mapping[str, str]) -> str:
    """Return a Markdown table of names and their meanings."""
    return table((kind, "what it is"), [(f"`{name}`", meaning) for name, meaning in meanings.items()])


def commands_page() -> str:
    """Return the page of all commands and exit codes; typer writes the part of each command."""
    commands: Any = typer.main.get_command(app)
    context = commands.make_context("roofscope", [], resilient_parsing=True)
    parts = ["# Commands\n\n`roofscope COMMAND --help` shows the same.\n\n"]
    summary = [(f"[`{name}`](#roofscope-{name})", one_line(each.help)) for name, each in commands.commands.items()]
    parts.append(table(("command", "what it does"), summary))
    parts.append(
        "\nThe [exit codes](#exit-codes) are at the end. Before any command: `--version` shows the version,"
        " `--debug` shows tracebacks, `--install-completion` lets a shell complete commands and presets.\n\n"
    )
    for each in commands.commands.values():
        parts.append(get_docs_for_click(obj=each, ctx=context, indent=1, call_prefix="roofscope"))
    return "".join(parts).replace("```console\n$ ", "```text\n").rstrip("\n") + "\n\n" + _exit_codes()


def columns_page() -> str:
    """Return the page of the columns of cells.csv and operators.csv, and of the schemas of JSON documents."""
    docs = attribute_docs(CellResult)
    cells = {item.name: docs.get(item.name, "") for item in fields(CellResult)}
    files = [(title, f"[{name}.json](schemas/{name}.json)") for name, title in TITLES.items()]
    return (
        "# Columns and JSON documents\n\nThe names end in the unit: `_s` seconds, `_bytes` bytes, `_flops` a count,"
        " `_per_s` a rate. An empty field is not known.\n\n"
        "## cells.csv\n\nOne row per phase and cell. The terms of the time breakdown add up to `latency_s`.\n\n"
        + described("column", cells)
        + "\n## operators.csv\n\nOne row per operator and cell.\n\n"
        + described("column", OPERATOR_COLUMN_MEANINGS)
        + "\n## JSON documents\n\n`--format json` prints one document on stdout; progress goes to stderr."
        " What is not known is `null`. A key that has a default in the schema may be left out.\n\n"
        "Each document has a [JSON Schema](https://json-schema.org), with the type and the meaning of each key.\n\n"
        + table(("document", "schema"), files)
    )


def _exit_codes() -> str:
    assert RoofscopeError.exit_code == shared.EXIT_WRONG
    docs = docs_below(ast.parse(inspect.getsource(shared)).body)
    codes = sorted((value, docs.get(name, "")) for name, value in vars(shared).items() if name.startswith("EXIT_"))
    gate = [(outcome, f"`{code}`") for outcome, code in compare._GATE_EXITS.items()]
    return (
        "## Exit codes\n\n"
        + table(("code", "meaning"), [("`0`", "Done."), *((f"`{code}`", meaning) for code, meaning in codes)])
        + "\n`roofscope why` ends with the exit code of the script it ran.\n\n### Of a gate\n\n"
        + table(("outcome", "code"), gate)
    )


def glossary_page() -> str:
    """Return the page of all terms of `explain`, in alphabetical order."""
    terms = sorted(GLOSSARY.items(), key=lambda item: item[0].lower())
    rows = [(name, f"{meaning[0].upper()}{meaning[1:]}") for name, meaning in terms]
    return (
        "# Glossary\n\n`roofscope explain TERM` prints the same; with `--run RUN` it adds that run's figures.\n\n"
        + table(("term", "meaning"), rows)
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


PAGES = {
    "commands.md": commands_page, "columns.md": columns_page, "glossary.md": glossary_page, "python.md": python_page,
}  # fmt: skip


def anchor(head: str) -> str:
    """Return a heading's anchor as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")


def main() -> None:
    SCHEMAS.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    measured.PAGE.write_text(measured.page(), encoding="utf-8")
    for old in SCHEMAS.glob("*.json"):
        old.unlink()
    for name in schemas():
        (SCHEMAS / f"{name}.json").write_text(schema_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
