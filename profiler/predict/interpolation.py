"""Interpolate kernel times: Gaussian-process surfaces over scattered points, and lines over one size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler.predict.operator_arrays import Array

_LENGTH = 3.0
"""Length scale in octaves: over eight times as many rows or keys, a kernel's loss is hardly correlated."""
_SPREADS = (0.02, 0.05, 0.1, 0.2, 0.4)
_NOISES = (0.003, 0.01, 0.02, 0.04, 0.08, 0.16)


@dataclass(frozen=True)
class Surface:
    """A Gaussian process with a constant mean.

    Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equations 2.25, 2.26 and 2.41. Far from every
    point its value is the mean, with `spread` as the standard deviation.
    """

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
        """The value [n] at the points `at` [n, d], each clipped to the bounding box of the surface's points."""
        return self.value(np.clip(at, self.points.min(axis=0), self.points.max(axis=0)))[0]

    def value(self, at: Array) -> tuple[Array, Array]:
        """(value, standard deviation of a new measurement), each [n], at the points `at` [n, d]."""
        if not len(self.points):
            return np.full(len(at), self.mean), np.full(len(at), self.spread)
        cross = self.spread**2 * _correlation(at, self.points)
        value = self.mean + cross @ self.weights
        explained = np.einsum("ij,ij->i", cross @ self.inverse, cross)
        return value, np.sqrt(np.maximum(self.spread**2 - explained, 0.0) + self.noise**2)


def surface(points: Array, values: Array, own_noise: Array) -> Surface:
    """The surface through `values` [m] at `points` [m, d], with standard deviations `own_noise` [m] of the values.

    The spread of the surface, and the noise between measurements of one point beyond `own_noise`, maximise the marginal
    likelihood (equation 2.30) over a coarse grid, since there are few points.
    """
    if len(values) < 2:
        mean = float(values.mean()) if len(values) else 0.0
        return Surface(points, np.zeros(len(values)), np.eye(len(values)), mean, _SPREADS[-1], _NOISES[2])
    best: tuple[float, Surface] | None = None
    correlation = _correlation(points, points)
    ones = np.ones(len(values))
    for spread in _SPREADS:
        for noise in _NOISES:
            covariance = spread**2 * correlation + np.diag(own_noise**2 + noise**2)
            inverse = np.linalg.inv(covariance)
            mean = float(ones @ inverse @ values / (ones @ inverse @ ones))
            deviations = values - mean
            _, log_determinant = np.linalg.slogdet(covariance)
            log_likelihood = -0.5 * float(deviations @ inverse @ deviations) - 0.5 * float(log_determinant)
            if best is None or log_likelihood > best[0]:
                best = log_likelihood, Surface(points, inverse @ deviations, inverse, mean, spread, noise)
    assert best is not None
    return best[1]


def _correlation(left: Array, right: Array) -> Array:
    """exp(-d^2 / 2) [n, m], with distances d in length scales."""
    distance = sum((left[:, axis, None] - right[None, :, axis]) ** 2 for axis in range(left.shape[1]))
    return np.asarray(np.exp(-0.5 * np.asarray(distance) / _LENGTH**2))


@dataclass(frozen=True)
class KernelSurface:
    """Times of one kind of kernel: a surface of log(time / (roof + shortest time)) over sizes."""

    surface: Surface
    least_s: float
    """The shortest time measured, which is that of a call or a launch."""

    def seconds(self, sizes: Array, roof_s: Array) -> Array:
        """Seconds [n] at `sizes` [n, d], at least the roof; beyond the measured sizes the ratio is constant."""
        return np.asarray(np.maximum(roof_s, np.exp(self.surface.level(sizes)) * (roof_s + self.least_s)))


def kernel_surface(sizes: Array, seconds: Array, roof_s: Array, noise: float) -> KernelSurface:
    """The surface through measured `seconds` [m] at `sizes` [m, d], each with `noise` as a share of its time."""
    least_s = float(seconds.min())
    ratios = np.log(seconds / (roof_s + least_s))
    return KernelSurface(surface(sizes, ratios, np.full(len(seconds), noise)), least_s)


_LEAST_LOST = 1e-3
"""The smallest loss as a share of the time, so that its logarithm is finite."""
_LEAST_STEP = 1e-6
"""Added to the squared difference of two logarithms, so that weights are finite."""


@dataclass(frozen=True)
class Line:
    """A kernel's time in relation to its roof, interpolated over one size; arrays are [m] measured points."""

    log_sizes: Array
    log_ratios: Array
    """log(time / roof) at each size."""
    log_lost: Array
    """log(seconds beyond the roof) at each size."""

    def seconds(self, sizes: Array, roof_s: Array) -> Array:
        """Seconds [n] at `sizes` [n] with roofs `roof_s` [n], at least the roof.

        Between two points, either the ratio of time and roof or the loss in seconds may be the more constant one. Both
        are interpolated, and the one that differs less between the two points has the larger weight. Beyond all points
        the ratio is constant.
        """
        log_sizes = np.log(np.maximum(sizes, 1))
        by_share = roof_s * np.maximum(np.exp(self.log_ratio(sizes)) - 1, _LEAST_LOST)
        by_loss = np.exp(np.interp(log_sizes, self.log_sizes, self.log_lost))
        if len(self.log_sizes) < 2:
            return np.asarray(roof_s + by_share)
        steps = np.diff(self.log_ratios) ** 2, np.diff(self.log_lost) ** 2
        weights = (steps[0] + _LEAST_STEP) / (steps[0] + steps[1] + 2 * _LEAST_STEP)
        segment = np.clip(np.searchsorted(self.log_sizes, log_sizes) - 1, 0, len(weights) - 1)
        inside = (log_sizes >= self.log_sizes[0]) & (log_sizes <= self.log_sizes[-1])
        loss_weight = np.where(inside, weights[segment], 0.0)
        return np.asarray(roof_s + by_share ** (1 - loss_weight) * by_loss**loss_weight)

    def log_ratio(self, sizes: Array) -> Array:
        """log(time / roof) [n] at `sizes` [n], linear in log(size) between the points and constant beyond them."""
        return np.asarray(np.interp(np.log(np.maximum(sizes, 1)), self.log_sizes, self.log_ratios))


def line(sizes: Array, seconds: Array, roof_s: Array) -> Line:
    """The line through measured points [m], with the median of those that share a size."""
    unique = np.unique(sizes)
    ratios = np.log(seconds / roof_s)
    lost = np.log(np.maximum(seconds - roof_s, _LEAST_LOST * seconds))
    ratios, lost = (np.array([np.median(values[sizes == size]) for size in unique]) for values in (ratios, lost))
    return Line(np.log(np.maximum(unique, 1)), ratios, lost)
