"""Gaussian-process surfaces through scattered points, each value with its standard deviation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler.predict.operator_arrays import Array

_LENGTH = 3.0
"""Octaves over which what a kernel loses stays alike: an eightfold of rows or keys is another kernel."""
_SPREADS = (0.02, 0.05, 0.1, 0.2, 0.4)
_NOISES = (0.003, 0.01, 0.02, 0.04, 0.08, 0.16)


@dataclass(frozen=True)
class Surface:
    """A Gaussian process with a constant mean (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006,
    equations 2.25, 2.26 and 2.41); far from every point it is that mean, and as unsure as the points differ."""

    points: Array
    """float[m, d], in octaves."""
    weights: Array
    """float[m]"""
    inverse: Array
    """float[m, m]"""
    mean: float
    spread: float
    noise: float

    def level(self, at: Array) -> Array:
        """The value [n] at the nearest point of the box that the points span: beyond it a surface stays level."""
        return self.value(np.clip(at, self.points.min(axis=0), self.points.max(axis=0)))[0]

    def value(self, at: Array) -> tuple[Array, Array]:
        """(value, standard deviation of a new measurement), each [n], at the points `at` [n, d]."""
        if not len(self.points):
            return np.full(len(at), self.mean), np.full(len(at), self.spread)
        cross = self.spread**2 * _alike(at, self.points)
        value = self.mean + cross @ self.weights
        known = np.einsum("ij,ij->i", cross @ self.inverse, cross)
        return value, np.sqrt(np.maximum(self.spread**2 - known, 0.0) + self.noise**2)


def surface(points: Array, values: Array, own_noise: Array) -> Surface:
    """The surface through `values` [m] at `points` [m, d], of which each is known to its own standard deviation.

    How much the surface varies and by how much two measurements of one point differ beyond `own_noise` is what makes
    the values likeliest (equation 2.30), over a coarse grid: there are few points.
    """
    if len(values) < 2:
        mean = float(values.mean()) if len(values) else 0.0
        return Surface(points, np.zeros(len(values)), np.eye(len(values)), mean, _SPREADS[-1], _NOISES[2])
    best: tuple[float, Surface] | None = None
    alike = _alike(points, points)
    ones = np.ones(len(values))
    for spread in _SPREADS:
        for noise in _NOISES:
            covariance = spread**2 * alike + np.diag(own_noise**2 + noise**2)
            inverse = np.linalg.inv(covariance)
            mean = float(ones @ inverse @ values / (ones @ inverse @ ones))
            apart = values - mean
            _, log_determinant = np.linalg.slogdet(covariance)
            likely = -0.5 * float(apart @ inverse @ apart) - 0.5 * float(log_determinant)
            if best is None or likely > best[0]:
                best = likely, Surface(points, inverse @ apart, inverse, mean, spread, noise)
    assert best is not None
    return best[1]


def _alike(left: Array, right: Array) -> Array:
    """exp(-d^2 / 2) with distances in lengths: [n, m]."""
    distance = sum((left[:, axis, None] - right[None, :, axis]) ** 2 for axis in range(left.shape[1]))
    return np.asarray(np.exp(-0.5 * np.asarray(distance) / _LENGTH**2))


_LEAST_LOST = 1e-3
"""A loss has a logarithm from this share of a time on."""
_LEAST_STEP = 1e-6
"""Two points differ by so much at the least: squared, of a logarithm."""


@dataclass(frozen=True)
class Line:
    """A time beyond its roof, over a size: through the points that were measured."""

    log_sizes: Array
    log_ratios: Array
    """log(time / roof) at each size."""
    log_lost: Array
    """log(seconds beyond the roof) at each size."""

    def seconds(self, sizes: Array, roof_s: Array) -> Array:
        """Seconds at `sizes` [n] whose roofs are `roof_s` [n], never below them.

        Between two points a kernel may keep its share of a roof that bends there, or the seconds that it loses,
        whatever the roof does: of the two that has more weight which differs less from point to point. Beyond all
        points it keeps its share.
        """
        at = np.log(np.maximum(sizes, 1))
        by_share = roof_s * np.maximum(np.exp(self.log_ratio(sizes)) - 1, _LEAST_LOST)
        by_loss = np.exp(np.interp(at, self.log_sizes, self.log_lost))
        if len(self.log_sizes) < 2:
            return np.asarray(roof_s + by_share)
        steps = np.diff(self.log_ratios) ** 2, np.diff(self.log_lost) ** 2
        weights = (steps[0] + _LEAST_STEP) / (steps[0] + steps[1] + 2 * _LEAST_STEP)
        segment = np.clip(np.searchsorted(self.log_sizes, at) - 1, 0, len(weights) - 1)
        inside = (at >= self.log_sizes[0]) & (at <= self.log_sizes[-1])
        loss_weighs = np.where(inside, weights[segment], 0.0)
        return np.asarray(roof_s + by_share ** (1 - loss_weighs) * by_loss**loss_weighs)

    def log_ratio(self, sizes: Array) -> Array:
        """log(time / roof) at `sizes` [n], straight between the points and level beyond them."""
        return np.asarray(np.interp(np.log(np.maximum(sizes, 1)), self.log_sizes, self.log_ratios))


def line(sizes: Array, seconds: Array, roof_s: Array) -> Line:
    """The line through points of which several may share a size: their median holds."""
    unique = np.unique(sizes)
    ratios = np.log(seconds / roof_s)
    lost = np.log(np.maximum(seconds - roof_s, _LEAST_LOST * seconds))
    ratios, lost = (np.array([np.median(of[sizes == size]) for size in unique]) for of in (ratios, lost))
    return Line(np.log(np.maximum(unique, 1)), ratios, lost)
