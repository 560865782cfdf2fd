"""The drift probe: a change of the machine is distinguished from a single disturbed reading."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from machines import CPU, FakeClock

from profiler.device.machine import Machine
from profiler.facts.roofs import DriftReading, drift
from profiler.roofs.fixed_work import DriftProbe


def test_a_slower_second_half_is_drift_and_one_bad_look_is_not() -> None:
    steady, slower = DriftReading(10e-3, 5e-3), DriftReading(10e-3, 6e-3)
    for on_gpu in (False, True):
        assert drift([steady] * 3 + [slower] * 3, on_gpu=on_gpu) == pytest.approx(0.2)
        assert drift([steady] * 5 + [slower], on_gpu=on_gpu) == 0.0
        assert drift([steady], on_gpu=on_gpu) == 0.0
        assert drift([], on_gpu=on_gpu) == 0.0


def test_a_gpus_own_heat_is_no_drift() -> None:
    """The readings of an H100 in microseconds, some of them right after prefills at its power limit: 0.9 %, not 8 %."""
    compute = (57.5, 57.6, 57.8, 59.4, 68.1, 58.0, 66.0, 57.8, 62.3)
    looks = [DriftReading(95e-6, seconds * 1e-6, float(number)) for number, seconds in enumerate(compute)]
    assert drift(looks, on_gpu=True) < 0.01
    assert drift(looks, on_gpu=False) > 0.05


class Settling(FakeClock):
    """Seconds of successive calls: slow at first, as after a large prefill, then steady."""

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return [self.given[min(int(mark) // 8, len(self.given) - 1)] for mark in marks[1:]]


class Timeless(Machine):
    """A machine whose clock stands still, so other processes have no effect on it."""

    def now_s(self) -> float:
        return 0.0


@pytest.fixture
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the probe's work small: these tests set its times by hand."""
    monkeypatch.setattr("profiler.roofs.fixed_work.PROBE_BYTES", 1 << 12)
    monkeypatch.setattr("profiler.roofs.fixed_work._SIDE", 8)


@pytest.mark.usefixtures("small_work")
def test_a_look_waits_until_the_machine_has_settled() -> None:
    sentinel = DriftProbe(Timeless(CPU, clock=Settling(1.2e-3, 1.1e-3, 1e-3)))
    assert sentinel.look().memory == pytest.approx(1e-3)
    never = DriftProbe(Timeless(CPU, clock=Settling(*(1e-3 * number for number in range(1, 40)))))
    assert never.look().memory > 4e-3  # it does not wait forever


@pytest.mark.usefixtures("small_work")
def test_a_look_at_a_busy_machine_takes_a_few_calls() -> None:
    """Calls of 0.4 s: two per burst instead of seven, as many as fit into a second."""
    clock = Settling(0.4)
    DriftProbe(Timeless(CPU, clock=clock)).look()
    quiet = Settling(0.4e-3)
    DriftProbe(Timeless(CPU, clock=quiet)).look()
    assert clock.mark() < 0.5 * quiet.mark()
