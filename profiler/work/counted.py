"""The cards' operators as the walk counted them, kept in counted.json: to place a file needs no library then.

torch and transformers take two seconds and a half to load, three times as long as to place 100,000 figures.
`python tests/work/counted.py` counts every card again and writes the file anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from profiler.work.attention import AttentionCore
from profiler.work.operators import Elementwise, Embedding, Experts, Linear, ModelWork, Operator
from profiler.work.stored import StoredWeight

FILE = Path(__file__).with_name("counted.json")

_KINDS: Mapping[str, type[Operator]] = {
    kind.__name__: kind for kind in (AttentionCore, Elementwise, Embedding, Experts, Linear)
}
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class _Dtype:
    """One of torch's dtypes, as far as counting asks of it."""

    name: str

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self.name]

    def __str__(self) -> str:
        return f"torch.{self.name}"


@cache
def counted(card: str) -> ModelWork | None:
    """The operators of a card in its own dtype and form; None where they are not kept."""
    kept = json.loads(FILE.read_text(encoding="utf-8")).get(card)
    return (
        None
        if kept is None
        else ModelWork(tuple(map(_operator, kept["operators"])), kept["params"], kept["params"], ())
    )


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
    return tuple(map(tuple, value)) if isinstance(value, list) else value
