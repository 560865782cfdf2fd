"""Time saved by one run compared with one process per cell: python tests/benchmarks/one_process_a_cell.py

Measures a whole grid in one run. Then it measures every cell in a separate process, which loads the model and warms up.
Each cell is measured for as long as in the grid, so both intervals are equally wide. Prints both times, both median
half-widths, and the ratio.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

PROMPT_LENS = (64, 128, 256, 512)
BATCH_SIZES = (1, 2, 4, 8)


def measure(folder: Path, prompts: str, batches: str, budget_s: float) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "profiler", "run", "smollm2-135m", "--prompt-lens", prompts]
    options = ["--batch-sizes", batches, "--budget", f"{budget_s:.1f}", "--out", str(folder), "--quiet"]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def half_width(folder: Path) -> float:
    cells = pd.read_csv(folder / "cells.csv")
    return float(((cells["latency_high_s"] - cells["latency_low_s"]) / 2 / cells["latency_s"]).median())


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        measure(root / "roofs", "64", "1", 1.0)  # the roofs are reused from here on, in both ways
        whole_s = measure(root / "whole", ",".join(map(str, PROMPT_LENS)), ",".join(map(str, BATCH_SIZES)), 70.0)
        records = [json.loads(line) for line in (root / "whole" / "samples.jsonl").read_text().splitlines()]
        spent: dict[tuple[int, int], float] = {}
        for record in records:
            if record["kind"] == "visit":
                cell = record["prompt_len"], record["batch_size"]
                extra = sum(record["warm_up_s"]) + sum(record["more_prefill_s"])
                spent[cell] = spent.get(cell, 0.0) + record["wall_s"] + extra
        apart_s, widths = 0.0, []
        for (prompt, batch), budget_s in spent.items():
            folder = root / f"{prompt}-{batch}"
            apart_s += measure(folder, str(prompt), str(batch), budget_s)
            widths.append(half_width(folder))
        print(f"one run:              {whole_s:6.1f} s, median half-width {100 * half_width(root / 'whole'):.1f} %")
        print(f"one process a cell:   {apart_s:6.1f} s, median half-width {100 * pd.Series(widths).median():.1f} %")
        print(f"ratio:                {whole_s / apart_s:6.2f}")


if __name__ == "__main__":
    main()
