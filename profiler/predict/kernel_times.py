"""Kernel times at new shapes: surfaces and lines through a run's replays, and the memory traffic of operators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from profiler.counting.floor import floor_s
from profiler.facts.ceilings import Ceilings
from profiler.facts.operators import OUTSIDE, REST
from profiler.facts.overhead import Overhead
from profiler.grid.cells import Phase
from profiler.judge.breakdown import HostTime, redundant_by_cause_s
from profiler.predict.operator_arrays import Array, Columnar, Floats, OperatorArrays, OperatorColumn, StepArrays

NO_CEILING_S = 1e-9
"""The ceiling of conversions and small kernels, which have none: shorter than any of their times."""


@dataclass(frozen=True)
class ReplayedSteps(Columnar):
    """Steps whose kernels were replayed in isolation; arrays are [m]."""

    demanded: OperatorArrays
    seconds: Mapping[str, Array]
    """By operator, seconds of one instance; NaN if it was not replayed."""
    conversion_s: Mapping[str, Array]
    """The part of `seconds` that converts between formats."""


@dataclass(frozen=True)
class MeasuredCells(ReplayedSteps):
    """Measured cells, with the replays at their shapes; arrays are [m]."""

    latency_s: Array
    half_width_s: Array
    """Half width of the 95 % interval."""
    between: ReplayedSteps | None = None
    """Replays of linears at numbers of rows between those of the cells."""

    def at(self, chosen: Array) -> MeasuredCells:
        """The cells that `chosen` (bool or int [n]) picks; the replays between them stay."""
        return replace(super(MeasuredCells, replace(self, between=None)).at(chosen), between=self.between)

    def __len__(self) -> int:
        return len(self.latency_s)


class Kernels:
    """Kernel times of a model at new shapes, interpolated from a run's replays.

    By operator, `lines` and `conversions` are over rows. `surfaces` (attention) are over batch, query and depth, of
    log(time / (ceiling + shortest time)), with the shortest time measured, which is that of a call or a launch.
    `small` are all kernels that are not replayed individually, over tokens; None if they were not replayed. Their
    ceiling is the larger of their traffic from memory and their shortest time.
    """

    def __init__(self, measured: MeasuredCells, device: DeviceRates) -> None:
        steps = measured.demanded.steps
        parts = [each for each in (measured, measured.between) if each is not None]
        self.lines, self.conversions = (_lines(parts, device, converting=converting) for converting in (False, True))
        self.surfaces: dict[str, tuple[Surface, float]] = {}
        for column in measured.demanded.columns:
            if column.is_attention and (replayed_at := _replayed_steps(measured.seconds, column)) is not None:
                seconds = measured.seconds[column.operator][replayed_at]
                ceiling_s = _instance_ceiling_s(column, measured.demanded, device)[replayed_at]
                least_s, noise = float(seconds.min()), np.full(len(seconds), _REPLAY_NOISE)
                fitted = Surface(steps.at(replayed_at).octaves, np.log(seconds / (ceiling_s + least_s)), noise)
                self.surfaces[column.operator] = fitted, least_s
        self.small: Line | None = None
        rest = measured.seconds.get(REST, np.zeros(len(steps)))
        if (replayed_at := rest > 0).any():
            self.least_small_s = float(rest[replayed_at].min())
            unpaid = (
                unpaid_from_memory_s(column, device, column.operator in measured.seconds)
                for column in measured.demanded.columns
            )
            ceilings_s = np.maximum(sum(unpaid, np.zeros(len(steps))), self.least_small_s)
            self.small = Line(steps.tokens[replayed_at], rest[replayed_at], ceilings_s[replayed_at])
            # On a CPU they are not replayed for decode steps, in which they are negligible next to overhead.
            self.small_in_decode = bool((replayed_at & ~steps.prefill).any())

    def seconds(self, column: OperatorColumn, steps: StepArrays, ceiling_s: Array) -> Array | None:
        """Seconds [n] of one instance at each step, at least its ceiling `ceiling_s` [n]; None without replays.

        Beyond the measured sizes the ratio to the ceiling is constant.
        """
        if column.operator in self.surfaces:
            surface, least_s = self.surfaces[column.operator]
            least, most = (of(surface.points, axis=0) for of in (np.min, np.max))
            log_ratio, _ = surface.value(np.clip(steps.octaves, least, most))
            return np.asarray(np.maximum(ceiling_s, np.exp(log_ratio) * (ceiling_s + least_s)))
        times = self.lines.get(column.operator)
        return None if times is None else times.seconds(column.rows, ceiling_s)

    def small_s(self, steps: StepArrays, traffic_s: Array, from_memory_s: Array) -> Array:
        """Seconds [n] of all small kernels of each step: as replayed, or `traffic_s` if they were not replayed.

        `traffic_s` is the time of their traffic at the bandwidth of the cache that serves it, `from_memory_s` that at
        the memory's. The latter grows with the tokens only, without a jump at the size of a cache.
        """
        if self.small is None:
            return traffic_s
        replayed_s = np.exp(self.small.log_ratio(steps.tokens)) * np.maximum(from_memory_s, self.least_small_s)
        return np.where(steps.prefill | self.small_in_decode, replayed_s, traffic_s)

    def converting_s(self, column: OperatorColumn, steps: StepArrays) -> Array:
        """Seconds [n] of one instance that are spent converting between formats."""
        times = self.conversions.get(column.operator)
        return np.zeros(len(steps)) if times is None else times.seconds(column.rows, np.full(len(steps), NO_CEILING_S))


def _lines(parts: Sequence[ReplayedSteps], device: DeviceRates, *, converting: bool) -> dict[str, Line]:
    """The times of kernels, or of conversions, over rows, by operator, from all its replays."""
    points: dict[str, list[tuple[Array, Array, Array]]] = {}
    for part in parts:
        seconds = part.conversion_s if converting else part.seconds
        for column in part.demanded.columns:
            if not column.is_attention and (at := _replayed_steps(seconds, column)) is not None:
                own_s = _instance_ceiling_s(column, part.demanded, device)
                ceiling_s = np.full(len(own_s), NO_CEILING_S) if converting else own_s
                new = column.rows[at], seconds[column.operator][at], ceiling_s[at]
                points.setdefault(column.operator, []).append(new)
    return {name: Line(*map(np.concatenate, zip(*each, strict=True))) for name, each in points.items()}


def _replayed_steps(seconds: Mapping[str, Array], column: OperatorColumn) -> Array | None:
    """bool[m]: the steps at which an operator has a time; None if it has none at any."""
    times_s = seconds.get(column.operator)
    return None if times_s is None or not (times_s > 0).any() else np.asarray(times_s > 0)


def _instance_ceiling_s(column: OperatorColumn, demanded: OperatorArrays, device: DeviceRates) -> Array:
    """Seconds [n] of one instance of an operator at its ceiling."""
    bandwidth = device.ceilings.memory_bytes_per_s_for(demanded.working_set_bytes)
    flops_per_s = device.ceilings.compute_flops_per_s(column.source.dtype_name)
    ceiling_s = floor_s(column.flops, column.model_bytes, flops_per_s, bandwidth)
    return np.maximum(np.asarray(ceiling_s) / column.source.count, 1e-12)


@dataclass(frozen=True)
class DeviceRates:
    """A device's rates beyond single kernels: ceilings, bandwidths and overhead."""

    ceilings: Ceilings
    overhead: Mapping[Phase, Mapping[int, Overhead]]
    """Overhead of a step by phase and batch size; empty if it was not measured."""
    overlaps: bool
    fetch_s: float = 0.0

    def launched(self, steps: StepArrays) -> HostTime[Floats]:
        """The host's seconds per step [n], interpolated over log(batch) between measured batch sizes."""
        host: HostTime[Floats] = HostTime(*(np.zeros(len(steps)) for _ in range(3)))
        for phase, chosen in steps.by_phase:
            if measured := sorted(self.overhead.get(phase, {}).items()):
                at, batches = np.log2(steps.batch[chosen]), np.log2([batch for batch, _ in measured])
                for item in fields(host):
                    known_s = [getattr(overhead, item.name) for _, overhead in measured]
                    getattr(host, item.name)[chosen] = np.interp(at, batches, known_s)
        return host


def unpaid_from_memory_s(column: OperatorColumn, device: DeviceRates, replayed: bool) -> Array:
    """Seconds [n] of one operator's traffic that its replay does not include, at the memory's bandwidth."""
    bandwidth = np.full(len(column.rows), device.ceilings.memory_bytes_per_s)
    own_s = 0.0 if replayed else column.model_bytes / bandwidth
    return np.asarray(own_s + unpaid_s(column, math.inf, bandwidth, device.ceilings.copy_share, replayed))


def unpaid_s(column: OperatorColumn, flops_per_s: float, bandwidth: Array, copy_share: float, replayed: bool) -> Array:
    """Seconds [n] of an operator's redundant work that its replay does not include; see `redundant_by_cause_s`."""
    by_cause_s = redundant_by_cause_s(column, flops_per_s, bandwidth, copy_share)
    unpaid = (seconds for cause, seconds in by_cause_s.items() if not replayed or cause in OUTSIDE)
    return np.asarray(sum(unpaid, np.zeros(len(bandwidth))))


_LENGTH = 3.0
"""Length scale in octaves: over eight times as many rows or keys, a kernel's loss is hardly correlated."""
_REPLAY_NOISE = 0.01
_SPREADS = (0.02, 0.05, 0.1, 0.2, 0.4)
_NOISES = (0.003, 0.01, 0.02, 0.04, 0.08, 0.16)


class Surface:
    """A Gaussian process with a constant mean through `values` [m] at `points` [m, d], in octaves.

    Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equations 2.25, 2.26 and 2.41. Far from every
    point its value is the mean, with `spread` as the standard deviation. The spread, and the noise between measurements
    of one point beyond `own_noise` [m], maximise the marginal likelihood (equation 2.30) over a coarse grid, since
    there are few points.
    """

    def __init__(self, points: Array, values: Array, own_noise: Array) -> None:
        self.points, self.weights = points, np.zeros(len(values))
        self.inverse: Array = np.eye(len(values))
        self.mean, self.spread, self.noise = float(values.mean()), _SPREADS[-1], _NOISES[2]
        correlation, ones, best = _correlation(points, points), np.ones(len(values)), -math.inf
        for spread, noise in itertools.product(_SPREADS, _NOISES) if len(values) > 1 else ():
            covariance = spread**2 * correlation + np.diag(own_noise**2 + noise**2)
            inverse = np.linalg.inv(covariance)
            mean = float(ones @ inverse @ values / (ones @ inverse @ ones))
            deviations = values - mean
            _, log_determinant = np.linalg.slogdet(covariance)
            log_likelihood = -0.5 * float(deviations @ inverse @ deviations) - 0.5 * float(log_determinant)
            if log_likelihood > best:
                best, self.inverse, self.weights = log_likelihood, inverse, inverse @ deviations
                self.mean, self.spread, self.noise = mean, spread, noise

    def value(self, at: Array) -> tuple[Array, Array]:
        """(value, standard deviation of a new measurement), each [n], at the points `at` [n, d]."""
        cross = self.spread**2 * _correlation(at, self.points)
        value = self.mean + cross @ self.weights
        explained = np.einsum("ij,ij->i", cross @ self.inverse, cross)
        return value, np.sqrt(np.maximum(self.spread**2 - explained, 0.0) + self.noise**2)


def _correlation(left: Array, right: Array) -> Array:
    """exp(-d^2 / 2) [n, m], with distances d in length scales."""
    return np.asarray(np.exp(-0.5 * ((left[:, None] - right) ** 2).sum(axis=2) / _LENGTH**2))


class Line:
    """A kernel's time over its ceiling, through measured points [m]: the median of those that share a size."""

    def __init__(self, sizes: Array, seconds: Array, ceiling_s: Array) -> None:
        unique, ratios = np.unique(sizes), np.log(seconds / ceiling_s)
        self.log_sizes = np.log(np.maximum(unique, 1))
        self.log_ratios = np.array([np.median(ratios[sizes == size]) for size in unique])

    def seconds(self, sizes: Array, ceiling_s: Array) -> Array:
        """Seconds [n] at `sizes` [n] with ceilings `ceiling_s` [n], at least the ceiling."""
        return np.asarray(ceiling_s * np.maximum(1.0, np.exp(self.log_ratio(sizes))))

    def log_ratio(self, sizes: Array) -> Array:
        """log(time / ceiling) [n] at `sizes` [n], linear in log(size) between the points and constant beyond them."""
        return np.asarray(np.interp(np.log(np.maximum(sizes, 1)), self.log_sizes, self.log_ratios))
