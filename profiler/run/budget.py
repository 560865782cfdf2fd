"""The time of a run: how many seconds each part may take, so that the answer comes when the budget ends."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from enum import StrEnum

from profiler.device.machine import Machine
from profiler.effort import Effort


class RunPart(StrEnum):
    """Parts of a run after the sweep, in their order."""

    ROOFS = "roofs"
    REPLAYS = "replays"
    BETWEEN = "replays between cells"
    GENERATE = "generate"
    QUEUE = "queue"
    TRIALS = "trials"
    UNEXPLAINED = "unexplained"
    REPORT = "report"


SWEEP_SHARE = 0.5
"""Approximate share of a budget for the visits of cells."""
_GPU_SWEEP_SHARE = 0.4
_ROOF_SHARE, _LEAST_ROOF_S = 0.02, 1.0
_MOST_AFTER_SWEEP = 0.6
_HOST_SHARE = 0.03
_DISPATCH_SHARE = 0.08
_WARM_UP_SHARE, _WARM_UP_MOST_S = 0.02, 3.0


class RunBudget:
    """Seconds from the start of a run to its answer, without loading the model.

    The parts after the sweep have fixed shares of the total. The sweep gets what they and the parts before it leave, or
    half of the rest.
    With `whole`, every cell is visited however long it takes, and the later parts get their shares of that longer run.
    """

    def __init__(
        self,
        machine: Machine,
        total_s: float,
        effort: Effort,
        *,
        whole: bool = False,
        spent_s: float = 0.0,
        without: Collection[RunPart] = (),
        further_runs: int = 0,
    ) -> None:
        """`spent_s` elapsed before this object was made; the run has no part of `without`.

        `further_runs` of the same command follow, each of about the same length.
        """
        self.total_s = total_s
        self.whole = whole
        self._further_runs = further_runs
        self._machine = machine
        self._effort = effort
        self._start_s = machine.now_s() - spent_s
        self._excluded_s = 0.0
        self._is_known = not whole
        shares = {
            RunPart.ROOFS: effort.roofs_again_share,
            RunPart.REPLAYS: effort.gpu_replays_share if machine.is_cuda else effort.replays_share,
            RunPart.BETWEEN: effort.between_share,
            RunPart.GENERATE: effort.generate_share,
            RunPart.QUEUE: effort.queue_share,
            RunPart.TRIALS: effort.gpu_trials_share if machine.is_cuda else effort.trials_share,
            RunPart.UNEXPLAINED: effort.unexplained_share,
            RunPart.REPORT: effort.report_share,
        }
        self._shares = {part: shares[part] for part in RunPart if part not in without}

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Context manager whose time does not count towards the budget."""
        before_s = self._machine.now_s()
        try:
            yield
        finally:
            self._excluded_s += self._machine.now_s() - before_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, without those excluded by `apart`."""
        return self._machine.now_s() - self._start_s - self._excluded_s

    @property
    def left_s(self) -> float:
        """Seconds until the answer is due; 0 if it is late."""
        return max(0.0, self.total_s - self.elapsed_s)

    @property
    def further_s(self) -> float:
        """Total budget of the further runs of the same command, in seconds."""
        return self._further_runs * self.total_s

    def to_end_s(self) -> float | None:
        """Return the seconds to the end of the command; None until those of a whole grid can be estimated."""
        return self.left_s + self.further_s if self._is_known else None

    @property
    def sweep_s(self) -> float:
        """Seconds that the visits of cells may take from now on: what the later parts leave, and at least half.

        An engine that compiles for half a minute would else leave no time for a second visit. On a GPU the trials leave
        at least two fifths.
        """
        least_share = _GPU_SWEEP_SHARE if self._machine.is_cuda else SWEEP_SHARE
        return max(self.left_s - self.after_sweep_s, least_share * self.left_s)

    @property
    def after_sweep_s(self) -> float:
        """Seconds of all parts after the sweep, if it leaves them as much."""
        return sum(self._shares.values()) * self.total_s

    def extend(self, sweep_s: float) -> None:
        """For a whole grid, extend the budget so that visits taking `sweep_s` from now on fit in."""
        self._is_known = True
        if self.whole:
            shares = min(_MOST_AFTER_SWEEP, sum(self._shares.values()))
            self.total_s = max(self.total_s, (self.elapsed_s + sweep_s) / (1 - shares))

    def part_s(self, part: RunPart) -> float:
        """Return the seconds that a part may take from now on: its share, and at most what later parts leave."""
        share = self._shares.get(part, 0.0)
        if not share or self.whole:
            return share * self.total_s
        order = list(RunPart)
        later_shares = sum(self._shares.get(other, 0.0) for other in order[order.index(part) + 1 :])
        return min(share * self.total_s, self.left_s * share / (share + later_shares))

    @property
    def roof_s(self) -> float:
        """Seconds for sampling one roof."""
        return self._most(self._effort.roof_s, max(_LEAST_ROOF_S, _ROOF_SHARE * self.total_s))

    @property
    def weight_read_s(self) -> float:
        """Seconds for reading the model's own weights."""
        return self._most(self._effort.weight_read_s, self.roof_s / 2)

    @property
    def host_pace_s(self) -> float:
        """Seconds for the steps of the standard twin."""
        return self._most(self._effort.host_pace_s, _HOST_SHARE * self.total_s)

    @property
    def neighbours_s(self) -> float:
        """Seconds to wait at most for other processes to end."""
        return self._effort.neighbours_share * self.total_s

    def dispatch_s(self, measurements: int) -> float:
        """Return the seconds for each of `measurements` measurements of dispatch."""
        return self._most(self._effort.twin_s, _DISPATCH_SHARE * self.total_s / measurements)

    @property
    def warm_up_s(self) -> float:
        """Seconds at most for warming up an engine; its first visit warms up the rest."""
        return self._most(_WARM_UP_MOST_S, _WARM_UP_SHARE * self.total_s)

    def _most(self, effort_s: float, share_s: float) -> float:
        return effort_s if self.whole else min(effort_s, share_s)
