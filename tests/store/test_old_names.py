"""A run of an older version is read by its old names."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from profiler.store.folder import read_document, read_gathered, read_results
from profiler.store.operators_csv import read_operators

RUNS = Path(__file__).parents[2] / "runs/reference"
OLD = RUNS / "smollm2-135m-zen4"
NAMES = {
    "redundant_bytes": "avoidable_bytes", "redundant_bytes_by_cause": "avoidable_bytes_by_cause",
    "redundant_flops_by_cause": "avoidable_flops_by_cause", "redundant_s": "avoidable_s", "overhead_s": "dispatch_s",
    "ceiling_s": "roof_s", "repetitions": "visits", "changes": "levers", "slow-kernels": "kernel-bound",
    "above-ceiling": "above-roof", "int32 matmuls": "int32 products",
}  # fmt: skip
"""Keys, columns and values of today, and what 0.4.0 called them."""


def test_a_folder_with_the_names_before_0_5_has_those_of_today() -> None:
    assert '"dispatch_s"' in (OLD / "run.json").read_text()
    assert "avoidable_bytes_by_cause" in (OLD / "operators.csv").read_text().partition("\n")[0]
    document = read_document(OLD)
    assert document.ceilings.overhead_s["eager"]["decode"][1] > 0
    assert document.ceilings.weights is not None
    assert document.ceilings.weights.ceiling.per_s > 0
    operators = [operator for of_cell in read_operators(OLD).values() for operator in of_cell]
    assert any(operator.redundant_bytes for operator in operators)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a committed run with a flag and a cause of redundant work that it lacks."""
    copied = Path(shutil.copytree(RUNS / "mistral-7b-nf4-h100", tmp_path / "run"))
    document = json.loads((copied / "run.json").read_text())
    document["evidence"][0]["flags"] = ["above-ceiling"]
    (copied / "run.json").write_text(json.dumps(document))
    operators = (copied / "operators.csv").read_text()
    (copied / "operators.csv").write_text(operators.replace("masked scores", "int32 matmuls"))
    return copied


def test_each_old_name_of_a_key_a_column_or_a_value_is_read_as_that_of_today(folder: Path) -> None:
    def read() -> tuple[object, ...]:
        document = read_document(folder)
        return document, str(read_results(folder)), read_operators(folder), read_gathered(folder, document)

    now, used = read(), set()

    def old(found: re.Match[str]) -> str:
        used.add(found[0])
        return NAMES.get(found[0], found[0])

    for file in (folder / name for name in ("run.json", "samples.jsonl", "operators.csv", "cells.csv")):
        file.write_text(re.sub(r"(?<=[\",\n])[\w -]+(?=[\",\n])", old, file.read_text()))
    assert used >= NAMES.keys(), "each name is in a file"
    assert read() == now
