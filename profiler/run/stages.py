"""The time of a run: the seconds that each part may take, the stages with their listener, and parts that failed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator
from enum import StrEnum
from typing import Protocol, TypeVar

from profiler.device.machine import Machine
from profiler.effort import Effort
from profiler.errors import describe_error, tolerate_errors
from profiler.measure.rounds import Progress
from profiler.store.document import Missing
from profiler.units import time_left

T = TypeVar("T")


class Listener(Protocol):
    """Receives the progress of a run; the terminal implements it, and Python callers may."""

    def stage(self, text: str) -> None:
        """Called when a stage begins."""

    def progress(self, progress: Progress, total_cells: int) -> None:
        """Called before a cell is visited."""


class Stages:
    """Reports each stage to a listener, and records how long it took."""

    def __init__(
        self,
        listener: Listener,
        machine: Machine,
        before_s: float = 0.0,
        left_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """The command took `before_s` until now, mostly with imports.

        `left_s` returns the seconds to the end of the run; None if they cannot be estimated yet.
        """
        self._left_s = left_s
        self.listener = listener
        self.machine = machine
        self._now = ""
        self._since_s = machine.now_s()
        self._spent_s = {"starting": before_s} if before_s else {}
        self.missing: list[Missing] = []

    def begin(self, name: str, text: str = "") -> None:
        """End the current stage and begin the next; times of stages with the same name add up."""
        self._end()
        self._now = name
        left_s = self._left_s()
        self.listener.stage(f"{text or name}{'' if left_s is None else f', {time_left(left_s)}'}")

    def spent_s(self) -> dict[str, float]:
        """Return the seconds by stage, including the current one."""
        self._end()
        return dict(self._spent_s)

    @contextlib.contextmanager
    def optional(self, what: str, effect: str) -> Iterator[None]:
        """Context manager for a part without which the run continues: its failure is recorded in `missing`.

        `effect` says what its absence means for the figures. Raises DeviceError if the device is lost.
        """
        with tolerate_errors(lambda error: self.miss(what, describe_error(error), effect)):
            yield
            return
        self.machine.recover(what)

    def tried(self, what: str, effect: str, call: Callable[[], T]) -> T | None:
        """Return what `call` returns as an `optional` part; None if it fails."""
        with self.optional(what, effect):
            return call()
        return None

    def miss(self, what: str, why: str, effect: str) -> None:
        """Record that a part of the run failed; only the first of several failures with one reason is recorded."""
        if all((part.what, part.why) != (what, why) for part in self.missing):
            self.missing.append(Missing(what, why, effect))
            self.listener.stage(self.missing[-1].sentence)

    def _end(self) -> None:
        now_s = self.machine.now_s()
        if self._now and math.isfinite(now_s - self._since_s):
            self._spent_s[self._now] = self._spent_s.get(self._now, 0.0) + now_s - self._since_s
        self._since_s = now_s


class RunPart(StrEnum):
    """Parts of a run after the sweep, in their order."""

    ROOFS = "roofs"
    REPLAYS = "replays"
    BETWEEN = "replays between cells"
    GENERATE = "generate"
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
