"""JSON documents: a frozen dataclass per command, whose fields are the keys (schemas: docs/reference/schemas)."""

import json
import math
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar, cast

from pydantic import Field, PlainSerializer, TypeAdapter

_T = TypeVar("_T")

Finite = Annotated[
    float, PlainSerializer(lambda value: value if math.isfinite(value) else None, return_type=float | None)
]
"""A number that JSON has as null if it is infinite or unknown."""
HIDDEN = Field(exclude=True)
"""Annotates a field of a value that is not a key of its JSON."""


class Document:
    """A document of a command. A field that still has its default is left out."""


def view(kind: type[_T], source: object, **further: Any) -> _T:
    """Return a `kind` with the fields `further`, and all others from the attributes of `source` with the same names."""
    names = [item.name for item in fields(kind) if item.name not in further]  # type: ignore[arg-type]
    return kind(**{name: getattr(source, name) for name in names}, **further)


def dumped(value: object) -> dict[str, Any]:
    """Return a dataclass as pydantic dumps it, without fields that are `HIDDEN`."""
    return cast(dict[str, Any], TypeAdapter(type(value)).dump_python(value))


def json_text(document: object) -> str:
    """Return a document (or a list of them) as indented JSON. Raises TypeError for what JSON does not know."""
    return json.dumps(document, default=_as_json, indent=2)


def _as_json(value: Any) -> Any:
    if not is_dataclass(value):
        raise TypeError(f"{type(value).__name__} is not JSON")
    items = [(item, getattr(value, item.name)) for item in fields(value)]
    shortens = isinstance(value, Document)
    return {item.name: each for item, each in items if not (shortens and each == item.default)}
