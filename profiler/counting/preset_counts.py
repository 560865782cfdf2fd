"""Counts of the bundled presets, kept in a file so that `rent` and `place` need not import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from profiler.counting.attention import AttentionCore
from profiler.counting.operators import (
    Convolution,
    Elementwise,
    Embedding,
    Experts,
    Linear,
    ModelWork,
    Operator,
    RecurrentState,
)
from profiler.facts.step import Attention, StoredWeight

FILE = Path(__file__).with_name("preset_counts.json")

_KINDS: Mapping[str, type[Operator]] = {
    kind.__name__: kind
    for kind in (AttentionCore, Convolution, Elementwise, Embedding, Experts, Linear, RecurrentState)
}


@dataclass(frozen=True)
class _Dtype:
    """One of torch's dtypes, as far as counting asks of it."""

    name: str

    @property
    def itemsize(self) -> int:
        """The bits that its name has, in bytes: `float8_e4m3fn`, `bfloat16`. Raises ValueError for another name."""
        bits = re.search(r"\d+", self.name)
        if bits is None:
            raise ValueError(f"{self.name} does not say its bits")
        return int(bits[0]) // 8

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True)
class CountedModel:
    """A model counted from its config alone."""

    work: ModelWork
    weight_bytes: int
    """Of all parameters and buffers as they will lie in memory, tied ones once."""
    dtype: str = "bfloat16"
    """The model's: of what no format packs."""
    published: str | None = None
    """The packed form that the weights are counted in, as published; None: dense, or in a format that was asked for."""
    attention: Attention = "sdpa"
    """What transformers runs unless told."""
    max_positions: int | None = None
    """Tokens of a sequence that the model was made for; None where its config does not say."""


@cache
def preset_counts(card: str, quant: str = "none") -> CountedModel | None:
    """A card in its own dtype, as published or in a format; None where it is not kept."""
    kept = json.loads(FILE.read_text(encoding="utf-8")).get(card, {"formats": {}})
    formats = kept["formats"]
    if quant not in formats:
        return None
    # What a format leaves as it is stands there by its number among the operators as published.
    plain = formats["none"]["operators"]
    operators = [plain[item] if isinstance(item, int) else item for item in formats[quant]["operators"]]
    return from_json({**kept["model"], **formats[quant], "operators": operators})


def from_json(kept: Mapping[str, Any]) -> CountedModel:
    """What `counts_json` made a document of."""
    values = _values({name: value for name, value in kept.items() if name not in _BESIDE})
    work = ModelWork(**{**values, "operators": tuple(map(_operator, kept["operators"]))})
    return CountedModel(work, **{name: kept[name] for name in _BESIDE})


def counts_json(model: CountedModel) -> dict[str, Any]:
    """The operators, what the walk did not understand, and the bytes, as plain values."""
    operators = [{"kind": type(operator).__name__, **_plain_fields(operator)} for operator in model.work.operators]
    beside = {name: getattr(model, name) for name in _BESIDE}
    return {**_plain_fields(model.work), **beside, "operators": operators}


_BESIDE = tuple(item.name for item in fields(CountedModel) if item.name != "work")


def _operator(kept: Mapping[str, Any]) -> Operator:
    return _KINDS[kept["kind"]](**_values(kept))


def _values(kept: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass: names of dtypes as dtypes, lists as tuples."""
    return {name: _value(name, value) for name, value in kept.items() if name != "kind"}


def _value(name: str, value: Any) -> Any:
    if name.endswith("dtype"):
        return _Dtype(value)
    if isinstance(value, dict):
        return StoredWeight(**_values(value))
    return (
        tuple(tuple(item) if isinstance(item, list) else item for item in value) if isinstance(value, list) else value
    )


def _plain_fields(value: Any) -> dict[str, Any]:
    return {
        item.name: _plain(item.name, getattr(value, item.name)) for item in fields(value) if item.name != "operators"
    }


def _plain(name: str, value: Any) -> Any:
    if name.endswith("dtype"):
        return str(value).removeprefix("torch.")
    return _plain_fields(value) if is_dataclass(value) else value
