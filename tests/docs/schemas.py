"""JSON Schemas of all JSON documents, from their types: `python -m tests.docs.reference` writes them."""

import ast
import functools
import inspect
import itertools
import json
import math
import textwrap
from typing import Any

from jsonschema import Draft202012Validator
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from profiler.checks.doctor import Examination
from profiler.comparison.command import ComparisonDocument, GateDocument
from profiler.count.grid import GridDocument
from profiler.counting.count import CountDocument
from profiler.facts.ceilings import Ceilings
from profiler.judge.cells import CellResult
from profiler.loading.source import Preset
from profiler.place.place import PlacedFile
from profiler.predict.result import ForecastDocument
from profiler.rent.command import RentDocument
from profiler.report.device import CeilingsContext, GpuEntry, LinkDocument
from profiler.store.document import RunDocument
from profiler.why_slow.render import WhyDocument

TYPES: dict[str, tuple[str, Any]] = {
    "run-folder": ("`run.json` in a run's folder", RunDocument),
    "compare": ("`compare A B`", ComparisonDocument),
    "gate": ("`gate`", GateDocument),
    "place": ("`place`", PlacedFile),
    "forecast": ("`forecast`", ForecastDocument),
    "rent": ("`rent`", RentDocument),
    "why": ("`why`, and `why.json`", WhyDocument),
    "count": ("`count`", CountDocument),
    "count-grid": ("`count` over a grid", GridDocument),
    "ceilings": ("`ceilings`", (Ceilings, CeilingsContext)),
    "ceilings-link": ("`ceilings --link`", LinkDocument),
    "doctor": ("`doctor`", Examination),
    "gpus": ("`gpus`", list[GpuEntry]),
    "models": ("`models`", dict[str, Preset]),
}
TITLES = {"run": "`run`, `batch-test`, `judge`", **{name: title for name, (title, _) in TYPES.items()}}
"""The source of each document, by the name of its schema."""


class _Documented(GenerateJsonSchema):
    """Adds the docstrings of classes and fields, and allows no other key."""

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        kind = schema["cls"]
        made = super().dataclass_schema(schema)
        made["description"] = one_line(inspect.getdoc(kind))
        made["additionalProperties"] = False
        for name, text in attribute_docs(kind).items():
            if name in made["properties"]:
                made["properties"][name]["description"] = text
        for item in made["properties"].values():
            item.pop("title", None)
            if isinstance(item.get("default"), float) and math.isnan(item["default"]):
                del item["default"]  # JSON has no NaN: unknown values are null
                item["anyOf"] = [{"type": item.pop("type")}, {"type": "null"}]
        return made


@functools.cache
def schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of every document by its name."""
    made = {name: _schema(kind) for name, (_, kind) in TYPES.items()}
    return {"run": _printed_run(made["run-folder"]), **made}


def schema_text(name: str) -> str:
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": TITLES[name].replace("`", "")}
    return json.dumps({**head, **schemas()[name], **head}, indent=1) + "\n"


def assert_follows(name: str, document: object) -> None:
    """Raises jsonschema's ValidationError if a parsed document does not follow its schema."""
    Draft202012Validator(schemas()[name]).validate(document)


def _schema(kind: Any) -> dict[str, Any]:
    """Return the schema of a type, or of a document with the fields of several types, none of which is left out."""
    if isinstance(kind, tuple):
        parts = [_schema(each) for each in kind]
        properties = {name: item for part in parts for name, item in part["properties"].items()}
        for item in properties.values():
            item.pop("default", None)
        defs = {name: item for part in parts for name, item in part.get("$defs", {}).items()}
        return {**parts[0], "$defs": defs, "properties": properties, "required": [*properties]}
    return TypeAdapter(kind).json_schema(mode="serialization", schema_generator=_Documented)


def _printed_run(run: dict[str, Any]) -> dict[str, Any]:
    """The document that `run` prints: run.json, its folder, and the rows of cells.csv."""
    cell = _schema(CellResult)
    more = {
        "folder": {"type": "string", "description": "The run's folder."},
        "cells": {"type": "array", "items": {"$ref": "#/$defs/CellResult"}, "description": "The rows of cells.csv."},
    }
    return {
        **run,
        "$defs": {**run["$defs"], **cell.pop("$defs", {}), "CellResult": cell},
        "properties": {**run["properties"], **more},
        "required": [*run["required"], *more],
    }


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def attribute_docs(kind: type) -> dict[str, str]:
    """Return the text below each attribute of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("profiler"):
            found |= docs_below(ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body)  # type: ignore[attr-defined]
    return found


def docs_below(statements: list[ast.stmt]) -> dict[str, str]:
    """Return the text below each attribute or constant."""
    found = {}
    for item, after in itertools.pairwise(statements):
        target = item.target if isinstance(item, ast.AnnAssign) else getattr(item, "targets", [None])[0]
        if isinstance(target, ast.Name) and isinstance(after, ast.Expr):
            found[target.id] = one_line(ast.literal_eval(after.value))
    return found
