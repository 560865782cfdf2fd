"""Disturbances of a run: cores that other processes kept busy, and swings of the machine's speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.facts.roofs import machine_times, swing
from profiler.facts.run_facts import Facts
from profiler.facts.telemetry import Contention
from profiler.facts.visits import Visit, phase_medians, phase_samples
from profiler.grid.cells import PHASES, Cell, Phase
from profiler.stats import MOST_FOREIGN_CORES, machine_modes, visit_modes
from profiler.units import duration, several

# A machine counts as busy if other processes used its cores in at least this share of the visits.
_BUSY_SHARE = 0.25
# Probe readings per visit from which each visit has a reading next to it.
_LEAST_READINGS = 0.5
# Visits beyond the first of each cell, from which a common swing of the probe and the step can be detected.
_LEAST_FREEDOM = 8
# Spread between visits of a cell below which nothing is divided out.
_LEAST_SPREAD = 0.02
# Share of the variance between visits that the probe must explain.
_LEAST_EXPLAINED = 0.5


BUSY = "This machine was busy"
"""The words with which an answer about a busy machine begins."""


def busy_sentences(facts: Facts) -> list[str]:
    """Sentences about other processes that used cores during the visits; empty for a quiet machine."""
    loads = [visit.foreign_cores for visits in facts.visits.values() for visit in visits]
    measured = [cores for cores in loads if cores is not None]
    busy = [cores for cores in measured if cores > MOST_FOREIGN_CORES]
    contentions = facts.every(Contention)
    if len(busy) < _BUSY_SHARE * len(measured) or not (busy or contentions):
        return []
    worst = max(contentions, key=lambda item: item.cores, default=None)
    who = worst.who if worst else "other work"
    cores = max([*busy, *(item.cores for item in contentions)])
    of = f" of {several(worst.of_cores, 'core', 'cores')}" if worst else " cores"
    when = f" in {len(busy)} of {several(len(measured), 'visit', 'visits')}" if measured else ""
    return [
        f"{BUSY}: {who} kept up to {cores:.1f}{of} busy{when}.",
        "A quiet machine takes less time, by an unknown factor, and other regimes may bind there: no saving is named.",
    ]


@dataclass(frozen=True)
class SharedSwing:
    """A swing that the visits of a phase share with the drift probe."""

    paces: NDArray[np.float64]
    """The pace of the part of the probe that explains most of it [visits]."""
    explained: float
    """The share of the variance between visits of one cell that it explains."""


def at_median_speed(facts: Facts) -> tuple[Facts, Mapping[Phase, SharedSwing]]:
    """The facts with the visits' times at the machine's median speed, and the swing that was divided out of each phase.

    A time is divided by the probe's seconds next to it over their median, if that removes at least half of the variance
    between visits of the same cell. Otherwise the probe does not represent the steps.
    """
    visits = [(cell, visit) for cell, of_cell in facts.visits.items() for visit in of_cell]
    if not visits or len(facts.looks) < _LEAST_READINGS * len(visits):
        return facts, {}
    paces = _paces(facts, [visit for _, visit in visits])
    swings = {phase: item for phase in PHASES if (item := _shared_swing(phase, visits, paces))}
    if not swings:
        return facts, {}
    by_phase = {phase: swings[phase].paces if phase in swings else np.ones(len(visits)) for phase in PHASES}
    steadied: dict[Cell, list[Visit]] = {cell: [] for cell in facts.visits}
    for index, (cell, visit) in enumerate(visits):
        steadied[cell].append(_divided(visit, float(by_phase["prefill"][index]), float(by_phase["decode"][index])))
    timed = {phase for phase in PHASES if any(phase_samples(phase, of_cell) for of_cell in facts.visits.values())}
    return replace(facts, visits=steadied, looks=[] if timed <= set(swings) else facts.looks), swings


def mode_words(facts: Facts) -> list[str]:
    """A sentence on a host whose decode steps show two modes; empty for others, and where others keep it busy."""
    visits = at_median_speed(facts)[0].visits
    between = visit_modes([phase_medians("decode", of_cell) for of_cell in visits.values()])
    for cell, of_cell in visits.items():
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
    parts = [f"{100 * item.explained:.0f} % of how visits of a {phase} differ" for phase, item in swings.items()]
    swung = swing(facts.looks, on_gpu=facts.device.kind == "cuda")
    return [
        f"the machine's own speed swung by {100 * swung:.0f} %; a probe next to each visit explains"
        f" {' and '.join(parts)}, and times are those at its median speed."
    ]


def _paces(facts: Facts, visits: Sequence[Visit]) -> list[NDArray[np.float64]]:
    """The probe's times over their median at the middle of each visit, interpolated [visits, for each kind of work]."""
    looks = sorted(facts.looks, key=lambda look: look.at_unix_s)
    at_unix_s, middles = [look.at_unix_s for look in looks], [visit.at_unix_s + visit.wall_s / 2 for visit in visits]
    of_work = machine_times(looks, on_gpu=facts.device.kind == "cuda")
    return [np.exp(np.interp(middles, at_unix_s, np.log(np.array(times) / np.median(times)))) for times in of_work]


def _shared_swing(
    phase: Phase, visits: Sequence[tuple[Cell, Visit]], paces: Sequence[NDArray[np.float64]]
) -> SharedSwing | None:
    """The swing that visits of a phase share with the probe; None if the probe explains too little."""
    rows: dict[Cell, list[tuple[float, int]]] = {}
    for index, (cell, visit) in enumerate(visits):
        for samples in phase_samples(phase, [visit]):
            if samples:
                rows.setdefault(cell, []).append((math.log(statistics.median(samples)), index))
    freedom = sum(len(row) - 1 for row in rows.values())
    if freedom < _LEAST_FREEDOM:
        return None

    def variance(pace: NDArray[np.float64]) -> float:
        log_times = [np.array([log_s - math.log(pace[index]) for log_s, index in row]) for row in rows.values()]
        return float(sum(((values - values.mean()) ** 2).sum() for values in log_times)) / freedom

    before = variance(np.ones(len(visits)))
    best = min(paces, key=variance)
    if math.sqrt(before) < _LEAST_SPREAD or variance(best) > (1 - _LEAST_EXPLAINED) * before:
        return None
    return SharedSwing(best, 1 - variance(best) / before)


def _divided(visit: Visit, prefill: float, decode: float) -> Visit:
    """A visit with the times of each phase divided by the machine's pace."""
    paces = dict.fromkeys(("prefill_s", "more_prefill_s", "ttft_s", "more_ttft_s"), prefill)
    paces |= dict.fromkeys(("decode_s", "loop_s", "issue_s"), decode)
    divided: dict[str, Any] = {}
    for name, pace in paces.items():
        value = getattr(visit, name)
        divided[name] = tuple(each / pace for each in value) if isinstance(value, tuple) else value and value / pace
    return replace(visit, **divided)
