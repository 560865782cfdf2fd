"""What a forecast learns from the facts of a run, and the times of cells that the run did not reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from profiler.facts.dispatch import Dispatch
from profiler.facts.measurements import ForecastTime, Replay
from profiler.facts.operators import REST
from profiler.facts.run_facts import Facts
from profiler.grid.cells import PHASES, CellKey, Phase
from profiler.judge.cells import CellResult
from profiler.judge.demand import faults_of
from profiler.predict.cross_validation import TrainedModel, train
from profiler.predict.kernel_times import DeviceRates, MeasuredCells, ReplayedSteps
from profiler.predict.operator_arrays import Array, OperatorArrays

CountSteps = Callable[[Sequence[CellKey]], OperatorArrays]
"""Counts what every operator of the run's model must do in some steps."""


def forecast_missing(
    facts: Facts, results: Sequence[CellResult], count: CountSteps, engine: str
) -> tuple[ForecastTime, ...]:
    """Times of an engine's cells that the run did not reach, from those that it measured.

    A phase of which nothing was measured is left out, and so is a step that does not fit the memory.
    """
    phases = {result.phase for result in results if result.status == "ok" and result.engine == engine}
    missing = [
        key
        for key in facts.grid.keys
        if key.cell.engine == engine
        and key.phase in phases
        and key.cell not in facts.visits
        and key.cell not in facts.gaps
    ]
    if not missing or not facts.ceilings.judges:
        return ()
    trained = train_on(facts, results, count, engine)
    if trained is None:
        return ()
    forecast = trained.fitted.forecast(count(missing))
    low_s, high_s = trained.bounds(forecast)
    fits = forecast.fits(facts.device.room_bytes)
    return tuple(
        ForecastTime(key, float(forecast.latency_s[index]), float(low_s[index]), float(high_s[index]))
        for index, key in enumerate(missing)
        if fits[index]
    )


def train_on(facts: Facts, results: Sequence[CellResult], count: CountSteps, engine: str) -> TrainedModel | None:
    """Fit the measured cells of one engine, those of `results` that are ok; None where there are none."""
    by_key = {result.key: result for result in results if result.status == "ok" and result.engine == engine}
    if not by_key:
        return None
    return train(_measured_cells(facts, by_key, count, engine), _device_rates(facts, engine))


def _device_rates(facts: Facts, engine: str) -> DeviceRates:
    """The roofs and the dispatch of a run's device under one engine."""
    dispatch: dict[Phase, dict[int, Dispatch]] = {phase: {} for phase in PHASES}
    for (name, phase, batch), samples in facts.dispatch.items():
        if name == engine:
            dispatch[phase][batch] = samples
    return DeviceRates(
        facts.ceilings,
        facts.model.dtype,
        dispatch,
        facts.device.overlaps_dispatch,
        facts.device.room_bytes,
        facts.ceilings.fetch_s(facts.model.offloaded_bytes),
    )


def _measured_cells(
    facts: Facts, by_key: Mapping[CellKey, CellResult], count: CountSteps, engine: str
) -> MeasuredCells:
    """Measured cells, with the kernels that were replayed at their shapes."""
    keys = [key for key in facts.grid.keys if key in by_key]
    cells = set(facts.grid.keys)
    between = [key for key in facts.replays if key.cell.engine == engine and key not in cells]
    rows = [by_key[key] for key in keys]
    return MeasuredCells(
        _replayed(facts, keys, count(keys)),
        np.array([row.latency_s for row in rows]),
        np.array([(row.latency_high_s - row.latency_low_s) / 2 for row in rows]),
        np.array([faults_of(key.phase, facts.visits[key.cell]) for key in keys]),
        _replayed(facts, between, count(between)) if between else None,
    )


def _replayed(facts: Facts, keys: Sequence[CellKey], counted: OperatorArrays) -> ReplayedSteps:
    """The kernels that were replayed at the shapes of `keys`, by operator."""
    replays: list[Mapping[str, Replay]] = [facts.replays.get(key, {}) for key in keys]
    names = [*(column.operator for column in counted.columns), REST]

    def by_operator(seconds_of: Callable[[Replay], float]) -> dict[str, Array]:
        columns = {
            name: np.array([seconds_of(of_key[name]) if name in of_key else np.nan for of_key in replays])
            for name in names
        }
        return {name: seconds for name, seconds in columns.items() if (seconds > 0).any()}

    return ReplayedSteps(
        counted,
        by_operator(lambda replay: replay.whole.median_s),
        by_operator(lambda replay: replay.conversion.median_s),
    )
