"""The time of a run: the seconds that each part may take, the stages with their listener, and parts that failed."""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from profiler.device.machine import Machine
from profiler.effort import Effort
from profiler.errors import OutOfTimeError, describe_error, tolerate_errors
from profiler.report.progress import Listener
from profiler.store.document import Missing
from profiler.units import time_left

T = TypeVar("T")


Guard = Callable[[], contextlib.AbstractContextManager[None]]
"""Makes a context manager that suppresses the error of what is within, or records it."""


class Stages:
    """Reports each stage to a listener, and records how long it took."""

    def __init__(self, listener: Listener, machine: Machine, before_s: float = 0.0) -> None:
        """The command took `before_s` until now, mostly with imports."""
        self.left_s: Callable[[], float | None] = lambda: None
        """Returns the seconds to the end of the run; None if they cannot be estimated yet."""
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
        left_s = self.left_s()
        self.listener.stage(f"{text or name}{'' if left_s is None else f', {time_left(left_s)}'}")

    def spent_s(self) -> dict[str, float]:
        """Return the seconds by stage, including the current one."""
        self._end()
        return dict(self._spent_s)

    @contextlib.contextmanager
    def optional(self, what: str, effect: str = "") -> Iterator[None]:
        """Context manager for a part without which the run continues: its failure is recorded in `missing`.

        `effect` says what its absence means for the figures; a part without one is not missed. Raises DeviceError if
        the device is lost.
        """

        def failed(error: Exception) -> None:
            if effect:
                self.miss(what, describe_error(error), effect, cut=isinstance(error, OutOfTimeError))

        with tolerate_errors(failed):
            yield
            return
        self.machine.recover(what)

    def tried(self, what: str, effect: str, call: Callable[[], T]) -> T | None:
        """Return what `call` returns as an `optional` part; None if it fails."""
        with self.optional(what, effect):
            return call()
        return None

    def miss(self, what: str, why: str, effect: str, *, cut: bool = False) -> None:
        """Record that a part of the run failed or was cut; of several with one reason, only the first is recorded."""
        if all((part.what, part.why) != (what, why) for part in self.missing):
            self.missing.append(Missing(what, why, effect, cut))
            self.listener.stage(self.missing[-1].sentence)

    def _end(self) -> None:
        now_s = self.machine.now_s()
        if self._now and math.isfinite(now_s - self._since_s):
            self._spent_s[self._now] = self._spent_s.get(self._now, 0.0) + now_s - self._since_s
        self._since_s = now_s


class RunPart(StrEnum):
    """Parts of a run from the loaded model on, in their order."""

    CEILINGS = "ceilings"
    OVERHEAD = "overhead"
    TRIALS = "trials"
    TIMING = "timing"
    CEILINGS_AGAIN = "ceilings again"
    REPLAYS = "replays"
    BETWEEN = "replays between cells"
    GENERATE = "generate"
    UNEXPLAINED = "unexplained"
    REPORT = "report"


_MOST_AFTER_SWEEP = 0.6
_WARM_UP_SHARE, _WARM_UP_MOST_S = 0.02, 3.0


@dataclass
class RunBudget:
    """Seconds from the loaded model to the answer.

    Each part has a share of the total, and less where earlier parts took longer than theirs. Trials also get what
    earlier parts left; a run without them has longer repetitions. With `whole`, every cell is timed however long it
    takes, and the later parts get their shares of that longer run.
    """

    machine: Machine
    total_s: float
    effort: Effort
    whole: bool = False
    without: Collection[RunPart] = ()
    further_runs: int = 0
    """Runs of the same command that follow, each about as long."""

    def __post_init__(self) -> None:
        self._start_s = self.machine.now_s()
        self._is_known = not self.whole
        self._shares = {part: self.effort.shares[part] for part in RunPart if part not in self.without}
        has_no_trials = self.whole or RunPart.TRIALS in self.without
        self._gets_the_rest = RunPart.TIMING if has_no_trials else RunPart.TRIALS

    @property
    def elapsed_s(self) -> float:
        """Seconds since the model was loaded."""
        return self.machine.now_s() - self._start_s

    @property
    def left_s(self) -> float:
        """Seconds until the answer is due; 0 if it is late."""
        return max(0.0, self.total_s - self.elapsed_s)

    @property
    def rest_s(self) -> float:
        """Seconds that no part needs any more, for trials: what is left before the search for causes and the report."""
        return 0.0 if RunPart.TRIALS not in self._shares else self.left_s - self._after(RunPart.GENERATE) * self.total_s

    @property
    def further_s(self) -> float:
        """Total budget of the further runs of the same command, in seconds."""
        return self.further_runs * self.total_s

    def to_end_s(self) -> float | None:
        """Return the seconds to the end of the command; None until those of a whole grid can be estimated."""
        return self.left_s + self.further_s if self._is_known else None

    @property
    def after_sweep_s(self) -> float:
        """Seconds of all parts after the sweep, if it leaves them as much."""
        return self._after(RunPart.TIMING) * self.total_s

    def extend(self, sweep_s: float, *, with_trials: bool = False) -> None:
        """For a whole grid, extend the budget by repetitions of `sweep_s`; `with_trials` trials are still to come."""
        self._is_known = True
        if self.whole:
            trials = self._shares.get(RunPart.TRIALS, 0.0) if with_trials else 0.0
            shares = min(_MOST_AFTER_SWEEP, self._after(RunPart.TIMING) + trials)
            self.total_s = max(self.total_s, (self.elapsed_s + sweep_s) / (1 - shares))

    def part_s(self, part: RunPart) -> float:
        """Return the seconds that a part may take from now on: its share, and at most what later parts leave."""
        share, later = self._shares.get(part, 0.0), self._after(part)
        if not share:
            return 0.0
        at_least_s = self.left_s * share / (share + later)
        if part is self._gets_the_rest:
            return max(at_least_s, self.left_s - later * self.total_s)
        return share * self.total_s if self.whole else min(share * self.total_s, at_least_s)

    def _after(self, part: RunPart) -> float:
        order = list(RunPart)
        return sum(self._shares.get(other, 0.0) for other in order[order.index(part) + 1 :])

    @property
    def warm_up_s(self) -> float:
        """Seconds at most for warming up one cell of an engine; its first repetition warms up the rest."""
        return _WARM_UP_MOST_S if self.whole else min(_WARM_UP_MOST_S, _WARM_UP_SHARE * self.total_s)
