"""The efficiency of engines, fitted to published figures, and each figure compared without its publisher."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

from profiler.data import FOLDER, published_results, rows_of
from profiler.data.datasheets import gpus
from profiler.data.published_results import MIXTURE, Coverage, EngineKind
from profiler.grid.cells import Phase
from profiler.predict.operator_arrays import Array
from profiler.predict.published_efficiency import CardSteps, Efficiency, Shares, family_of, host_index_of, peak_of
from profiler.stats import NORMAL_90, student_t

RANGE_SHARE = 0.9
"""Coverage of a range."""
STEP_KINDS = ("prefill", "one_sequence", "several_sequences")
"""The kinds of steps that differ in spread. Decoding one sequence streams weights, and published figures agree closely.
Decoding several also reads caches of lengths that sources seldom state, and prefills may run between the steps."""
_WITH_COPIES = 3
"""Bytes moved for a cache that is copied before it is read, in multiples of its size."""
_DENSE_COPY = 4
"""Bytes per weight that a dense copy in 16 bits writes and reads."""


@dataclass(frozen=True)
class _Model:
    model: str
    layers: int
    kv_elements_per_token: float
    routed_params: float = 0.0
    experts: int = 1
    experts_per_token: int = 1


@cache
def _models() -> dict[str, _Model]:
    return {row.model: row for row in rows_of("published_models.csv", _Model)}


@dataclass(frozen=True)
class PublishedFigure(published_results.PublishedFigure):
    """One published time of a model on a single card, with the work of its step."""

    bits: float
    """Bits per weight in that format, at the mean of what a step streams; without routed experts if these differ."""
    gpu: str
    """The row of gpus.csv."""
    phase: Phase
    latency_s: float
    source: str
    expert_bits: float = 0.0
    """Bits per weight of routed experts; 0: those of all weights."""
    prompt_len: int = 0
    """0 if the source does not say and the batch is 1, where its effect is negligible."""
    new_tokens: int = 0

    @property
    def _model(self) -> _Model:
        return _models()[self.model]

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
    def weight_bytes(self) -> float:
        """Bytes that a step streams: those of routed experts, if its tokens choose evenly and independently."""
        model = self._model
        unread = (1 - model.experts_per_token / model.experts) ** (self.batch * self.query_tokens)
        routed_bytes = model.routed_params * (1 - unread) * (self.expert_bits or self.bits) / 8
        return (self.weights - model.routed_params) * self.bits / 8 + routed_bytes

    @property
    def kv_bytes(self) -> float:
        """Bytes of the cache in 16 bits."""
        return 2 * self.batch * (self.context_len + self.query_tokens) * self._model.kv_elements_per_token

    @property
    def flops(self) -> float:
        """2 FLOPs per token and weight that multiplies it."""
        idle = self._model.routed_params * (1 - self._model.experts_per_token / self._model.experts)
        return 2 * (self.weights - idle) * self.batch * self.query_tokens

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


def steps_of(points: Sequence[PublishedFigure]) -> CardSteps:
    """The work of published figures on their GPUs, as their engines execute it.

    In each step, plain transformers read and write the whole cache once more than necessary, since a dynamic cache
    concatenates, and bitsandbytes may write dense copies of 16 bits and read them. `executed` counts a model the same
    way.
    """
    sheets = {sheet.gpu: sheet for sheet in gpus()}
    return CardSteps(
        np.array([point.flops for point in points]),
        np.array([point.weight_bytes for point in points]),
        np.array([_other_bytes(point) for point in points]),
        np.array([_unsure_bytes(point, sheets[point.gpu].l2_bytes or math.inf) for point in points]),
        np.array([point.layers for point in points], dtype=np.float64),
        np.array([peak_of(sheets[point.gpu], point.format) for point in points]),
        np.array([sheets[point.gpu].bandwidth_bytes_per_s for point in points]),
        np.array([sheets[point.gpu].rated_clock_hz for point in points]),
        np.array([host_index_of(sheets[point.gpu]) for point in points]),
        np.array([point.batch for point in points]),
    )


def _other_bytes(point: PublishedFigure) -> float:
    if point.kind != "eager":
        return point.kv_bytes
    return point.kv_bytes * _WITH_COPIES + (_DENSE_COPY * point.weights if writes_copies(point) else 0)


def _unsure_bytes(point: PublishedFigure, l2_bytes: float) -> float:
    """As `executed` counts them, with copies as large as the mean of seven linears per layer."""
    if writes_copies(point):
        return _DENSE_COPY * point.weights if 2 * point.weights / (7 * point.layers) <= l2_bytes else 0.0
    return point.weight_bytes if point.form == MIXTURE and point.batch * point.query_tokens > 1 else 0.0


def writes_copies(point: PublishedFigure) -> bool:
    """Whether bitsandbytes wrote dense copies of weights in 4 bits: before 0.50 for more than one row."""
    return point.format == "nf4" and point.batch * point.query_tokens > 1


_GRIDS = {
    "memory": np.geomspace(0.2, 1.0, 14),
    "compute": np.geomspace(0.2, 1.0, 28),
    "layer_s": np.geomspace(1e-4, 4e-3, 20),
    "layer_cycles": np.geomspace(3e4, 6e5, 16),
}
_FINER = np.geomspace(0.87, 1.15, 13)
"""Factors of a grid's best value for a second, finer grid; they span more than a step of the first."""
_PULL = 0.6
"""Weight of the prior: a share that is off by a factor of e costs as much as one GPU's points off by e**0.6."""
_PRIOR = {
    "eager": Shares(0.75, 0.60, layer_s=7e-4),
    "compiled": Shares(0.75, 0.60, layer_cycles=1e5),
    "llama.cpp": Shares(0.75, 0.60, layer_cycles=1e5),
}
"""The shares assumed without any point: what healthy GPUs reach in copies and large matmuls (gpus.csv).

Eager engines launch about 40 kernels per layer from Python, at 10 to 20 µs each. Graphs and C++ launch about ten
kernels per layer, which take 5 µs each to start and drain at 2 GHz. An engine is limited by one of the two, so the
other is 0."""


def fit_efficiency(points: Sequence[PublishedFigure], near: Shares) -> Shares:
    """The shares that fit published points best, starting from the prior `near`.

    They minimise the sum of |log(published / predicted)|, in which every GPU has the same weight, plus a penalty for
    the distance to `near`. The search is on a grid, then on a finer one around its best. Streaming and layer overhead
    are fitted together, since only the size of a model separates them.
    """
    work, log_s = steps_of(points), np.log([point.latency_s for point in points])
    points_per_gpu = Counter(point.gpu for point in points)
    weight = np.array([1 / points_per_gpu[point.gpu] for point in points])
    streaming = ("memory", "layer_s" if near.layer_s else "layer_cycles")

    def best_of(values: dict[str, Array], shares: Shares) -> Shares:
        axes = np.meshgrid(*values.values(), indexing="ij")
        candidates: dict[str, Any] = {name: axis.reshape(-1, 1) for name, axis in zip(values, axes, strict=True)}
        error = (weight * np.abs(log_s - np.log(replace(shares, **candidates).step_s(work)))).sum(axis=1)
        penalty = sum(_PULL * np.log(column[:, 0] / getattr(near, name)) ** 2 for name, column in candidates.items())
        best_index = np.argmin(error + penalty)
        return replace(shares, **{name: float(column[best_index, 0]) for name, column in candidates.items()})

    best = near
    for names in (streaming, ("compute",)):
        best = best_of({name: np.append(_GRIDS[name], getattr(best, name)) for name in names}, best)
    finer = {name: getattr(best, name) * _FINER for name in streaming}
    return best_of({**finer, "memory": np.minimum(finer["memory"], 1.0)}, best)


@cache
def shares_of(points: tuple[PublishedFigure, ...], kind: EngineKind, family: str) -> Shares:
    """The shares of an engine kind with a format family; the prior are those of dense weights."""
    prior = _PRIOR[kind] if family == "dense" else shares_of(points, kind, "dense")
    chosen = [point for point in points if point.kind == kind and family_of_point(point) == family]
    return fit_efficiency(chosen, prior) if chosen else prior


def family_of_point(point: PublishedFigure) -> str:
    return family_of(point.form, writes_copies(point))


@cache
def strays(points: tuple[PublishedFigure, ...], kind: EngineKind) -> dict[PublishedFigure, float]:
    """log(published / typical time) of every point of an engine kind, by a fit that left out its publisher."""
    deviations: dict[PublishedFigure, float] = {}
    kind_points = [point for point in points if point.kind == kind]
    for publisher in sorted({point.publisher for point in kind_points}):
        left_out = [point for point in kind_points if point.publisher == publisher]
        others = tuple(point for point in kind_points if point.publisher != publisher)
        for family in sorted({family_of_point(point) for point in left_out}):
            chosen = [point for point in left_out if family_of_point(point) == family]
            typical_s = shares_of(others, kind, family).step_s(steps_of(chosen)).tolist()
            pairs = zip(chosen, typical_s, strict=True)
            deviations |= {point: math.log(point.latency_s / step_s) for point, step_s in pairs}
    return deviations


@cache
def attained_by(points: tuple[PublishedFigure, ...], kind: EngineKind, family: str) -> Efficiency:
    """The efficiency of an engine kind with a format family, from `points` and their deviations."""
    ends: dict[str, float] = {}
    for kind_of_step in STEP_KINDS:
        ends[f"{kind_of_step}_low"], ends[f"{kind_of_step}_high"] = _spread(strays(points, kind), family, kind_of_step)
    return Efficiency(**vars(shares_of(points, kind, family)), kind=kind, family=family, **ends)


def fitted() -> list[Efficiency]:
    """The rows of published_efficiency.csv, computed from published.csv."""
    rows = []
    for kind in sorted({point.kind for point in published()}):
        families = {family_of_point(point) for point in published() if point.kind == kind}
        rows += [attained_by(published(), kind, family) for family in sorted(families)]
    return rows


def _step_kind(point: PublishedFigure) -> str:
    if point.phase == "prefill":
        return "prefill"
    return "one_sequence" if point.batch == 1 else "several_sequences"


def _spread(engine: Mapping[PublishedFigure, float], family: str, kind: str) -> tuple[float, float]:
    """Factors (low, high) of the typical time that cover nine in ten figures of publishers not seen.

    The spread of the engine's phase is narrowed to the family, then to the kind of step.
    """
    phase: Phase = "prefill" if kind == "prefill" else "decode"
    of_phase = [point for point in engine if point.phase == phase and (family == MIXTURE or point.form != MIXTURE)]
    of_family = [point for point in of_phase if family_of_point(point) == family]
    of_kind = [point for point in of_family if _step_kind(point) == kind]
    spread = NO_SOURCES
    for group in (of_phase, of_family, of_kind):
        spread = spread.narrowed((point.publisher, engine[point]) for point in group)
    low, high = spread.interval(RANGE_SHARE)
    return math.exp(min(low, 0.0)), math.exp(max(high, 0.0))


PRIOR_SOURCES = 3.0
"""A wider group of figures counts as at most this many sources of a narrower one."""


@dataclass(frozen=True)
class SourceSpread:
    """The distribution of log(published / typical) of one figure of one source: its mean and variance are uncertain.

    Figures of one source share its host, its versions and its way of measuring. So a source is one observation, however
    many figures it has.
    """

    mean: float
    variance: float
    """Variance among figures of different sources: between sources, and within one."""
    sources: float
    """The number of sources that mean and variance rest on."""

    def narrowed(self, deviations: Iterable[tuple[str, float]]) -> SourceSpread:
        """The spread after seeing (source, log ratio) of a narrower group of figures; itself if there is none.

        It is the conjugate posterior of a normal distribution whose mean and variance are unknown (Gelman et al.,
        Bayesian Data Analysis, 3rd ed., section 3.3), with one observation per source. Deviations within a source count
        by their mean square.
        """
        by_source: dict[str, list[float]] = defaultdict(list)
        for source, log_ratio in deviations:
            by_source[source].append(log_ratio)
        if not by_source:
            return self
        prior, seen = min(self.sources, PRIOR_SOURCES), len(by_source)
        mean = float(np.mean([np.mean(figures) for figures in by_source.values()]))
        squares = sum(float(np.mean((np.array(figures) - mean) ** 2)) for figures in by_source.values())
        between = prior * seen / (prior + seen) * (self.mean - mean) ** 2
        return SourceSpread(
            (prior * self.mean + seen * mean) / (prior + seen),
            (prior * self.variance + squares + between) / (prior + seen),
            prior + seen,
        )

    def interval(self, share: float) -> tuple[float, float]:
        """The central interval that contains `share` of the figures of sources not seen."""
        half = student_t(self.sources, share) * math.sqrt(self.variance * (1 + 1 / self.sources))
        return self.mean - half, self.mean + half


NO_SOURCES = SourceSpread(0.0, (math.log(2) / NORMAL_90) ** 2, 1.0)
"""The spread before any figure, as weak as one source: nine in ten within a factor of two, as calculators err."""


@dataclass(frozen=True)
class LeftOut:
    """A figure, compared with the range for its step that was fitted to the figures of other publishers."""

    point: PublishedFigure
    inside: bool
    width: float
    """The range's upper end / its lower end."""


@cache
def left_out() -> tuple[LeftOut, ...]:
    """Every figure once, if another publisher has figures of its engine kind, format and phase.

    Both the shares and the deviations that make the range are fitted without the figure's publisher.
    """
    results: list[LeftOut] = []
    for publisher in sorted({point.publisher for point in published()}):
        held_out = [point for point in published() if point.publisher == publisher]
        others = tuple(point for point in published() if point.publisher != publisher)
        covered = {(point.kind, point.form, point.phase) for point in others}
        for point in (point for point in held_out if (point.kind, point.form, point.phase) in covered):
            efficiency = attained_by(others, point.kind, family_of_point(point))
            span = efficiency.range_s(steps_of([point]), point.phase)
            low, high = float(span.low_s[0]), float(span.high_s[0])
            results.append(LeftOut(point, 0.999 * low <= point.latency_s <= 1.001 * high, high / low))
    return tuple(results)


def coverages_again() -> tuple[Coverage, ...]:
    """The rows of published_coverage.csv, computed from published.csv."""
    rows = []
    for kind, form, phase in sorted({(point.kind, point.form, point.phase) for point in published()}):
        figures = [point for point in published() if (point.kind, point.form, point.phase) == (kind, form, phase)]
        checked = [one for one in left_out() if one.point in figures]
        width = statistics.median(one.width for one in checked) if checked else 0.0
        publishers, inside = {point.publisher for point in figures}, sum(one.inside for one in checked)
        counts = (len(figures), len(publishers), len(checked), inside)
        rows.append(Coverage(kind, form, phase, *counts, round(width, 2)))
    return tuple(rows)


def main() -> None:
    """Write published_coverage.csv and published_efficiency.csv: `python -m tests.published_fit`."""
    tables: dict[type[Any], Sequence[Any]] = {Coverage: coverages_again(), Efficiency: fitted()}
    for kind, file_name in ((Coverage, "published_coverage.csv"), (Efficiency, "published_efficiency.csv")):
        with (FOLDER / file_name).open("w", encoding="utf-8", newline="") as file:
            columns = sorted((field.name for field in fields(kind)), key=lambda name: name not in ("kind", "family"))
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in tables[kind])


if __name__ == "__main__":
    main()
