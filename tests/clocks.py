"""A clock that counts calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


class FakeClock:
    """A clock whose every mark is one second after the previous one."""

    ahead = False

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        self.now += 1.0
        return self.now

    def synchronize(self) -> None:
        pass

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return [after - before for before, after in itertools.pairwise(marks)]
