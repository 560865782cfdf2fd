"""Error rates of `roofscope gate`, from pairs of resampled runs with planted slowdowns.

    python tests/benchmarks/gate_errors.py [--pairs 200]

A pair has the cells of one real run. Each repetition is a real repetition of that cell, shifted by the deviation of a
real repetition from its cell's mean in any of the runs. Both levels of noise are therefore those of the measured
machines. The later side is then made slower. A drift of the machine from run to run, which both sides share, is not
included: the drift probe corrects for it.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from profiler.comparison.compare import compare_sides
from profiler.comparison.gate import gate
from profiler.comparison.side import CellTime, MatchKey, Side, match_key
from profiler.facts.repetitions import phase_medians, phase_samples
from profiler.grid.cells import PHASES, Phase
from profiler.stats import LEAST_REPETITIONS, deviations, estimate, spread_of
from profiler.store.folder import read_document, read_gathered

RUNS = Path(__file__).parents[2] / "runs" / "reference"
THRESHOLD = 0.03
SLOWDOWNS = (0.0, 0.01, 0.03, 0.05, 0.06, 0.10)
REPETITIONS = (LEAST_REPETITIONS, 2 * LEAST_REPETITIONS, 4 * LEAST_REPETITIONS)
PLANTED = ("all cells", "decode", "one cell")


@dataclass(frozen=True)
class Pool:
    """The real repetitions that pairs are drawn from."""

    repetitions: Mapping[MatchKey, Sequence[Sequence[float]]]
    deviations: Mapping[Phase, NDArray[np.float64]]
    """Relative deviations of single repetitions from the mean of their cell, over all runs."""


def pool_of(run: str) -> Pool:
    """Return the cells of one reference run, with the deviations of all on a CPU whose budget reached every cell.

    The H100's host was shared: its repetitions of a cell differ by up to 65 %, where gates decide nothing.
    """
    apart: dict[Phase, list[NDArray[np.float64]]] = {phase: [] for phase in PHASES}
    cells: dict[MatchKey, Sequence[Sequence[float]]] = {}
    for folder in sorted(path.parent for path in RUNS.rglob("run.json")):
        document = read_document(folder)
        if document.device.kind != "cpu" or (gathered := read_gathered(folder)).forecasts:
            continue
        for cell, repetitions in gathered.repetitions.items():
            for key in cell.keys:
                if len(repetitions) > 1:
                    shares = np.array(list(deviations(phase_medians(key.phase, repetitions)).values()))
                    apart[key.phase].append(shares * math.sqrt(shares.size / (shares.size - 1)))
                if folder == RUNS / run:
                    cells[match_key(key)] = phase_samples(key.phase, repetitions)
    return Pool(cells, {phase: np.concatenate(shares) for phase, shares in apart.items()})


def drawn(pool: Pool, repetitions: int, random: np.random.Generator) -> Side:
    """Return a run drawn from the pool, with `repetitions` repetitions of each cell."""
    taken: dict[MatchKey, list[NDArray[np.float64]]] = {}
    for key, known in pool.repetitions.items():
        level = np.median(np.concatenate([np.asarray(repetition) for repetition in known]))
        taken[key] = []
        for _ in range(repetitions):
            repetition = np.asarray(known[random.integers(len(known))])
            moved = 1 + random.choice(pool.deviations[key.phase])
            taken[key].append(repetition / np.median(repetition) * level * moved)
    spreads = {
        phase: spread_of(
            {number: float(np.median(repetition)) for number, repetition in enumerate(samples)}
            for key, samples in taken.items()
            if key.phase == phase
        )
        for phase in PHASES
    }
    cells = {}
    for key, samples in taken.items():
        spread = spreads[key.phase]
        time_s = estimate([repetition.tolist() for repetition in samples], spread)
        cells[key] = CellTime(time_s, repetitions, drift=spread.drift)
    return Side("drawn", "", "roofscope", {}, cells)


def slower(side: Side, by: float, cells: Mapping[MatchKey, CellTime]) -> Side:
    changed = {}
    for key, at in cells.items():
        longer_s = {name: getattr(at.time, name) * (1 + by) for name in ("median_s", "low_s", "high_s")}
        changed[key] = replace(at, time=replace(at.time, **longer_s))
    return replace(side, cells={**side.cells, **changed})


def drawn_pairs(pool: Pool, pairs: int, repetitions: int) -> list[tuple[Side, Side]]:
    """Return pairs of runs without a change between them."""
    random = np.random.default_rng(0)
    return [(drawn(pool, repetitions, random), drawn(pool, repetitions, random)) for _ in range(pairs)]


def outcomes(pairs: Sequence[tuple[Side, Side]], planted: str = "all cells") -> dict[float, Counter[str]]:
    """Return the gate's outcomes by planted slowdown: of all cells, of decode, or of one cell at a time."""
    counts_by_slowdown: dict[float, Counter[str]] = {by: Counter() for by in SLOWDOWNS}
    for number, (before, after) in enumerate(pairs):
        one = list(after.cells)[number % len(after.cells)]
        decode = [key for key in after.cells if key.phase == "decode"]
        chosen = {"all cells": after.cells, "one cell": [one], "decode": decode}
        cells = {key: after.cells[key] for key in chosen[planted]}
        for by in SLOWDOWNS:
            comparison = compare_sides(before, slower(after, by, cells))
            counts_by_slowdown[by][gate(comparison, dict.fromkeys(PHASES, THRESHOLD)).outcome] += 1
    return counts_by_slowdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    options = parser.parse_args()
    pool = pool_of("smollm2-135m-2-cores")
    for repetitions in REPETITIONS:
        pairs = drawn_pairs(pool, options.pairs, repetitions)
        for planted in PLANTED:
            title = f"{repetitions} repetitions per cell, {planted} slower"
            for by, counts in outcomes(pairs, planted).items():
                shares = (f"{name} {100 * count / options.pairs:.1f} %" for name, count in sorted(counts.items()))
                print(f"{title:37} planted {100 * by:4.0f} %: {', '.join(shares)}", flush=True)


if __name__ == "__main__":
    main()
