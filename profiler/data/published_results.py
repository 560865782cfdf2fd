"""Published benchmark results: one row of published.csv per figure, with source and date."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

_TABLE = Path(__file__).with_name("published.csv")
_MODELS = Path(__file__).with_name("published_models.csv")

EngineKind = Literal["eager", "compiled", "llama.cpp"]
"""eager: transformers without changes; compiled: engines that compile, capture or fuse (vLLM, SGLang, gpt-fast,
torchao, TensorRT-LLM, TurboMind, ExLlamaV2, MLC, pegainfer)."""


@dataclass(frozen=True)
class PublishedFigure:
    """One published time of a model on a single card, with the work of its step."""

    kind: EngineKind
    engine: str
    model: str
    format: str
    """Storage format of the weights."""
    gpu: str
    """The row of gpus.csv."""
    phase: Literal["prefill", "decode"]
    batch: int
    query_tokens: int
    context_len: int
    """Cached tokens in the middle of the timed steps; 0 if the source does not say and the batch is 1, where their
    effect is negligible."""
    latency_s: float
    layers: int
    weight_bytes: float
    """Bytes that a step streams."""
    kv_bytes: float
    flops: float
    host: str
    date: str
    source: str

    @property
    def publisher(self) -> str:
        """Who published it: the owner of the repository, or the host of the page; else the source itself.

        Figures of one publisher share hosts, versions and ways of measuring.
        """
        owner = re.match(r"github:([^/]+)|https://(?:huggingface\.co/datasets/)?([^/]+)", self.source)
        return (owner[1] or owner[2]) if owner else self.source


@cache
def published() -> tuple[PublishedFigure, ...]:
    """Return all rows of published.csv."""
    with _MODELS.open(encoding="utf-8", newline="") as file:
        models = {row["model"]: row for row in csv.DictReader(file)}
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(_parse(row, models[row["model"]]) for row in csv.DictReader(file))


def formats_of(kind: EngineKind) -> tuple[str, ...]:
    """The formats of which an engine kind has published figures, in the order of the table."""
    return tuple(dict.fromkeys(point.format for point in published() if point.kind == kind))


_CACHE_BYTES = 2


def _parse(row: dict[str, str], model: dict[str, str]) -> PublishedFigure:
    """A row with its work: 2 FLOPs per streamed weight and token, and the cache in 16 bits."""
    phase: Literal["prefill", "decode"] = "prefill" if row["phase"] == "prefill" else "decode"
    batch, prompt = int(row["batch"]), int(row["prompt_len"] or 0)
    query = prompt if phase == "prefill" else 1
    context = prompt + int(row["new_tokens"] or 0) // 2 if phase == "decode" else 0
    streamed = float(model["params"]) - float(model["looked_up_params"])
    kind: EngineKind = "eager" if row["kind"] == "eager" else "compiled" if row["kind"] == "compiled" else "llama.cpp"
    return PublishedFigure(
        kind,
        row["engine"],
        row["model"],
        row["format"],
        row["gpu"],
        phase,
        batch,
        query,
        context,
        float(row["latency_s"]),
        int(model["layers"]),
        streamed * float(row["bits"]) / 8,
        batch * (context + query) * float(model["kv_elements_per_token"]) * _CACHE_BYTES,
        2 * streamed * batch * query,
        row["host"],
        row["date"],
        row["source"],
    )
