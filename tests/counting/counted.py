"""Counts of the presets as JSON. `python tests/counting/counted.py` writes the bundled file again."""

import json
from collections.abc import Sequence
from typing import Any

from profiler.counting.count import counted_on_meta
from profiler.counting.preset_counts import FILE, counts_json
from profiler.errors import RequestError
from profiler.loading.source import presets, resolve
from profiler.quant.registry import FORMATS, Quant


def documents(card: str, quants: Sequence[Quant] = FORMATS) -> dict[str, dict[str, Any]]:
    """Return the counts of a preset by format, for every format that it supports."""
    documents = {}
    for quant in quants:
        try:
            documents[quant] = counts_json(counted_on_meta(resolve(card), "auto", quant))
        except RequestError:  # no group of int4 divides every layer
            continue
        assert "coverage" not in documents[quant], "the walk understands every parameter"
    return documents


def rank_documents(card: str) -> dict[int, dict[str, Any] | str]:
    """Return the counts of the largest rank by number of ranks, or the reason why the preset cannot be split."""
    documents: dict[int, dict[str, Any] | str] = {}
    for ranks in SPLITS:
        try:
            documents[ranks] = counts_json(counted_on_meta(resolve(card), "auto", "none", ranks=ranks))
        except RequestError as error:
            documents[ranks] = str(error)
    return documents


def lines(name: str, formats: dict[str, dict[str, Any]], ranks: dict[int, dict[str, Any] | str]) -> str:
    """Return the JSON text with one operator per line, for readable diffs. Unchanged operators are numbers."""
    plain = formats["none"]
    model = {key: value for key, value in plain.items() if key not in _OF_A_FORMAT}
    of_formats = [_counts(quant, document, _OF_A_FORMAT, model, plain) for quant, document in formats.items()]
    of_ranks = [
        f" {json.dumps(str(count))}: {json.dumps(document)}"
        if isinstance(document, str)
        else _counts(str(count), document, _OF_A_RANK, model, plain)
        for count, document in ranks.items()
    ]
    listed, split = (",\n".join(parts) for parts in (of_formats, of_ranks))
    parts = f' "model": {json.dumps(model)}, "formats": {{\n{listed}\n}}, "ranks": {{\n{split}\n}}'
    return f"{json.dumps(name)}: {{\n{parts}}}"


SPLITS = (2, 4, 8)
_OF_A_FORMAT = ("weight_bytes", "published", "operators")
_OF_A_RANK = (*_OF_A_FORMAT, "params", "group_params")


def _counts(
    name: str, document: dict[str, Any], keys: Sequence[str], model: dict[str, Any], plain: dict[str, Any]
) -> str:
    """Return the differences of a format or a split from the published model."""
    own = {key: document[key] for key in keys}
    assert document == {**model, **own}
    operators = own.pop("operators")
    if document is not plain:
        operators = [plain["operators"].index(op) if op in plain["operators"] else op for op in operators]
    listed = ",\n".join(f"  {json.dumps(operator)}" for operator in operators)
    return f' {json.dumps(name)}: {{{json.dumps(own)[1:-1]}, "operators": [\n{listed}\n ]}}'


if __name__ == "__main__":
    FILE.write_text(
        "{\n" + ",\n".join(lines(name, documents(name), rank_documents(name)) for name in presets()) + "\n}\n",
        encoding="utf-8",
    )
