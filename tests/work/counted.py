"""The cards' operators as JSON. `python tests/work/counted.py` writes the file that the package keeps anew."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

from profiler.job.count import model_work
from profiler.loading.catalog import card_names
from profiler.work.counted import FILE
from profiler.work.operators import ModelWork


def document(work: ModelWork) -> dict[str, Any]:
    """What is kept of a model that the walk understood whole."""
    assert (work.understood_params, work.unknown, work.not_run) == (work.params, (), ())
    operators = [{"kind": type(operator).__name__, **_values(operator)} for operator in work.operators]
    return {"params": work.params, "operators": operators}


def _values(value: Any) -> dict[str, Any]:
    return {item.name: _plain(item.name, getattr(value, item.name)) for item in fields(value)}


def _plain(name: str, value: Any) -> Any:
    if name.endswith("dtype"):
        return str(value).removeprefix("torch.")
    return _values(value) if is_dataclass(value) else value


def lines(documents: dict[str, dict[str, Any]]) -> str:
    """An operator a line, so that a change shows what it changed."""
    cards = []
    for name, kept in documents.items():
        operators = ",\n".join(f"  {json.dumps(operator)}" for operator in kept["operators"])
        cards.append(f'{json.dumps(name)}: {{"params": {kept["params"]}, "operators": [\n{operators}\n]}}')
    return "{\n" + ",\n".join(cards) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(lines({name: document(model_work(name)) for name in card_names()}), encoding="utf-8")
