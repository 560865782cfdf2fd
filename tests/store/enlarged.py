"""A run folder with any number of cells, made from a real run: its roofs and operators, with every cell visited."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

_CELL_FACTS = {"visit", "replay", "trial", "predicted_peaks", "readings"}
_STEPS = 8
_GAP_S = 10.0
"""Seconds from one visit to the next."""


def enlarge(source: Path, folder: Path, batches: int, prompts: int) -> Path:
    """Write a run of the batches 1, 2, ... and the prompts 8, 16, ... into `folder`, and return it.

    Each cell has one visit and three telemetry readings. A step's time, work and memory grow with its batch and prompt,
    and each operator is one of the source's.
    """
    folder.mkdir(parents=True)
    batch_sizes, prompt_lens = [*range(1, batches + 1)], [*range(8, 8 * prompts + 1, 8)]
    document = json.loads((source / "run.json").read_text())
    document["grid"] |= {"batch_sizes": batch_sizes, "prompt_lens": prompt_lens, "new_tokens": _STEPS}
    (folder / "run.json").write_text(json.dumps(document))
    (folder / "config.json").write_text((source / "config.json").read_text())
    cells = [(batch, prompt) for prompt in prompt_lens for batch in batch_sizes]
    with (folder / "samples.jsonl").open("w") as file:
        for fact in _facts((source / "samples.jsonl").read_text(), cells, batch_sizes):
            file.write(json.dumps(fact) + "\n")
    (folder / "operators.csv").write_text(_operators((source / "operators.csv").read_text(), cells))
    return folder


def _facts(source: str, cells: list[tuple[int, int]], batch_sizes: list[int]) -> list[dict[str, Any]]:
    facts = [json.loads(line) for line in source.splitlines()]
    visit = next(fact for fact in facts if fact["kind"] == "visit")
    reading = next(fact for fact in facts if fact["kind"] == "readings")["readings"][0]
    records = [fact for fact in facts if fact["kind"] not in {*_CELL_FACTS, "dispatch"}]
    for phase in ("prefill", "decode"):
        first = next(fact for fact in facts if fact["kind"] == "dispatch" and fact["phase"] == phase)
        records += [first | {"batch_size": batch} for batch in batch_sizes]
    shape = {"new_tokens": _STEPS, "context_len": 0, "engine": visit["engine"]}
    peaks = [
        {"cell": {"batch_size": batch, "prompt_len": prompt, **shape}, "peak_bytes": 10**9 + 10**5 * batch * prompt}
        for batch, prompt in cells
    ]
    records.append({"kind": "predicted_peaks", "peaks": peaks})
    for number, (batch, prompt) in enumerate(cells):
        at_s, step_s = 1.7e9 + _GAP_S * number, 30e-3 + 1e-4 * batch + 1e-6 * batch * prompt
        times = {
            "prefill_s": 20e-3 + 1e-3 * batch * prompt,
            "more_prefill_s": [],
            "decode_s": [step_s, 1.01 * step_s, 0.99 * step_s] * 2 + [step_s],
            "wall_s": 0.9 * _GAP_S,
            "at_unix_s": at_s,
        }
        records.append(visit | shape | {"batch_size": batch, "prompt_len": prompt, "round": 0} | times)
        readings = [reading | {"at_unix_s": at_s + third * _GAP_S / 3} for third in range(3)]
        records.append({"kind": "readings", "readings": readings})
    return records


def _operators(source: str, cells: list[tuple[int, int]]) -> str:
    rows = list(csv.DictReader(io.StringIO(source)))
    text = io.StringIO()
    table = csv.DictWriter(text, rows[0].keys())
    table.writeheader()
    for phase in ("prefill", "decode"):
        phase_rows = [row for row in rows if row["phase"] == phase]
        first_cell = {name: phase_rows[0][name] for name in ("batch_size", "prompt_len", "context_len")}
        operators = [row for row in phase_rows if all(row[name] == value for name, value in first_cell.items())]
        for batch, prompt in cells:
            context_len = prompt + _STEPS // 2 if phase == "decode" else 0
            cell = {"batch_size": batch, "prompt_len": prompt, "new_tokens": _STEPS, "context_len": context_len}
            for row in operators:
                work = {name: int(row[name]) * batch for name in ("flops", "kv_bytes", "activation_bytes")}
                table.writerow(row | cell | work | {"replayed_s": "", "dequantise_s": ""})
    return text.getvalue()
