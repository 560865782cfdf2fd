"""Telemetry of a fake card: throttled, shared, or without answers."""

from __future__ import annotations

import os
import statistics
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiler.device.telemetry import HostSource, NvmlSource, Watch, source_for
from profiler.facts.telemetry import ActiveShares, Reading, Timeline, complaints, health


class FakeNvml:
    """An H100 under a power cap with another process; `broken` functions fail."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, broken: tuple[str, ...] = (), pids: tuple[int, ...] = (os.getpid(), -1)) -> None:
        self.broken = broken
        self.pids = pids
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": "card",
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4 | 0x1,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=pid) for pid in self.pids],
            "nvmlDeviceGetClockInfo": 1410,
            "nvmlDeviceGetPowerUsage": 699_000,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTemperature": 71,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=8 << 30),
            "nvmlDeviceGetTotalEnergyConsumption": 123_456,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=41),
            "nvmlSystemGetDriverVersion": "580.1",
            "nvmlDeviceGetEccMode": (1, 1),
            "nvmlDeviceGetMigMode": (0, 0),
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
        }

        def answer(*_: object) -> object:
            self.calls.append(name)
            if name in self.broken:
                raise RuntimeError("Not Supported")
            return answers[name]

        return answer


def test_a_capped_and_shared_card() -> None:
    source = NvmlSource("GPU-0", FakeNvml())
    reading = source.read()
    assert (reading.clock_hz, reading.power_w, reading.power_limit_w) == (1.41e9, 699.0, 700.0)
    assert (reading.throttle, reading.other_processes, reading.temperature_c) == (("power cap",), 1, 71.0)
    assert (reading.sm_active, reading.memory_active) == (0.97, 0.41)
    assert source.energy_j() == 123.456
    assert source.missing == ()
    facts = source.facts()
    assert (facts["ecc"], facts["mig"], facts["persistence"]) == (True, False, True)
    assert (facts["default_power_limit_w"], facts["pcie_generation"], facts["driver"]) == (700.0, 5, "580.1")
    text = " ".join(complaints([reading] * 3))
    assert "power cap" in text
    assert "1 other processes" in text


def test_other_processes_are_unknown_in_a_container_that_hides_this_one() -> None:
    """There NVML reports process ids of the host, which differ from those in the container."""
    assert NvmlSource("GPU-0", FakeNvml(pids=(4711,))).read().other_processes is None
    assert NvmlSource("GPU-0", FakeNvml(pids=(os.getpid(),))).read().other_processes == 0


def test_a_failing_field_is_named_and_the_rest_is_read() -> None:
    source = NvmlSource("GPU-0", FakeNvml(("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption")))
    reading = source.read()
    assert reading.power_w is None
    assert reading.clock_hz == 1.41e9
    assert source.energy_j() is None
    assert set(source.missing) == {"power", "energy"}
    assert source.missing == ("power", "energy")
    summary = health([reading])
    assert (summary.power_w, summary.clock_hz.median if summary.clock_hz else None) == (None, 1.41e9)


def test_nothing_is_ever_set() -> None:
    nvml = FakeNvml()
    source = NvmlSource("GPU-0", nvml)
    source.read()
    source.energy_j()
    assert all("Get" in name or name == "nvmlInit" for name in nvml.calls)


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


@pytest.mark.timing
def test_watching_costs_next_to_nothing() -> None:
    with Watch(source_for(torch.device("cpu")), interval_s=0.05) as watch:
        time.sleep(1.0)
    assert len(watch.readings) >= 5
    # At the default interval of 0.5 s, 0.5 % of the time is 2.5 ms per reading.
    assert watch.cost_s / len(watch.readings) < 2.5e-3


@pytest.mark.slow
@pytest.mark.timing
def test_a_busy_neighbour_is_seen() -> None:
    import subprocess
    import sys

    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with Watch(HostSource(), interval_s=0.2) as watch:
            time.sleep(1.5)
    finally:
        neighbour.kill()
    assert any("cores busy" in text for text in complaints(watch.readings))


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


def test_throttling_is_only_that_of_the_visits() -> None:
    readings = [Reading(throttle=("power cap",), at_unix_s=0.5), Reading(throttle=("hardware thermal",), at_unix_s=5.0)]
    assert Timeline(readings).throttled([(0.0, 1.0)]) == ("power cap",)
    assert Timeline(readings).throttled([(0.0, 1.0), (4.0, 2.0)]) == ("hardware thermal", "power cap")


def test_readings_of_any_spans() -> None:
    """Spans in any order, one within another, and one of negative length; compared with a check of every pair."""
    spans = [(30.0, 5.0), (0.0, 12.0), (2.0, 1.0), (40.0, -1.0), (33.0, 9.0)]
    readings = [Reading(clock_hz=float(moment), at_unix_s=moment / 2) for moment in range(1, 100)]
    inside = [r.clock_hz or 0.0 for r in readings if any(a <= r.at_unix_s <= a + s for a, s in spans)]
    assert Timeline(readings).active(spans).clock_hz == statistics.median(inside)
    assert 40 < len(inside) < 60
