"""How far a figure of a source not seen yet may deviate from a fit: Student's t, learned from the sources seen."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from profiler.stats import NORMAL_90, student_t

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
