"""Readings while a run is watched: what they cost, and which of them belong to a visit. NVML is in test_nvml.py."""

from __future__ import annotations

import time

import pytest

from profiler.device.telemetry import HostSource, Watch
from profiler.facts.telemetry import ActiveShares, Reading, Timeline, complaints
from profiler.facts.visits import Visit
from profiler.grid.cells import Cell


def test_a_falling_clock_is_reported() -> None:
    falling = [Reading(clock_hz=1.9e9 - 0.1e9 * step) for step in range(5)]
    assert "1900 to 1500 MHz" in complaints(falling)[0]
    assert complaints([Reading(clock_hz=1.9e9)] * 5) == []


def test_a_failing_source_does_not_end_a_run() -> None:
    class Failing(HostSource):
        def read(self) -> Reading:
            raise OSError("gone")

    with Watch(Failing(), interval_s=0.01) as watch:
        time.sleep(0.05)
    assert watch.readings == []


def test_activity_is_only_that_of_the_visits() -> None:
    """Readings between two visits belong to another cell, and so do those in the first second of a visit."""
    readings = [
        Reading(sm_active=share, memory_active=share / 2, clock_hz=1e9, at_unix_s=at)
        for at, share in ((0.5, 0.1), (1.5, 0.9), (5.0, 0.1), (10.5, 0.1), (11.5, 0.7), (12.0, 0.8))
    ]
    shares = Timeline(readings).active([(0.0, 2.0), (10.0, 2.0)])
    assert (shares.sm, shares.memory) == (0.8, 0.4)
    assert Timeline(readings).active([(0.0, 1.0)]) == ActiveShares(None, None, clock_hz=1e9), "too short to judge"
    assert Timeline(readings).active([(20.0, 2.0)]) == ActiveShares(None, None)


def test_the_power_cap_of_a_prefill_is_not_the_decode_steps() -> None:
    """Power is averaged over up to a second, so a reading early in the loop may be about the prefill before it."""
    cell = Cell(16, 512, 32)
    visit = Visit(cell, 0, 0.24, (0.03,) * 60, 2.1, (), None, 100.0, ttft_s=0.25, loop_s=1.8)
    assert visit.spans("prefill")[0] == (100.0, 0.25)
    [(start, seconds)] = visit.spans("decode")
    assert (start, seconds) == (pytest.approx(100.3), 1.8)
    readings = [Reading(throttle=("power cap",), at_unix_s=at) for at in (100.2, 100.5)]
    readings.append(Reading(throttle=(), at_unix_s=101.8))
    timeline = Timeline(readings)
    assert timeline.throttled(visit.spans("prefill"), "prefill") == ("power cap",)
    assert timeline.throttled(visit.spans("decode"), "decode") == ()
    late = Timeline([*readings, Reading(throttle=("power cap",), at_unix_s=101.9)])
    assert late.throttled(visit.spans("decode"), "decode") == ("power cap",)
