"""Warnings after judging, each with its figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from profiler.facts.roofs import Ceilings, RoofsRemeasured
from profiler.facts.run_facts import Facts
from profiler.facts.telemetry import complaints
from profiler.facts.visits import Gap, Visit, steady
from profiler.grid.cells import Cell
from profiler.judge.busy_machine import busy_sentences
from profiler.judge.cells import JudgedCell
from profiler.judge.machine_speed import swing_words
from profiler.judge.regimes import Flag
from profiler.judge.roof_range import moved, weight_read_share
from profiler.judge.stragglers import rank_steps, straggler
from profiler.units import duration, percent, scaled, several

# Two clocks around the same loop must agree this well.
_CLOCKS_AGREE = 0.02


def run_warnings(facts: Facts, judged: Sequence[JudgedCell]) -> list[str]:
    """What the device complained of, which roofs are in doubt, which cells prove nothing, which have no number, and
    clocks that disagree."""
    return [
        *complaints(facts.readings, of_cores=not busy_sentences(facts)),
        *swing_words(facts),
        *_witness(facts.ceilings),
        *_moved(facts.ceilings, facts.roofs_again),
        *_unsteady(judged),
        *_above_roof(judged),
        *_gaps(facts.gaps, facts.visits),
        *_two_clocks(facts.visits),
        *_in_chunks(facts.visits),
        *_new_lengths(facts.visits),
        *_straggling(facts, judged),
    ]


def _straggling(facts: Facts, judged: Sequence[JudgedCell]) -> list[str]:
    """The rank that all others wait for."""
    steps = rank_steps(facts, {cell.key: cell.split.latency_s for cell in judged})
    found = straggler(steps)
    if found is None:
        return []
    rank, share = found
    return [
        f"rank {rank} is the slowest: its own share of a step takes {percent(share)} longer than the fastest rank's,"
        " and all others wait for it; look what else runs on its device."
    ]


def _witness(ceilings: Ceilings) -> list[str]:
    share = weight_read_share(ceilings)
    if ceilings.weights is None or share == 1.0:
        return []
    own = ceilings.weights.roof.per_s
    return [
        f"the model's own weights are read at {scaled(own, 'B/s')}, {_change(share)} than a stream of their size"
        f" ({scaled(own / share, 'B/s')}): cells are judged under both."
    ]


def _moved(ceilings: Ceilings, looks: Sequence[RoofsRemeasured]) -> list[str]:
    """How far the roofs had moved at the run's (last) end."""
    parts = [
        f"{what} from {scaled(first.per_s, unit)} to {scaled(again.per_s, unit)}"
        for what, unit, first, again in (moved(ceilings, looks[-1]) if looks else ())
    ]
    if not parts:
        return []
    return [
        f"the roofs moved since they were measured: {', '.join(parts)}; cells are judged under the lowest and the"
        " highest."
    ]


def _change(share: float) -> str:
    return f"{percent(abs(share - 1))} {'slower' if share < 1 else 'faster'}"


def _unsteady(judged: Sequence[JudgedCell]) -> list[str]:
    unsteady = [cell for cell in judged if Flag.UNSTEADY in cell.verdict.flags]
    if not unsteady:
        return []
    first = unsteady[0]
    cells = several(len(unsteady), "cell changes its", "cells change their")
    return [
        f"{cells} label within the roofs that this run saw (first: {first.key.name},"
        f" {first.verdict.evidence[-1].signal})."
    ]


def _above_roof(judged: Sequence[JudgedCell]) -> list[str]:
    above = [cell for cell in judged if Flag.ABOVE_ROOF in cell.verdict.flags]
    if not above:
        return []
    return [
        f"{several(len(above), 'cell lies', 'cells lie')} above a measured roof (first: {above[0].key.name}): a roof or"
        " a count is too low there, which proves nothing."
    ]


def _gaps(gaps: Mapping[Cell, Gap], visits: Mapping[Cell, Sequence[Visit]]) -> list[str]:
    """Cells that have no number, and those that failed when they had one already, which they keep."""
    found = []
    visited = {cell for cell, known in visits.items() if known}
    for one, many, of in (
        ("cell has no number", "cells have no number", [gap for cell, gap in gaps.items() if cell not in visited]),
        (
            "cell failed in a later visit and keeps its number",
            "cells failed in a later visit and keep their numbers",
            [gap for cell, gap in gaps.items() if cell in visited],
        ),
    ):
        if of:
            cells = several(len(of), one, many)
            found.append(f"{cells} (first: batch {of[0].cell.name}, {of[0].status}: {of[0].reason}).")
    return found


def _in_chunks(visits: Mapping[Cell, Sequence[Visit]]) -> list[str]:
    """Prefills that an engine's own scheduler did not run in one piece."""
    iterations = {cell: known[-1].prefill_iterations for cell, known in visits.items() if known}
    chunked = {cell: number for cell, number in iterations.items() if number > 1}
    if not chunked:
        return []
    cell, number = max(chunked.items(), key=lambda item: item[1])
    mixed = any(row.prefill_requests and row.decode_requests for row in visits[cell][-1].scheduled)
    return [
        f"{len(chunked)} prefills went in chunks (most: batch {cell.name} in {number} iterations"
        f"{', in which sequences that were through decoded beside the others' if mixed else ''}):"
        " their time is that of all the chunks."
    ]


def new_length_s(visits: Sequence[Visit]) -> float:
    """Seconds that a decode step takes longer at a KV length that the process meets for the first time.

    The median over the steps of the first loop of a shape, less that of the timed loops over the same lengths; 0 where
    no first loop was kept. cuDNN keeps one attention plan for each exact shape (PyTorch,
    aten/src/ATen/native/cudnn/MHA.cpp).
    """
    first = [seconds for visit in visits for seconds in steady(visit.first_decode_s)]
    later = [seconds for visit in visits for seconds in steady(visit.decode_s)]
    return statistics.median(first) - statistics.median(later) if first and later else 0.0


def _new_lengths(visits: Mapping[Cell, Sequence[Visit]]) -> list[str]:
    """What each new KV length costs once, where that is more than the step itself."""
    costs = {cell: new_length_s(known) for cell, known in visits.items() if known}
    if not costs:
        return []
    cell, cost_s = max(costs.items(), key=lambda item: item[1])
    step_s = statistics.median(seconds for visit in visits[cell] for seconds in visit.decode_s)
    if cost_s < step_s:
        return []
    return [
        f"each KV length costs {duration(cost_s)} more the first time (decode at batch {cell.name}, {duration(step_s)}"
        " after that): the attention library builds a plan per length. The times of cells are without it; a service"
        " pays it once per length, batch size and process. A static cache has one length."
    ]


def _two_clocks(visits: Mapping[Cell, Sequence[Visit]]) -> list[str]:
    """Loops whose steps, added up, are not what the host's own clock says they took."""
    apart = {}
    for cell, known in visits.items():
        ratios = [visit.loop_s / sum(visit.decode_s) for visit in known if visit.loop_s]
        if ratios and abs(statistics.median(ratios) - 1) > _CLOCKS_AGREE:
            apart[cell] = statistics.median(ratios)
    if not apart:
        return []
    cell, ratio = max(apart.items(), key=lambda item: abs(item[1] - 1))
    return [
        f"in {len(apart)} cells the host's clock and the sum of the steps differ by more than"
        f" {percent(_CLOCKS_AGREE)} (most: {percent(ratio - 1)} at batch {cell.name})."
    ]
