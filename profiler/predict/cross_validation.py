"""A fit to a run's measured cells: its cross-validated error, and its intervals."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from profiler.facts.ceilings import drift
from profiler.facts.measurements import Replay
from profiler.facts.operators import REST
from profiler.facts.overhead import Overhead
from profiler.facts.run_facts import Facts
from profiler.grid.cells import PHASES, CellKey, Phase
from profiler.judge.cells import CellResult
from profiler.judge.demand import over_the_run, overhead_at
from profiler.predict.kernel_times import DeviceRates, MeasuredCells, ReplayedSteps
from profiler.predict.operator_arrays import Array, OperatorArrays, StepArrays
from profiler.predict.predict import FittedModel, Forecast, fit, fit_residuals
from profiler.stats import NORMAL_95

HELD_OUT_SHARE = 0.9
"""Coverage of an interval."""
LEAST_CELLS = 6
"""The fewest held-out cells from which an error is reported."""
LEAST_OF_PHASE = 4
"""The fewest measured cells of a phase from which others are forecast."""
# Half width of an interval in standard deviations, if too few cells were held out.
_UNSEEN_WIDTHS = 3.0
_MOST_FOLDS = 32
# What a run cannot see: in two runs of one Xeon, cells differed by 3 to 5 % at the median.
_LATER = 0.03


@dataclass(frozen=True)
class HeldOut:
    """Forecasts of measured cells that were left out of the fit, with their errors; arrays are [n]."""

    errors: Array
    """|forecast / measured - 1| of each left-out cell."""
    widths: Array
    """|log(forecast / measured)| in standard deviations of the forecast."""

    @property
    def median(self) -> float:
        return float(np.median(self.errors))

    @property
    def p90(self) -> float:
        return float(np.quantile(self.errors, HELD_OUT_SHARE, method="higher"))

    @property
    def is_enough(self) -> bool:
        """Whether there are enough cells, at least `LEAST_CELLS`, to report an error."""
        return len(self.errors) >= LEAST_CELLS

    @property
    def half_width(self) -> float:
        """Half width of the 90 % interval in standard deviations of a forecast.

        Split conformal prediction: the ceil((n + 1) * 0.9)-th smallest of `widths` (Lei et al., JASA 113, 2018).
        """
        if not self.is_enough:
            return _UNSEEN_WIDTHS
        rank = math.ceil((len(self.widths) + 1) * HELD_OUT_SHARE)
        return float(np.sort(self.widths)[min(rank, len(self.widths)) - 1])


def held_out(
    measured: MeasuredCells, refit: Callable[[MeasuredCells], FittedModel], groups: Iterable[Array]
) -> HeldOut:
    """Forecast each group of cells, given as indices, from `refit` to all cells outside the group."""
    parts = [(np.zeros(0), np.zeros(0))]
    for group in groups:
        others = np.setdiff1d(np.arange(len(measured)), group)
        forecast = refit(measured.at(others)).forecast(measured.demanded.at(group))
        ratio = forecast.latency_s / measured.latency_s[group]
        measured_sigma = measured.half_width_s[group] / NORMAL_95 / measured.latency_s[group]
        widths = np.abs(np.log(ratio)) / np.hypot(forecast.sigma, measured_sigma)
        parts.append((np.abs(ratio - 1), widths))
    return HeldOut(*map(np.concatenate, zip(*parts, strict=True)))


def one_at_a_time(measured: MeasuredCells) -> list[Array]:
    """Groups of one cell each, or 32 groups of cells that are far apart if there are more cells."""
    cells = np.arange(len(measured))
    folds = min(len(cells), _MOST_FOLDS) if len(cells) > 2 else 0
    return [cells[fold::folds] for fold in range(folds)]


def outermost_cells(measured: MeasuredCells) -> Iterator[Array]:
    """Groups of each phase's largest batch and of its longest prompt or context, to test extrapolation."""
    steps = measured.demanded.steps
    for _, chosen in steps.by_phase:
        for sizes in (steps.batch, np.where(steps.prefill, steps.query, steps.context)):
            largest = chosen & (sizes == sizes[chosen].max())
            if largest.sum() < chosen.sum():
                yield np.flatnonzero(largest)


@dataclass(frozen=True)
class TrainedModel:
    """A fit to measured cells, with its held-out errors."""

    fitted: FittedModel
    measured: MeasuredCells
    within: HeldOut
    """Errors of leaving one cell out."""
    outside: HeldOut
    """Errors of leaving out the largest batch, and the longest context."""
    drift: float
    """Change of the machine's speed in the run and until a later one, as a share."""

    @property
    def repeat_width(self) -> float:
        """Half width (95 %) of a second measurement of a cell, as a share: that of the median cell, and the drift."""
        return math.hypot(float(np.median(self._widths)), self.drift)

    @property
    def _widths(self) -> Array:
        """Half widths of the measured cells as shares of their times."""
        return np.asarray(self.measured.half_width_s / self.measured.latency_s)

    def forecast(self, demanded: OperatorArrays) -> tuple[Forecast, Array]:
        """Forecast any steps: times that grow with the batch and the length, and the half width of the log of each [n].

        A measured cell keeps its time. A half width covers 90 %, and is at least that of the cells next to the step and
        of the drift together. Beyond the measured sizes it grows with the octaves. It is infinite if the step
        contradicts smaller or larger ones by more than that. Each phase needs measured cells (`too_few`).
        """
        forecast, steps = self.fitted.forecast(demanded), demanded.steps
        within, octaves = self.within.half_width, self.beyond(steps).sum(axis=1)
        outside = max(within, self.outside.half_width) * np.maximum(1.0, octaves)
        widths = np.where(octaves > 0, outside, within)
        half_width = np.hypot(widths * forecast.sigma, np.hypot(self._widest_near(steps), self.drift))
        latency_s = self._grown(steps, forecast.latency_s)
        moved = np.abs(np.log(latency_s / forecast.latency_s))
        half_width = np.where(moved > half_width, np.inf, np.hypot(half_width, moved))
        same = (_sizes(steps)[:, None] == _sizes(self.measured.demanded.steps)).all(axis=2)
        known, at = same.any(axis=1), same.argmax(axis=1)
        latency_s = np.where(known, self.measured.latency_s[at], latency_s)
        half_width = np.where(known, np.hypot(self._widths[at], self.drift), half_width)
        return replace(forecast, latency_s=latency_s), half_width

    def _grown(self, steps: StepArrays, latency_s: Array) -> Array:
        """Times [n] that grow, also from and to the measured cells, in each phase whose measured cells grow.

        Two rows of a CPU's matmuls may take longer than four.
        """
        measured, sizes = self.measured, _sizes(self.measured.demanded.steps)
        fast_s, slow_s = measured.latency_s - measured.half_width_s, measured.latency_s + measured.half_width_s
        shrinks = (_smaller(sizes) & (fast_s[:, None] > slow_s)).any(axis=1)
        both = np.concatenate([_sizes(steps), sizes])
        known_s = self.fitted.forecast(measured.demanded).latency_s
        grown_s = grown(both, np.concatenate([latency_s, known_s]))[: len(steps)]
        return np.where(np.isin(steps.prefill, sizes[shrinks, 0]), latency_s, grown_s)

    def _widest_near(self, steps: StepArrays) -> Array:
        """The widest interval [n] of the measured cells around each step, as half widths in shares of their times."""
        sizes, widest = _sizes(self.measured.demanded.steps), np.zeros(len(steps))
        for index, (phase, *at) in enumerate(_sizes(steps)):
            near = of_phase = sizes[:, 0] == phase
            for axis, size in enumerate(at, start=1):
                near = near & np.isin(sizes[:, axis], _around(sizes[of_phase, axis], size))
            widest[index] = self._widths[near if near.any() else of_phase].max(initial=0.0)
        return widest

    def beyond(self, steps: StepArrays) -> Array:
        """Octaves [n, 2] by which the (batch, length) of each step is outside those measured in its phase."""
        measured, octaves = _sizes(self.measured.demanded.steps), np.zeros((len(steps), 2))
        for phase, chosen in steps.by_phase:
            known, sizes = measured[measured[:, 0] == (phase == "prefill"), 1:], _sizes(steps.at(chosen))[:, 1:]
            octaves[chosen] = np.abs(np.log2(sizes / np.clip(sizes, known.min(axis=0), known.max(axis=0))))
        return octaves


def _sizes(steps: StepArrays) -> Array:
    """(phase, batch, length) of each step: [n, 3]."""
    return np.stack([steps.prefill, steps.batch, steps.depth], axis=1)


def _around(sizes: Array, at: int) -> tuple[int, int]:
    """The nearest of `sizes` on both sides of `at`; beyond all of them, the last one twice."""
    return sizes[sizes <= at].max(initial=sizes.min()), sizes[sizes >= at].min(initial=sizes.max())


def _smaller(sizes: Array) -> Array:
    """bool[n, n]: whether no size of the first step is larger than that of the second, in one phase."""
    return np.asarray((sizes[:, None, 0] == sizes[:, 0]) & (sizes[:, None] <= sizes).all(axis=2))


def grown(sizes: Array, seconds: Array) -> Array:
    """The nearest times [n] that shrink with no size: `sizes` are (phase, batch, length) [n, 3].

    Each is the geometric mean of the longest time of all smaller steps and the shortest of all larger ones, both of
    which grow.
    """
    smaller = _smaller(sizes)
    longest = np.where(smaller, seconds[:, None], 0.0).max(axis=0)
    shortest = np.where(smaller, seconds, np.inf).min(axis=1)
    return np.asarray(np.sqrt(longest * shortest))


def too_few(trained: TrainedModel, steps: StepArrays) -> Phase | None:
    """The first phase of `steps` of which too few cells were measured for a forecast; None if there are enough.

    That is fewer than four, or one batch size or one length, if other ones are requested.
    """
    measured = trained.measured.demanded.steps
    for phase, chosen in steps.by_phase:
        known, requested = _sizes(measured.at(measured.prefill == (phase == "prefill"))), _sizes(steps.at(chosen))
        alone = (np.ptp(known, axis=0) == 0) & (requested != known[:1]).any(axis=0) if len(known) else True
        if len(known) < LEAST_OF_PHASE or np.any(alone):
            return phase
    return None


def train(measured: MeasuredCells, device: DeviceRates, drift: float = 0.0) -> TrainedModel:
    """Fit all measured cells, and cross-validate the fit.

    Between measured cells, kernels are replayed at close numbers of rows. So a cell that is left out alone keeps its
    replays; the outermost ones do not.
    """
    fitted = fit(measured, device)
    within = held_out(measured, partial(fit_residuals, fitted), one_at_a_time(measured))
    outside = held_out(measured, partial(fit, device=device), outermost_cells(measured))
    return TrainedModel(fitted, measured, within, outside, math.hypot(drift, _LATER))


def train_on(
    facts: Facts, results: Sequence[CellResult], count: Callable[[Sequence[CellKey]], OperatorArrays], engine: str
) -> TrainedModel | None:
    """Fit the measured cells of one engine, those of `results` that are ok; None where there are none.

    `count` counts what every operator of the run's model must do in some steps.
    """
    by_key = {result.key: result for result in results if result.status == "ok" and result.engine == engine}
    if not by_key:
        return None
    overhead: dict[Phase, dict[int, Overhead]] = {phase: {} for phase in PHASES}
    for key in by_key:  # at other batches no step bounds what a disturbed overhead model took
        if found := overhead_at(facts, key):
            overhead[key.phase][key.cell.batch_size] = found
    facts = over_the_run(facts)
    fetch_s = facts.ceilings.fetch_s(facts.model.offloaded_bytes)
    device = DeviceRates(facts.ceilings, overhead, facts.device.hides_overhead, fetch_s)
    keys, cells = [key for key in facts.grid.keys if key in by_key], set(facts.grid.keys)
    between = [key for key in facts.replays if key.cell.engine == engine and key not in cells]
    rows = [by_key[key] for key in keys]
    measured = MeasuredCells(
        **vars(_replayed(facts, keys, count(keys))),
        latency_s=np.array([row.latency_s for row in rows]),
        half_width_s=np.array([(row.latency_high_s - row.latency_low_s) / 2 for row in rows]),
        between=_replayed(facts, between, count(between)) if between else None,
    )
    return train(measured, device, drift(facts.drift_readings, on_gpu=facts.device.kind == "cuda"))


def _replayed(facts: Facts, keys: Sequence[CellKey], counted: OperatorArrays) -> ReplayedSteps:
    """The kernels that were replayed at the shapes of `keys`, by operator."""
    replays: list[Mapping[str, Replay]] = [facts.replays.get(key, {}) for key in keys]
    whole: dict[str, Array] = {}
    conversion: dict[str, Array] = {}
    for name in (*(column.operator for column in counted.columns), REST):
        found = [of_key.get(name) for of_key in replays]
        for by_operator, part in ((whole, "whole"), (conversion, "conversion")):
            seconds = np.array([getattr(each, part).median_s if each else np.nan for each in found])
            if (seconds > 0).any():
                by_operator[name] = seconds
    return ReplayedSteps(counted, whole, conversion)
