"""Counts of the presets in a bundled file, so that `rent`, `place` and `explore` do not import torch."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from profiler.counting import attention, operators
from profiler.counting.operators import ModelWork, Operator
from profiler.errors import RequestError
from profiler.facts.step import Attention, StoredWeight

FILE = Path(__file__).with_name("preset_counts.json")

_KINDS: Mapping[str, type[Operator]] = {
    name: kind
    for module in (attention, operators)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Operator)
}


@dataclass(frozen=True)
class Dtype:
    """The part of `torch.dtype` that counting uses."""

    name: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element, or of two of float4, from the bits in the name: `float8_e4m3fn`."""
        return max(1, int(re.findall(r"\d+", self.name)[0]) // 8)

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True)
class CountedModel:
    work: ModelWork
    weight_bytes: int
    """Bytes of all parameters and buffers in memory; tied ones count once."""
    dtype: str = "bfloat16"
    """The model's dtype, which weights have that no format packs."""
    published: str | None = None
    """The packed format of the published checkpoint, in which weights are counted; None: dense, or as requested."""
    attention: Attention = "sdpa"
    """transformers' default attention for the model."""
    max_positions: int | None = None
    """The longest sequence that the model supports, in tokens; None if its config does not say."""


@cache
def preset_counts(card: str, quant: str = "none", ranks: int = 1) -> CountedModel | None:
    """Return the counts of a preset by format or number of ranks, if the file has them. Raises RequestError."""
    preset = json.loads(FILE.read_text(encoding="utf-8")).get(card, {"formats": {}, "ranks": {}})
    counts = preset["formats"].get(quant) if ranks == 1 else preset["ranks"].get(str(ranks))
    if counts is None or (ranks > 1 and quant != "none"):
        return None
    if isinstance(counts, str):
        raise RequestError(counts)
    # A number refers to an operator as published, for operators that the format or the split does not change.
    published = preset["formats"]["none"]["operators"]
    listed = [published[item] if isinstance(item, int) else item for item in counts["operators"]]
    return from_json({**preset["model"], **counts, "operators": listed})


_MODEL_FIELDS = tuple(item.name for item in fields(CountedModel) if item.name != "work")


def from_json(document: Mapping[str, Any]) -> CountedModel:
    """Return the model of a document of `counts_json`."""
    work = {name: _value(name, value) for name, value in document.items() if name not in _MODEL_FIELDS}
    return CountedModel(ModelWork(**work), **{name: document[name] for name in _MODEL_FIELDS})


def counts_json(model: CountedModel) -> dict[str, Any]:
    """Return a counted model as a JSON document of its fields, and those of its `ModelWork` and its operators."""
    return {**_plain_fields(model.work), **{name: getattr(model, name) for name in _MODEL_FIELDS}}


def _value(name: str, value: Any) -> Any:
    if name.endswith("dtype"):
        return Dtype(value)
    if isinstance(value, list):
        return tuple(_value(name, item) for item in value)
    if not isinstance(value, dict):
        return value
    values = {key: _value(key, item) for key, item in value.items() if key != "operator"}
    return _KINDS[value["operator"]](**values) if "operator" in value else StoredWeight(**values)


def _plain_fields(value: Any) -> dict[str, Any]:
    # Each preset would name most defaults hundreds of times.
    return {
        item.name: _plain(item.name, each)
        for item in fields(value)
        if (each := getattr(value, item.name)) != item.default
    }


def _plain(name: str, value: Any) -> Any:
    if name.endswith("dtype"):
        return str(value).removeprefix("torch.")
    if isinstance(value, Operator):
        return {"operator": type(value).__name__, **_plain_fields(value)}
    if isinstance(value, tuple):
        return [_plain(name, item) for item in value]
    return _plain_fields(value) if is_dataclass(value) else value
