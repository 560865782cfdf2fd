"""Counts of the presets as JSON. `python tests/counting/counted.py` writes the bundled file again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from profiler.counting.meta import counted_on_meta
from profiler.counting.preset_counts import FILE, counts_json
from profiler.errors import RequestError
from profiler.loading.source import card_names, resolve
from profiler.quant.registry import FORMATS, Quant


def documents(card: str, quants: Sequence[Quant] = FORMATS) -> dict[str, dict[str, Any]]:
    """Return the counts of a preset by format, for every format that it supports."""
    documents = {}
    for quant in quants:
        try:
            documents[quant] = counts_json(counted_on_meta(resolve(card), "auto", quant))
        except RequestError:  # no group of int4 divides every layer
            continue
        assert documents[quant]["understood_params"] == documents[quant]["params"]
    return documents


def lines(name: str, formats: dict[str, dict[str, Any]]) -> str:
    """Return the JSON text with one operator per line, for readable diffs; an unchanged operator is its number."""
    plain = formats["none"]["operators"]
    model = {key: value for key, value in formats["none"].items() if key not in _OF_A_FORMAT}
    parts = []
    for quant, document in formats.items():
        own = {key: document[key] for key in _OF_A_FORMAT}
        assert document == {**model, **own}
        if quant != "none":
            own["operators"] = [plain.index(op) if op in plain else op for op in document["operators"]]
        parts.append(_format(quant, **own))
    listed = ",\n".join(parts)
    return f'{json.dumps(name)}: {{\n "model": {json.dumps(model)}, "formats": {{\n{listed}\n}}}}'


_OF_A_FORMAT = ("weight_bytes", "published", "operators")


def _format(quant: str, weight_bytes: int, published: str | None, operators: list[Any]) -> str:
    listed = ",\n".join(f"  {json.dumps(operator)}" for operator in operators)
    own = f'"weight_bytes": {weight_bytes}, "published": {json.dumps(published)}'
    return f' {json.dumps(quant)}: {{{own}, "operators": [\n{listed}\n ]}}'


if __name__ == "__main__":
    FILE.write_text(
        "{\n" + ",\n".join(lines(name, documents(name)) for name in card_names()) + "\n}\n", encoding="utf-8"
    )
