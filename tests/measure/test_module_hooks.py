"""Impossible times of a clock give no parts of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
from machines import HOST

from profiler.device.machine import Machine
from profiler.measure.module_hooks import Pieces


class KnownTimes:
    """A clock that gives these seconds between its marks."""

    def __init__(self, *seconds: float) -> None:
        self._seconds, self._marks = list(seconds), count()

    def mark(self) -> int:
        return next(self._marks)

    def seconds(self, marks: Sequence[int]) -> list[float]:
        return self._seconds

    def synchronize(self) -> None:
        pass


def parts(*seconds: float) -> dict[str, float]:
    pieces = Pieces(Machine(HOST.device, clock=KnownTimes(*seconds)))
    pieces.start()
    for _ in seconds[1:]:
        pieces.enter("mlp")
    return pieces.finish()


def test_parts_add_up_to_the_step() -> None:
    assert parts(1e-3, 0.0, 2e-3) == {"between modules": 1e-3, "mlp": 2e-3}


@pytest.mark.parametrize("seconds", [(0.0, 0.0), (float("nan"), 1e-3), (-1e-3, 2e-3)])
def test_a_clock_that_is_wrong_gives_no_parts(seconds: tuple[float, ...]) -> None:
    with pytest.raises(RuntimeError, match="the clock gave"):
        parts(*seconds)
