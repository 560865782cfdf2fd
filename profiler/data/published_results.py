"""Published benchmark results, one row of published.csv per figure, and how often ranges contain unseen ones."""

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


@dataclass(frozen=True)
class _Model:
    model: str
    params: float
    looked_up_params: float
    routed_params: float = 0.0
    """Those of the experts among which each token is routed; 0: not a mixture."""


@cache
def _models() -> dict[str, _Model]:
    return {row.model: row for row in rows_of("published_models.csv", _Model)}


@dataclass(frozen=True)
class PublishedFigure:
    """What a published time of a model on a single card is of; tests/published_fit.py has the rest of its row."""

    kind: EngineKind
    model: str
    format: str
    """Storage format of the weights."""
    batch: int

    @property
    def form(self) -> str:
        """What a range is of: a format, or mixtures of experts in any."""
        return MIXTURE if _models()[self.model].routed_params else self.format

    @property
    def weights(self) -> float:
        """All weights, without looked-up embeddings."""
        return _models()[self.model].params - _models()[self.model].looked_up_params


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
