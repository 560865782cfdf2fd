"""Disturbances of a run: cores that other processes kept busy, and swings of the machine's speed."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.facts.ceilings import machine_times, swing
from profiler.facts.repetitions import Repetition, phase_medians, phase_samples
from profiler.facts.run_facts import Facts
from profiler.facts.telemetry import Contention
from profiler.grid.cells import PHASES, Cell, Phase
from profiler.stats import MOST_FOREIGN_CORES, machine_modes, repetition_modes
from profiler.units import duration, several

# A machine counts as busy if other processes used its cores in at least this share of the repetitions.
_BUSY_SHARE = 0.25
# Probe readings per repetition from which each repetition has a reading next to it.
_LEAST_READINGS = 0.5
# Repetitions beyond the first of each cell, from which a common swing of the probe and the step can be detected.
_LEAST_FREEDOM = 8
# Spread between repetitions of a cell below which nothing is divided out.
_LEAST_SPREAD = 0.02
# Share of the variance between repetitions that the probe must explain.
_LEAST_EXPLAINED = 0.5

BUSY = "This machine was busy"
"""The words with which an answer about a busy machine begins."""


def busy_sentences(facts: Facts) -> list[str]:
    """Sentences about other processes that used cores during the repetitions; empty for a quiet machine."""
    loads = [repetition.foreign_cores for repetitions in facts.repetitions.values() for repetition in repetitions]
    measured = [cores for cores in loads if cores is not None]
    busy = [cores for cores in measured if cores > MOST_FOREIGN_CORES]
    contentions = facts.every(Contention)
    if len(busy) < _BUSY_SHARE * len(measured) or not (busy or contentions):
        return []
    worst = max(contentions, key=lambda item: item.cores, default=None)
    who = worst.who if worst else "other work"
    cores = max([*busy, *(item.cores for item in contentions)])
    of = f" of {several(worst.of_cores, 'core', 'cores')}" if worst else " cores"
    when = f" in {len(busy)} of {several(len(measured), 'repetition', 'repetitions')}" if measured else ""
    return [
        f"{BUSY}: {who} kept up to {cores:.1f}{of} busy{when}.",
        "A quiet machine takes less time, by an unknown factor, and other regimes may bind there: no saving is named.",
    ]


def at_median_speed(facts: Facts) -> tuple[Facts, Mapping[Phase, float]]:
    """The facts with the repetitions' times at the machine's median speed, and the share of the variance between
    repetitions of one cell that was divided out of each phase.

    A time is divided by the probe's seconds next to it over their median, if that removes at least half of the variance
    between repetitions of the same cell. Otherwise the probe does not represent the steps.
    """
    repetitions = [(cell, repetition) for cell, of_cell in facts.repetitions.items() for repetition in of_cell]
    if not repetitions or len(facts.drift_readings) < _LEAST_READINGS * len(repetitions):
        return facts, {}
    paces = _paces(facts, [repetition for _, repetition in repetitions])
    swings = {phase: item for phase in PHASES if (item := _shared_swing(phase, repetitions, paces))}
    if not swings:
        return facts, {}
    by_phase = {phase: swings[phase][0] if phase in swings else np.ones(len(repetitions)) for phase in PHASES}
    steadied: dict[Cell, list[Repetition]] = {cell: [] for cell in facts.repetitions}
    for index, (cell, repetition) in enumerate(repetitions):
        steadied[cell].append(_divided(repetition, float(by_phase["prefill"][index]), float(by_phase["decode"][index])))
    timed = {phase for phase in PHASES if any(phase_samples(phase, of_cell) for of_cell in facts.repetitions.values())}
    drift_readings = [] if timed <= set(swings) else facts.drift_readings
    shares = {phase: explained for phase, (_, explained) in swings.items()}
    return replace(facts, repetitions=steadied, drift_readings=drift_readings), shares


def mode_words(facts: Facts) -> list[str]:
    """A sentence on a host whose decode steps show two modes; empty for others, and where others keep it busy."""
    repetitions = at_median_speed(facts)[0].repetitions
    between = repetition_modes([phase_medians("decode", of_cell) for of_cell in repetitions.values()])
    for cell, of_cell in repetitions.items():
        loops = phase_samples("decode", of_cell)
        for steps in [*loops, sum(loops, ())] if between else loops:
            if (modes := machine_modes(np.array(steps))) and not busy_sentences(facts):
                fast, slow = map(duration, modes)
                words = f"a decode step of {cell.name} takes {fast} in one and {slow} in the other"
                return [f"this host has two modes: {words}."]
    return []


def swing_words(facts: Facts) -> list[str]:
    """A sentence on the swing that was divided out; empty if there was none."""
    _, swings = at_median_speed(facts)
    if not swings:
        return []
    parts = [f"{100 * share:.0f} % of how repetitions of a {phase} differ" for phase, share in swings.items()]
    swung = swing(facts.drift_readings, on_gpu=facts.device.kind == "cuda")
    return [
        f"the machine's own speed swung by {100 * swung:.0f} %; a probe next to each repetition explains"
        f" {' and '.join(parts)}, and times are those at its median speed."
    ]


def _paces(facts: Facts, repetitions: Sequence[Repetition]) -> list[NDArray[np.float64]]:
    drift_readings = sorted(facts.drift_readings, key=lambda reading: reading.at_unix_s)
    at_unix_s = [reading.at_unix_s for reading in drift_readings]
    middles = [repetition.at_unix_s + repetition.wall_s / 2 for repetition in repetitions]
    of_work = machine_times(drift_readings, on_gpu=facts.device.kind == "cuda")
    return [np.exp(np.interp(middles, at_unix_s, np.log(np.array(times) / np.median(times)))) for times in of_work]


def _shared_swing(
    phase: Phase, repetitions: Sequence[tuple[Cell, Repetition]], paces: Sequence[NDArray[np.float64]]
) -> tuple[NDArray[np.float64], float] | None:
    """(the pace [repetitions] of the part of the probe that explains most of their swing, the share that it explains).

    The share is that of the variance between repetitions of one cell; None if the probe explains too little.
    """
    rows: dict[Cell, list[tuple[float, int]]] = {}
    for index, (cell, repetition) in enumerate(repetitions):
        for samples in phase_samples(phase, [repetition]):
            if samples:
                rows.setdefault(cell, []).append((math.log(statistics.median(samples)), index))
    freedom = sum(len(row) - 1 for row in rows.values())
    if freedom < _LEAST_FREEDOM:
        return None

    def variance(pace: NDArray[np.float64]) -> float:
        log_times = [np.array([log_s - math.log(pace[index]) for log_s, index in row]) for row in rows.values()]
        return float(sum(((values - values.mean()) ** 2).sum() for values in log_times)) / freedom

    before = variance(np.ones(len(repetitions)))
    best = min(paces, key=variance)
    if math.sqrt(before) < _LEAST_SPREAD or variance(best) > (1 - _LEAST_EXPLAINED) * before:
        return None
    return best, 1 - variance(best) / before


def _divided(repetition: Repetition, prefill: float, decode: float) -> Repetition:
    paces = {
        **dict.fromkeys(("prefill_s", "more_prefill_s", "ttft_s", "more_ttft_s"), prefill),
        **dict.fromkeys(("decode_s", "loop_s", "issue_s"), decode),
    }
    divided: dict[str, Any] = {}
    for name, pace in paces.items():
        value = getattr(repetition, name)
        divided[name] = tuple(each / pace for each in value) if isinstance(value, tuple) else value and value / pace
    return replace(repetition, **divided)
