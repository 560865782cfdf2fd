"""A clock without time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


class FakeClock:
    """A clock whose every mark is one second after the previous one; or between whose marks are the given seconds."""

    ahead = False

    def __init__(self, *given: float) -> None:
        self.now, self._given = 0.0, list(given)

    def mark(self) -> float:
        self.now += 1.0
        return self.now

    def synchronize(self) -> None:
        pass

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return self._given or [after - before for before, after in itertools.pairwise(marks)]
