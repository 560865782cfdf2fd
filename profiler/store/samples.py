"""samples.jsonl: every measured fact, one JSON object per line."""

import json
import pkgutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from profiler import facts
from profiler.errors import RunError
from profiler.facts.fact import Fact
from profiler.grid.cells import Cell
from profiler.store.old_names import content_now

SAMPLES_FILE = "samples.jsonl"

# A class of Fact registers its kind when its module is imported, and a folder may hold every kind.
for _module in pkgutil.iter_modules(facts.__path__, f"{facts.__name__}."):
    import_module(_module.name)

_LEFT = ("after_silence", "fresh_start", "queue", "ranks")
"""Kinds of facts that older versions stored and nothing reads any more; a tuple, since a damaged kind may be a list."""
_CELL = tuple(item.name for item in fields(Cell))
_adapter = cache(TypeAdapter)


def line_of(fact: Fact) -> str:
    """A fact as one line of JSON without a line end; the fields of its cell are keys of the object."""
    values = asdict(cast(Any, fact))
    key = values.pop("key", None)
    cell = key["cell"] if key else values.pop("cell", None)
    flat = {**({"phase": key["phase"]} if key else {}), **(cell or {})}
    return json.dumps({"kind": fact.KIND, **flat, **values}, allow_nan=False)


def fact_of(record: Mapping[str, Any]) -> Fact:
    """The fact of a parsed line. Raises ValidationError, KeyError or TypeError if the record is not a fact."""
    values = dict(record)
    kind: Any = Fact.kinds[values.pop("kind")]
    names = {item.name for item in fields(kind)}
    if "key" in names or "cell" in names:
        cell = {name: values.pop(name) for name in _CELL if name in values}
        if "key" in names:
            values["key"] = {"phase": values.pop("phase"), "cell": cell}
        else:
            values["cell"] = cell
    fact: Fact = _adapter(kind).validate_python(values)
    return fact


def read_facts_of(folder: Path) -> list[Fact]:
    """All facts of samples.jsonl. Raises RunError naming the first line that cannot be read."""
    facts = []
    try:
        file = (folder / SAMPLES_FILE).open("rb")
    except OSError:
        raise RunError(f"{folder} has no {SAMPLES_FILE}.") from None
    with file:
        for number, raw in enumerate(file, start=1):
            try:
                record = content_now(json.loads(raw))
            except (ValueError, RecursionError):
                raise RunError(f"{folder / SAMPLES_FILE}, line {number} is damaged.") from None
            if not isinstance(record, dict):
                raise RunError(f"{folder / SAMPLES_FILE}, line {number} is not a JSON object.")
            if record.get("kind") in _LEFT:
                continue
            try:
                facts.append(fact_of(record))
            except (ValidationError, KeyError, TypeError):
                raise RunError(f"{folder / SAMPLES_FILE}, line {number} is not a fact of a run.") from None
    return facts
