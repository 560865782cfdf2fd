"""The cards' operators as JSON. `python tests/work/counted.py` writes the file that the package keeps anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from profiler.errors import RequestError
from profiler.job.count import model_work
from profiler.loading.catalog import card_names
from profiler.loading.quantise import QUANTS, Quant
from profiler.work.counted import FILE, as_json


def documents(card: str, quants: Sequence[Quant] = QUANTS) -> dict[str, dict[str, Any]]:
    """A card's operators in those formats that it can be had in, by the format; the walk understands all of them."""
    found = {}
    for quant in quants:
        try:
            found[quant] = as_json(model_work(card, quant=quant))
        except RequestError:  # no group of int4 divides every layer
            continue
        assert found[quant]["understood_params"] == found[quant]["params"]
    return found


def lines(name: str, formats: dict[str, dict[str, Any]]) -> str:
    """An operator a line, so that a change shows what it changed; one that is as published by its number there."""
    plain = formats["none"]["operators"]
    model = {key: value for key, value in formats["none"].items() if key != "operators"}
    parts = [f' "model": {json.dumps(model)}', _listed("none", plain)]
    for quant, document in formats.items():
        assert document == {**model, "operators": document["operators"]}
        if quant != "none":
            parts.append(_listed(quant, [plain.index(op) if op in plain else op for op in document["operators"]]))
    return f"{json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n}"


def _listed(quant: str, operators: list[Any]) -> str:
    return f" {json.dumps(quant)}: [\n" + ",\n".join(f"  {json.dumps(operator)}" for operator in operators) + "\n ]"


if __name__ == "__main__":
    FILE.write_text(
        "{\n" + ",\n".join(lines(name, documents(name)) for name in card_names()) + "\n}\n", encoding="utf-8"
    )
