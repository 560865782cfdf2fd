"""A run of an older version is read by its old names."""

from __future__ import annotations

from pathlib import Path

from profiler.store.folder import read_document
from profiler.store.operators_csv import read_operators

OLD = Path(__file__).parents[2] / "runs/reference/smollm2-135m-zen4"


def test_a_folder_with_the_names_before_0_5_has_those_of_today() -> None:
    assert '"dispatch_s"' in (OLD / "run.json").read_text()
    assert "avoidable_bytes_by_cause" in (OLD / "operators.csv").read_text().partition("\n")[0]
    document = read_document(OLD)
    assert document.ceilings.overhead_s["eager"]["decode"][1] > 0
    assert document.ceilings.weights is not None
    assert document.ceilings.weights.ceiling.per_s > 0
    operators = [operator for of_cell in read_operators(OLD).values() for operator in of_cell]
    assert any(operator.redundant_bytes for operator in operators)
