"""Published benchmark results, one row of published.csv per figure, and how often ranges contain unseen ones."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from profiler.data import rows_of
from profiler.units import percent, several

EngineKind = Literal["eager", "compiled", "llama.cpp"]
"""eager: transformers without changes; compiled: engines that compile, capture or fuse (vLLM, SGLang, gpt-fast,
torchao, TensorRT-LLM, TurboMind, ExLlamaV2, MLC, pegainfer)."""

MIXTURE = "mixture"
"""The form of mixtures of experts, whose figures are few and thus pooled over formats."""
_CACHE_BYTES = 2


@dataclass(frozen=True)
class _Model:
    model: str
    params: float
    looked_up_params: float
    layers: int
    kv_elements_per_token: float
    routed_params: float = 0.0
    """Those of the experts among which each token is routed; 0: not a mixture."""
    experts: int = 1
    experts_per_token: int = 1


@cache
def _models() -> dict[str, _Model]:
    return {row.model: row for row in rows_of("published_models.csv", _Model)}


@dataclass(frozen=True)
class PublishedFigure:
    """One published time of a model on a single card, with the work of its step."""

    kind: EngineKind
    model: str
    format: str
    """Storage format of the weights."""
    bits: float
    """Bits per weight in that format, at the mean of what a step streams; without routed experts if these differ."""
    gpu: str
    """The row of gpus.csv."""
    phase: Literal["prefill", "decode"]
    batch: int
    latency_s: float
    source: str
    expert_bits: float = 0.0
    """Bits per weight of routed experts; 0: those of all weights."""
    prompt_len: int = 0
    """0 if the source does not say and the batch is 1, where its effect is negligible."""
    new_tokens: int = 0

    @property
    def form(self) -> str:
        """What a range is of: a format, or mixtures of experts in any."""
        return MIXTURE if self._model.routed_params else self.format

    @property
    def query_tokens(self) -> int:
        return self.prompt_len if self.phase == "prefill" else 1

    @property
    def context_len(self) -> int:
        """Cached tokens in the middle of the timed steps."""
        return 0 if self.phase == "prefill" else self.prompt_len + self.new_tokens // 2

    @property
    def layers(self) -> int:
        return self._model.layers

    @property
    def weights(self) -> float:
        """All weights, without looked-up embeddings."""
        return self._model.params - self._model.looked_up_params

    @property
    def weight_bytes(self) -> float:
        """Bytes that a step streams: those of routed experts, if its tokens choose evenly and independently."""
        model = self._model
        unread = (1 - model.experts_per_token / model.experts) ** (self.batch * self.query_tokens)
        routed_bytes = model.routed_params * (1 - unread) * (self.expert_bits or self.bits) / 8
        return (self.weights - model.routed_params) * self.bits / 8 + routed_bytes

    @property
    def kv_bytes(self) -> float:
        """Bytes of the cache in 16 bits."""
        elements = self.batch * (self.context_len + self.query_tokens) * self._model.kv_elements_per_token
        return elements * _CACHE_BYTES

    @property
    def flops(self) -> float:
        """2 FLOPs per token and weight that multiplies it."""
        idle = self._model.routed_params * (1 - self._model.experts_per_token / self._model.experts)
        return 2 * (self.weights - idle) * self.batch * self.query_tokens

    @property
    def _model(self) -> _Model:
        return _models()[self.model]

    @property
    def publisher(self) -> str:
        """Who published it: the owner of the repository, or the host of the page; else the source itself.

        Figures of one publisher share hosts, versions and ways of measuring.
        """
        owner = re.match(r"github:([^/]+)|https://(?:huggingface\.co/datasets/)?([^/]+)", self.source)
        return (owner[1] or owner[2]) if owner else self.source


@cache
def published() -> tuple[PublishedFigure, ...]:
    return rows_of("published.csv", PublishedFigure)


def formats_of(kind: EngineKind) -> tuple[str, ...]:
    """The formats of which an engine kind has figures of models that are no mixtures, in the order of the table."""
    return tuple(dict.fromkeys(point.form for point in published() if point.kind == kind and point.form != MIXTURE))


ENGINE_WORDS: dict[EngineKind, str] = {
    "eager": "plain transformers",
    "compiled": "compiled engines",
    "llama.cpp": "llama.cpp",
}


@dataclass(frozen=True)
class Coverage:
    """The published figures of an engine kind, a form and a phase; each is compared with one range."""

    kind: EngineKind
    form: str
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
        sources, words = several(self.publishers, "source", "sources"), _words(self.kind, self.form)
        head = f"Basis of {self.phase}: {self.figures} published figures of {words}, {sources};"
        if not self.checked:
            return f"{head} no other source has any, so it is not known how often the range is right."
        inside = f"{self.inside} of them ({percent(self.inside / self.checked)})"
        return f"{head} {inside} are inside the range that the other sources give."


def _words(kind: EngineKind, form: str) -> str:
    if form == MIXTURE:
        return f"mixtures of experts in {ENGINE_WORDS[kind]}"
    return f"{ENGINE_WORDS[kind]} in {'16 bits' if form == 'dense' else form}"


@cache
def coverages() -> tuple[Coverage, ...]:
    """Return all rows of published_coverage.csv; `python -m tests.published_fit` computes them from published.csv."""
    return rows_of("published_coverage.csv", Coverage)


_DENSE_COPIES = (
    "Steps with dense copies of 4-bit weights are as in bitsandbytes up to 0.49; from 0.50 on, some GPUs multiply up to"
    " 64 rows and more without them, of which no figure is published."
)


def coverage_sentences(kind: EngineKind, form: str) -> tuple[str, ...]:
    """A sentence per phase: what is published of an engine kind and a form, and how often ranges contain it.

    4 bits of bitsandbytes have a third, on the kernels that these figures are of.
    """
    by_phase = {row.phase: row.sentence for row in coverages() if row.kind == kind and row.form == form}
    unknown = f"no published figure of {_words(kind, form)}; others of the engine give the range."
    sentences = tuple(by_phase.get(phase, f"Basis of {phase}: {unknown}") for phase in ("decode", "prefill"))
    return (*sentences, _DENSE_COPIES) if form == "nf4" else sentences
