"""The tables of docs/reference/measured.md: committed runs, and what others published, as shares of the ceiling."""

import csv
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from profiler.data.datasheets import gpu_called
from profiler.data.published_results import ENGINE_WORDS, MIXTURE
from profiler.units import duration, percent, significant
from tests.published_fit import PublishedFigure, published

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/measured.md"
_RUNS = (
    "mistral-7b-h200-default", "mistral-7b-h200-engines", "mistral-7b-h200-compile", "mistral-7b-nf4-h200",
    "mistral-7b-h100", "mistral-7b-h100-engines", "mistral-7b-h100-compile", "mistral-7b-nf4-h100", "smollm2-135m-h100",
    "smollm2-135m-xeon-minute", "smollm2-135m-xeon-bfloat16", "smollm2-135m-zen4", "mistral-7b-nf4-zen4",
    "smollm2-135m-zen5-float32",
)  # fmt: skip
"""The runs that are shown. Of two of one kind the first counts."""
_DEVICES = {"h200": "H200", "h100": "H100 SXM", "xeon": "Xeon with AMX, 2 cores", "zen4": "EPYC (Zen 4), 2 cores",
            "zen5": "EPYC (Zen 5), 2 cores"}  # fmt: skip
_LARGE = 6e9
"""Parameters from which published models are shown: on a large GPU a step of smaller ones is mostly overhead."""


def page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    for name, rows in {"runs": _of_runs(), "published": _of_others()}.items():
        table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        text = re.sub(rf"(<!-- {name}: .*? -->\n\n\|.*\n\|.*\n)(?:\|.*\n)*", lambda at, t=table: at[1] + t, text)
    return text


def share(figure: PublishedFigure) -> float:
    """Return a published decode step's share of the datasheet's bandwidth: bytes of weights and cache over its time."""
    bandwidth_bytes_per_s = gpu_called(figure.gpu).bandwidth_bytes_per_s
    return (figure.weight_bytes + figure.kv_bytes) / bandwidth_bytes_per_s / figure.latency_s


def _of_runs() -> Iterator[tuple[str, ...]]:
    """Each engine's decode step of one sequence at the shortest prompt, and the largest prefill of transformers."""
    seen = set()
    for name in _RUNS:
        folder = ROOT / "runs/reference" / name
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))["model"]
        device = next(words for part, words in _DEVICES.items() if part in name)
        model = "Mistral-7B" if name.startswith("mistral") else "SmolLM2-135M"
        weights = about["dtype"] if about["quant"] == "none" else about["quant"]
        with (folder / "cells.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["status"] == "ok" and row["noise"] != "unusable"]
        rows.sort(key=lambda row: int(row["batch_size"]) * int(row["prompt_len"]))
        decodes = [row for row in rows if (row["phase"], row["batch_size"]) == ("decode", "1")]
        prefills = [row for row in rows if (row["phase"], row["engine"]) == ("prefill", "eager")]
        for row in decodes + prefills[-1:]:
            kind = (device, model, weights, row["engine"])
            if (*kind, row["phase"]) not in seen:
                seen.add((*kind, row["phase"]))
                seconds, rate, attained = (float(row[key]) for key in ("latency_s", "tokens_per_s", "attained"))
                step = f"{row['phase']} {row['batch_size']} x {row['prompt_len']}"
                of_ceiling = f"{significant(100 * attained, 2)} %"
                yield *kind, step, duration(seconds), significant(rate), of_ceiling, row["regime"]


def _of_others() -> Iterator[tuple[str, ...]]:
    """Published decode steps of one sequence, of large dense models, where there are two figures and more of a kind."""
    groups = defaultdict(list)
    for figure in published():
        large = figure.weights >= _LARGE and figure.form != MIXTURE
        if large and (figure.phase, figure.batch) == ("decode", 1):
            groups[figure.gpu, ENGINE_WORDS[figure.kind], figure.format].append(share(figure))
    for (gpu, engines, weights), shares in sorted(groups.items()):
        if len(shares) > 1:
            spread = map(percent, (min(shares), statistics.median(shares), max(shares)))
            yield gpu, engines, weights.replace("dense", "16 bits"), str(len(shares)), *spread
