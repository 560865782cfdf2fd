"""Roofs are cached for one device, one driver and one power limit."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest
from machines import CPU, HOST

from profiler.device.device import Device
from profiler.device.machine import Machine
from profiler.device.telemetry import DeviceSettings, NoSource
from profiler.facts.roofs import Ceilings
from profiler.roofs.measure import cached


class Driven(NoSource):
    """A GPU that reports its settings."""

    def __init__(self, **settings: float | str) -> None:
        super().__init__()
        self._settings = settings

    def facts(self) -> DeviceSettings:
        return {**self._settings, "pcie_lanes": 16}


class Card(Machine):
    """A GPU by its UUID, one of many of its name."""

    def __init__(self, uuid: str, power_limit_w: float = 700.0, driver: str = "580.95.05") -> None:
        super().__init__(CPU, source=Driven(power_limit_w=power_limit_w, driver=driver))
        self._uuid = uuid

    @cached_property
    def info(self) -> Device:
        return replace(HOST.info, kind="cuda", name="NVIDIA H100 80GB HBM3", uuid=self._uuid)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def known(machine: Machine) -> bool:
    """Whether roofs were cached for this machine; afterwards they are."""
    found: list[Ceilings | None] = []

    def measure(kept: Ceilings | None) -> Ceilings:
        found.append(kept)
        return Ceilings({}, {}, 1, True, measured_at_unix_s=machine.unix_s(), missing={"read": "no room"})

    cached(measure, machine, {"torch": "2.13.0"}, fresh=False)
    return found[0] is not None


def test_two_cards_of_one_name_share_nothing() -> None:
    first, second = "GPU-2d5f", "GPU-91ab"
    assert [known(Card(uuid)) for uuid in (first, first, second, second, first)] == [False, True, False, True, True]


def test_another_power_limit_or_driver_is_another_roof() -> None:
    """An H100 at 350 W multiplies slower than at 700."""
    assert [known(Card("GPU-2d5f", watts)) for watts in (700.0, 350.0, 700.0)] == [False, False, True]
    assert [known(Card("GPU-2d5f", driver=version)) for version in ("590.10", "590.10")] == [False, True]


def test_a_cpu_keeps_its_roofs_whatever_its_governor_does() -> None:
    assert [known(HOST), known(HOST)] == [False, True]
    assert HOST.info.uuid == ""
