"""Published benchmark results, one row of published.csv per figure, and how often ranges contain unseen ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from profiler.data import rows_of
from profiler.units import percent

EngineKind = Literal["eager", "compiled", "llama.cpp"]
"""eager: transformers without changes; compiled: engines that compile, capture or fuse (vLLM, SGLang, gpt-fast,
torchao, TensorRT-LLM, TurboMind, ExLlamaV2, MLC, pegainfer)."""


_CACHE_BYTES = 2


@dataclass(frozen=True)
class _Model:
    """A row of published_models.csv."""

    model: str
    params: float
    looked_up_params: float
    layers: int
    kv_elements_per_token: float


@cache
def _models() -> dict[str, _Model]:
    return {row.model: row for row in rows_of("published_models.csv", _Model)}


@dataclass(frozen=True)
class PublishedFigure:
    """One published time of a model on a single card, with the work of its step."""

    kind: EngineKind
    engine: str
    model: str
    format: str
    """Storage format of the weights."""
    bits: float
    """Bits per weight in that format."""
    gpu: str
    """The row of gpus.csv."""
    phase: Literal["prefill", "decode"]
    batch: int
    latency_s: float
    source: str
    prompt_len: int = 0
    """0 if the source does not say and the batch is 1, where its effect is negligible."""
    new_tokens: int = 0
    host: str = ""
    date: str = ""

    @property
    def query_tokens(self) -> int:
        return self.prompt_len if self.phase == "prefill" else 1

    @property
    def context_len(self) -> int:
        """Cached tokens in the middle of the timed steps."""
        return 0 if self.phase == "prefill" else self.prompt_len + self.new_tokens // 2

    @property
    def layers(self) -> int:
        return _models()[self.model].layers

    @property
    def weight_bytes(self) -> float:
        """Bytes that a step streams."""
        return self._streamed_weights * self.bits / 8

    @property
    def kv_bytes(self) -> float:
        """Bytes of the cache in 16 bits."""
        elements = self.batch * (self.context_len + self.query_tokens) * _models()[self.model].kv_elements_per_token
        return elements * _CACHE_BYTES

    @property
    def flops(self) -> float:
        """2 FLOPs per streamed weight and token."""
        return 2 * self._streamed_weights * self.batch * self.query_tokens

    @property
    def _streamed_weights(self) -> float:
        return _models()[self.model].params - _models()[self.model].looked_up_params

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
    return rows_of("published.csv", PublishedFigure)


def formats_of(kind: EngineKind) -> tuple[str, ...]:
    """The formats of which an engine kind has published figures, in the order of the table."""
    return tuple(dict.fromkeys(point.format for point in published() if point.kind == kind))


ENGINE_WORDS: dict[EngineKind, str] = {
    "eager": "plain transformers",
    "compiled": "compiled engines",
    "llama.cpp": "llama.cpp",
}


@dataclass(frozen=True)
class Coverage:
    """The published figures of an engine kind, a format and a phase; each is compared with one range."""

    kind: EngineKind
    format: str
    phase: Literal["prefill", "decode"]
    figures: int
    publishers: int
    checked: int
    """The figures that can be compared with other sources: 0 if a single one has figures of this combination."""
    inside: int
    """The checked figures inside the range that the other sources give."""
    width: float
    """The upper end of these ranges / the lower end, at the median; 0 if none was checked."""

    @property
    def sentence(self) -> str:
        """What the ranges of this combination rest on, and how often they are right."""
        sources = "1 source" if self.publishers == 1 else f"{self.publishers} sources"
        words = _words(self.kind, self.format)
        head = f"Basis of {self.phase}: {self.figures} published figures of {words}, {sources};"
        if not self.checked:
            return f"{head} no other source has any, so it is not known how often the range is right."
        return (
            f"{head} {self.inside} of them ({percent(self.inside / self.checked)}) are inside the range that the other"
            " sources give."
        )


def _words(kind: EngineKind, format_: str) -> str:
    return f"{ENGINE_WORDS[kind]} in {'16 bits' if format_ == 'dense' else format_}"


@cache
def coverages() -> tuple[Coverage, ...]:
    """Return all rows of published_coverage.csv; `python -m tests.published_fit` computes them from published.csv."""
    return rows_of("published_coverage.csv", Coverage)


def coverage_sentences(kind: EngineKind, format_: str) -> tuple[str, ...]:
    """A sentence per phase: what is published of an engine kind and a format, and how often ranges contain it."""
    by_phase = {row.phase: row.sentence for row in coverages() if row.kind == kind and row.format == format_}
    return tuple(
        by_phase.get(
            phase,
            f"Basis of {phase}: no published figure of {_words(kind, format_)}; its other formats give the range.",
        )
        for phase in ("decode", "prefill")
    )
