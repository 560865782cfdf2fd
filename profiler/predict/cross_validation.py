"""The error of forecasts, by leaving measured cells out, and the intervals that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiler.grid.cells import Phase
from profiler.predict.kernel_times import DeviceRates, MeasuredCells
from profiler.predict.operator_arrays import Array, OperatorArrays, StepArrays, by_phase
from profiler.predict.predict import NORMAL_95, Fitted, Forecast, fit, predicted_regimes

HELD_OUT_SHARE = 0.9
"""An interval holds nine in ten."""
LEAST_CELLS = 6
"""With fewer cells held out, no error can be told."""
# Standard deviations of an interval where too few cells were held out to say how far off they come.
_UNSEEN_WIDTHS = 3.0
_MOST_FOLDS = 32


@dataclass(frozen=True)
class HeldOut:
    """How far off forecasts are of measured cells that were left out, one at a time or the extremes together."""

    errors: Array
    """|forecast / measured - 1| of each left-out cell."""
    widths: Array
    """|log(forecast / measured)| in the standard deviations that the forecast gave itself."""
    index: Array
    """Which of the measured cells each was."""
    seconds: Array
    """What each was forecast to take."""

    @property
    def median(self) -> float:
        return float(np.median(self.errors)) if len(self.errors) else math.nan

    @property
    def p90(self) -> float:
        return float(np.quantile(self.errors, HELD_OUT_SHARE, method="higher")) if len(self.errors) else math.nan

    @property
    def told(self) -> bool:
        """Whether there are enough of them to tell an error."""
        return len(self.errors) >= LEAST_CELLS

    @property
    def half_width(self) -> float:
        """Standard deviations that hold nine in ten of what was left out (split conformal prediction: Lei et al.,
        JASA 113, 2018: the ceil((n + 1) * 0.9)-th smallest)."""
        if not self.told:
            return _UNSEEN_WIDTHS
        rank = math.ceil((len(self.widths) + 1) * HELD_OUT_SHARE)
        return float(np.sort(self.widths)[min(rank, len(self.widths)) - 1])


def held_out(measured: MeasuredCells, device: DeviceRates, groups: Sequence[Array]) -> HeldOut:
    """Forecast each group (indices) from all cells outside of it."""
    errors: list[Array] = []
    widths: list[Array] = []
    seconds: list[Array] = []
    for group in groups:
        kept = np.setdiff1d(np.arange(len(measured)), group)
        found = fit(measured.at(kept), device).forecast(measured.demanded.at(group))
        ratio = found.latency_s / measured.latency_s[group]
        own = measured.half_width_s[group] / NORMAL_95 / measured.latency_s[group]
        errors.append(np.abs(ratio - 1))
        seconds.append(found.latency_s)
        widths.append(np.abs(np.log(ratio)) / np.hypot(found.sigma, own))
    if not groups:
        return HeldOut(np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0))
    return HeldOut(*map(np.concatenate, (errors, widths, list(groups), seconds)))


def one_at_a_time(measured: MeasuredCells) -> list[Array]:
    """Every cell by itself; of very many, so many groups that each holds cells far from each other."""
    cells = np.arange(len(measured))
    if len(cells) < 3:
        return []
    folds = min(len(cells), _MOST_FOLDS)
    return [cells[fold::folds] for fold in range(folds)]


def outermost_cells(measured: MeasuredCells) -> list[Array]:
    """The largest batch of each phase, and its longest prompt or context: what a forecast beyond the grid is like."""
    steps, groups = measured.demanded.steps, []
    for _, chosen in by_phase(steps):
        for sizes in (steps.batch, np.where(steps.prefill, steps.query, steps.context)):
            largest = chosen & (sizes == sizes[chosen].max())
            if largest.sum() < chosen.sum():
                groups.append(np.flatnonzero(largest))
    return groups


@dataclass(frozen=True)
class Trained:
    """A fit with its own held-out errors."""

    fitted: Fitted
    measured: MeasuredCells
    within: HeldOut
    """Leave one out."""
    outside: HeldOut
    """Leave the largest batch out, and the longest context."""

    def bounds(self, forecast: Forecast) -> tuple[Array, Array]:
        """Seconds between which nine in ten forecasts of this kind came to lie."""
        within = self.within.half_width
        widths = np.where(self.unseen(forecast.demanded.steps), max(within, self.outside.half_width), within)
        spread = np.exp(widths * forecast.sigma)
        return forecast.latency_s / spread, forecast.latency_s * spread

    def unseen(self, steps: StepArrays) -> Array:
        """Whether a step lies outside of the batches, prompts and contexts that were measured in its phase."""
        larger, longer = self.reaches(steps)
        return larger | longer

    def reaches(self, steps: StepArrays) -> tuple[Array, Array]:
        """(batches, lengths) that lie outside of what was measured in their phase."""
        seen = self.measured.demanded.steps
        batch, length = np.zeros(len(steps), dtype=bool), np.zeros(len(steps), dtype=bool)
        for phase, chosen in by_phase(steps):
            known = seen.prefill == (phase == "prefill")
            if not known.any():
                batch[chosen] = length[chosen] = True
                continue
            for outside, sizes, of in (
                (batch, steps.batch, seen.batch[known]),
                (length, steps.depth, seen.depth[known]),
            ):
                outside[chosen] = (sizes[chosen] < of.min()) | (sizes[chosen] > of.max())
        return batch, length

    def assumptions(self, forecast: Forecast) -> list[tuple[str, ...]]:
        """What carries each forecast beyond what was measured; empty where nothing needs to."""
        steps = forecast.demanded.steps
        batch, length = self.reaches(steps)
        binding, seen = self._binding(forecast), self._seen()
        cached, kept = self._resident(forecast.demanded), self._resident(self.measured.demanded)
        found: list[tuple[str, ...]] = []
        for index in range(len(steps)):
            phase: Phase = "prefill" if steps.prefill[index] else "decode"
            words = []
            if batch[index]:
                words.append("kernels keep the share of their roof that they had at the nearest batch measured")
            if length[index]:
                words.append("attention keeps the share of its roof that it had at the nearest length measured")
            if binding[index] not in seen.get(phase, {binding[index]}):
                words.append(f"{binding[index]} decides, as in no measured {phase}: its roof carries the forecast")
            if not cached[index] and kept.all():
                words.append("the weights and the cache leave the last-level cache: the memory roof carries it")
            found.append(tuple(words))
        return found

    def _binding(self, forecast: Forecast) -> list[str]:
        return [regime.removesuffix("-bound") for regime in predicted_regimes(forecast.terms)]

    def _seen(self) -> dict[Phase, set[str]]:
        terms = self.fitted.terms(self.measured.demanded)
        found: dict[Phase, set[str]] = {}
        for prefill, regime in zip(self.measured.demanded.steps.prefill, predicted_regimes(terms), strict=True):
            found.setdefault("prefill" if prefill else "decode", {"mixed"}).add(regime.removesuffix("-bound"))
        return found

    def _resident(self, demanded: OperatorArrays) -> Array:
        roof = self.fitted.device.memory_bytes_per_s(demanded.working_set_bytes)
        return np.asarray(roof > self.fitted.device.ceilings.memory_bytes_per_s * 1.001)


def train(measured: MeasuredCells, device: DeviceRates) -> Trained:
    """Fit all cells, and each again without itself."""
    return Trained(
        fit(measured, device),
        measured,
        held_out(measured, device, one_at_a_time(measured)),
        held_out(measured, device, outermost_cells(measured)),
    )
