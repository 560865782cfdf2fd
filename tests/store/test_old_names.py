"""A run of an older version is read by its old names: keys, columns and values."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from profiler.store.folder import read_run
from profiler.store.operators_csv import read_operators
from profiler.store.samples import read_facts_of

REFERENCE = Path(__file__).parents[2] / "runs/reference"
BEFORE_0_5 = {
    "slow-kernels": "kernel-bound", "above-ceiling": "above-roof", "int32 matmuls": "int32 products",
    "redundant_bytes_by_cause": "avoidable_bytes_by_cause", "redundant_flops_by_cause": "avoidable_flops_by_cause",
    "redundant_bytes": "avoidable_bytes", "redundant_s": "avoidable_s", "overhead_s": "dispatch_s",
    "changes": "levers", "repetitions": "visits", "ceiling": "roof", "ceiling_s": "roof_s",
}  # fmt: skip
"""What words were called in files before version 0.5."""


def test_old_keys_columns_and_values_are_those_of_today(tmp_path: Path) -> None:
    """A run of today with each of these words replaced by its old one is still the same run."""

    def content() -> list[Any]:
        run = read_run(folder)
        return [repr(read) for read in (run.results, run.document, read_operators(folder), read_facts_of(folder))]

    folder = Path(shutil.copytree(REFERENCE / "smollm2-135m-xeon-minute", tmp_path / "run"))
    today, replaced = content(), set()
    for name in ("run.json", "cells.csv", "operators.csv", "samples.jsonl"):
        text = (folder / name).read_text()
        for now, old in BEFORE_0_5.items():
            text, count = re.subn(rf'(?<=[",\n]){now}(?=[",\n])', old, text)
            replaced |= {(name, old)} if count else set()
        (folder / name).write_text(text)
    assert {("run.json", "levers"), ("cells.csv", "kernel-bound"), ("operators.csv", "roof_s")} <= replaced
    assert content() == today
