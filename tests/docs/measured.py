"""The tables of docs/reference/measured.md: committed runs, and what others published, as shares of the ceiling."""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from profiler.data.datasheets import gpus
from profiler.data.published_results import ENGINE_WORDS, MIXTURE, PublishedFigure, published
from profiler.units import duration, percent, significant

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/measured.md"
_RUNS = {
    "mistral-7b-h200-default": "H200",
    "mistral-7b-h200-engines": "H200",
    "mistral-7b-h200-compile": "H200",
    "mistral-7b-nf4-h200": "H200",
    "mistral-7b-h100": "H100 SXM",
    "mistral-7b-h100-engines": "H100 SXM",
    "mistral-7b-h100-compile": "H100 SXM",
    "mistral-7b-nf4-h100": "H100 SXM",
    "smollm2-135m-h100": "H100 SXM",
    "smollm2-135m-xeon-minute": "Xeon with AMX, 2 cores",
    "smollm2-135m-xeon-bfloat16": "Xeon with AMX, 2 cores",
    "smollm2-135m-zen4": "EPYC (Zen 4), 2 cores",
    "smollm2-135m-zen5-float32": "EPYC (Zen 5), 2 cores",
    "mistral-7b-nf4-zen4": "EPYC (Zen 4), 2 cores",
}
"""The runs that are shown, and their devices in words. Of two runs of one kind the first counts."""
_LARGE = 6e9
"""Parameters from which published models are shown: on a large GPU a step of smaller ones is mostly overhead."""
_FORMATS = ("dense", "int8", "int8wo", "fp8", "nf4", "int4wo")


def page() -> str:
    """Return the page with its tables."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in {"runs": _table(_of_runs()), "published": _table(_of_others())}.items():
        mark = rf"(<!-- {name}: .*? -->\n\n\|.*\n\|.*\n)(?:\|.*\n)*"
        text, found = re.subn(mark, lambda at, rows=table: at[1] + rows, text)  # type: ignore[misc]
        assert found == 1, name
    return text


def share(figure: PublishedFigure) -> float:
    """Return a published decode step's share of the datasheet's bandwidth: bytes of weights and cache over its time."""
    bandwidth = {sheet.gpu: sheet.bandwidth_bytes_per_s for sheet in gpus()}[figure.gpu]
    return (figure.weight_bytes + figure.kv_bytes) / bandwidth / figure.latency_s


def _of_runs() -> Iterator[tuple[str, ...]]:
    """Each engine's decode step of one sequence at the shortest prompt, and the largest prefill of transformers."""
    seen = set()
    for name, device in _RUNS.items():
        folder = ROOT / "runs/reference" / name
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))["model"]
        model = "Mistral-7B" if name.startswith("mistral") else "SmolLM2-135M"
        weights = about["dtype"] if about["quant"] == "none" else about["quant"]
        with (folder / "cells.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["status"] == "ok" and row["noise"] != "unusable"]
        decodes = [row for row in rows if (row["phase"], row["batch_size"]) == ("decode", "1")]
        prefills = [row for row in rows if (row["phase"], row["engine"]) == ("prefill", "eager")]
        for row in sorted(decodes, key=_tokens) + sorted(prefills, key=_tokens)[-1:]:
            kind = (device, model, weights, row["engine"], row["phase"])
            if kind not in seen:
                seen.add(kind)
                step = f"{row['phase']} {row['batch_size']} x {row['prompt_len']}"
                rate, attained = float(row["tokens_per_s"]), float(row["attained"])
                yield (
                    *kind[:4], step, duration(float(row["latency_s"])), significant(rate),
                    f"{significant(100 * attained, 2)} %", row["regime"],
                )  # fmt: skip


def _tokens(row: dict[str, str]) -> int:
    return int(row["batch_size"]) * int(row["prompt_len"])


def _of_others() -> Iterator[tuple[str, ...]]:
    """Published decode steps of one sequence, of large dense models, where there are two figures and more of a kind."""
    groups = defaultdict(list)
    for figure in published():
        large = figure.weights >= _LARGE and figure.form != MIXTURE
        if large and (figure.phase, figure.batch) == ("decode", 1) and figure.format in _FORMATS:
            groups[figure.gpu, ENGINE_WORDS[figure.kind], figure.format].append(share(figure))
    for (gpu, engines, weights), shares in sorted(groups.items()):
        if len(shares) > 1:
            spread = map(percent, (min(shares), statistics.median(shares), max(shares)))
            yield gpu, engines, "16 bits" if weights == "dense" else weights, str(len(shares)), *spread


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
