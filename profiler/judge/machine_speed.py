"""Swings of the machine's speed: what a visit shares with the drift probe next to it is divided out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from profiler.facts.roofs import DriftReading, swing
from profiler.facts.run_facts import Facts
from profiler.facts.visits import Visit, phase_samples
from profiler.grid.cells import PHASES, Cell, Phase

ProbeWork = Literal["memory", "compute"]
# Looks per visit from which each visit has a look next to it.
_LOOKS_A_VISIT = 0.5
# Visits beyond the first of each cell that show whether the probe and the step swing together.
_LEAST_FREEDOM = 8
# Spread between visits of a cell below which there is nothing to divide out.
_LEAST_SPREAD = 0.02
# Share of the variance between visits that the probe must explain.
_LEAST_EXPLAINED = 0.5


@dataclass(frozen=True)
class SharedSwing:
    """A swing that a phase's visits share with the probe."""

    work: ProbeWork
    """The part of the probe that explains most."""
    explained: float
    """Share of the variance between visits of the same cell."""


def at_median_speed(facts: Facts) -> tuple[Facts, Mapping[Phase, SharedSwing]]:
    """The facts with the visits' times at the machine's median speed, and what was divided out by phase.

    A time is divided by the probe's seconds next to it over their median, where that removes at least half of the
    variance between visits of the same cell; where it does not, the probe says nothing about these steps.
    """
    visits = [(cell, visit) for cell, known in facts.visits.items() for visit in known]
    if not visits or len(facts.looks) < _LOOKS_A_VISIT * len(visits):
        return facts, {}
    paces = {work: _paces(facts.looks, work, [visit for _, visit in visits]) for work in get_args(ProbeWork)}
    shared: dict[Phase, SharedSwing] = {}
    for phase in PHASES:
        if found := _shared(phase, visits, paces):
            shared[phase] = found
    if not shared:
        return facts, {}
    by_phase = {phase: paces[shared[phase].work] if phase in shared else np.ones(len(visits)) for phase in PHASES}
    steadied: dict[Cell, list[Visit]] = {cell: [] for cell in facts.visits}
    for index, (cell, visit) in enumerate(visits):
        steadied[cell].append(_divided(visit, float(by_phase["prefill"][index]), float(by_phase["decode"][index])))
    timed = {phase for phase in PHASES if any(phase_samples(phase, known) for known in facts.visits.values())}
    looks = [] if timed <= set(shared) else facts.looks
    return replace(facts, visits=steadied, looks=looks), shared


def swing_words(facts: Facts) -> list[str]:
    """A sentence on what was divided out; none where nothing was."""
    _, shared = at_median_speed(facts)
    if not shared:
        return []
    parts = [f"{100 * item.explained:.0f} % of how visits of a {phase} differ" for phase, item in shared.items()]
    return [
        f"the machine's own speed swung by {100 * swing(facts.looks):.0f} %; a probe next to each visit explains"
        f" {' and '.join(parts)}, and times are those at its median speed."
    ]


def _paces(looks: Sequence[DriftReading], work: ProbeWork, visits: Sequence[Visit]) -> NDArray[np.float64]:
    """[visits]: the probe's seconds at the middle of each visit over their median, between the looks around it."""
    ordered = sorted(looks, key=lambda look: look.at_unix_s)
    seconds = np.array([getattr(look, work) for look in ordered])
    middles = [visit.at_unix_s + visit.wall_s / 2 for visit in visits]
    found = np.interp(middles, [look.at_unix_s for look in ordered], np.log(seconds / np.median(seconds)))
    return np.asarray(np.exp(found), dtype=np.float64)


def _shared(
    phase: Phase, visits: Sequence[tuple[Cell, Visit]], paces: Mapping[ProbeWork, NDArray[np.float64]]
) -> SharedSwing | None:
    rows: dict[Cell, list[tuple[float, int]]] = {}
    for index, (cell, visit) in enumerate(visits):
        for samples in phase_samples(phase, [visit]):
            if samples:
                rows.setdefault(cell, []).append((math.log(statistics.median(samples)), index))
    freedom = sum(len(row) - 1 for row in rows.values())
    if freedom < _LEAST_FREEDOM:
        return None

    def variance(pace: NDArray[np.float64]) -> float:
        off = [np.array([log_s - math.log(pace[index]) for log_s, index in row]) for row in rows.values()]
        return float(sum(((values - values.mean()) ** 2).sum() for values in off)) / freedom

    before = variance(np.ones(len(visits)))
    after = {work: variance(pace) for work, pace in paces.items()}
    best = min(after, key=lambda work: after[work])
    if math.sqrt(before) < _LEAST_SPREAD or after[best] > (1 - _LEAST_EXPLAINED) * before:
        return None
    return SharedSwing(best, 1 - after[best] / before)


def _divided(visit: Visit, prefill: float, decode: float) -> Visit:
    """A visit with the times of each phase divided by a number."""

    def over(value: float | None, by: float) -> float | None:
        return None if value is None else value / by

    return replace(
        visit,
        prefill_s=over(visit.prefill_s, prefill),
        more_prefill_s=tuple(value / prefill for value in visit.more_prefill_s),
        ttft_s=over(visit.ttft_s, prefill),
        decode_s=tuple(value / decode for value in visit.decode_s),
        loop_s=over(visit.loop_s, decode),
        issue_s=over(visit.issue_s, decode),
    )
