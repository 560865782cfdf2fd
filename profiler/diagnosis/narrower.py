"""What a rank's narrower linears take: as much of the whole ones' time as they take where both are run in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from profiler.diagnosis.columns import Array, Demanded, OperatorColumn, Steps, by_phase
from profiler.diagnosis.facts import Replays
from profiler.diagnosis.forecast import Fitted
from profiler.diagnosis.replayed import KernelTimes, alone_roof_s
from profiler.grid import CellKey, Phase
from profiler.machine.clock import undisturbed


@dataclass(frozen=True)
class Narrower:
    """The kernels of a rank at the very steps that are forecast."""

    whole: KernelTimes
    """Those of the whole model: attention, experts and small kernels keep the share of their roof."""
    alone_s: Mapping[str, Array]
    """[n], of one instance of a linear; NaN where neither it nor a step of that phase was replayed."""

    def small_s(self, steps: Steps, traffic_s: Array, from_memory_s: Array) -> Array:
        """As of the whole model."""
        return self.whole.small_s(steps, traffic_s, from_memory_s)

    def seconds(self, column: OperatorColumn, steps: Steps, roof_s: Array) -> Array | None:
        """Seconds of one instance at each step, where its roof is `roof_s`; None for one that is not known."""
        kept_s, alone_s = self.whole.seconds(column, steps, roof_s), self.alone_s.get(column.operator)
        if kept_s is None or alone_s is None:
            return kept_s
        return np.where(np.isnan(alone_s), kept_s, np.maximum(roof_s, alone_s))

    def converting_s(self, column: OperatorColumn, steps: Steps, roof_s: Array) -> Array:
        """As of the whole model."""
        return self.whole.converting_s(column, steps, roof_s)


def narrower(
    fitted: Fitted, whole: Demanded, keys: Sequence[CellKey], in_turn: Sequence[tuple[Replays, ...]]
) -> Narrower:
    """A rank's kernels, from those of the whole model and what replays of both in turn say of their linears.

    `keys` are the steps of `whole` in their order; each pair of `in_turn` has the whole linears, then the rank's. Only
    their ratio is taken: the machine may be faster or slower than when the run was made.
    """
    at = {key: index for index, key in enumerate(keys)}
    replayed = [(pair[0].keys[0], _shares(*pair)) for pair in in_turn]
    found: dict[str, Array] = {}
    for column in whole.columns:
        points = [
            (key.phase, float(column.rows[at[key]]), shares[column.operator])
            for key, shares in replayed
            if column.operator in shares
        ]
        alone_s = fitted.kernels.seconds(column, whole.steps, alone_roof_s(column, whole, fitted.device))
        if points and alone_s is not None:
            found[column.operator] = alone_s * _share(column.rows, whole.steps, points)
    return Narrower(fitted.kernels, found)


def _shares(whole: Replays, share: Replays) -> dict[str, float]:
    """By operator: the time of a rank's, as a share of the whole one's."""
    of_whole = {replay.operator: undisturbed(replay.seconds).quartile_s for replay in whole.operators}
    return {
        replay.operator: undisturbed(replay.seconds).quartile_s / of_whole[replay.operator]
        for replay in share.operators
    }


def _share(rows: Array, steps: Steps, points: Sequence[tuple[Phase, float, float]]) -> Array:
    """[n]: the share at each step, straight between the rows of `points` (phase, rows, share) and level beyond them.

    Each phase by itself: to the LM head the same rows come in another layout.
    """
    found = np.full(len(steps), np.nan)
    for phase, chosen in by_phase(steps):
        known = {count: share for of, count, share in sorted(points) if of == phase}
        if known:
            shares = np.interp(np.log(rows[chosen]), np.log([*known]), np.log([*known.values()]))
            found[chosen] = np.exp(shares)
    return found
