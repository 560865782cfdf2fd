"""NVML for simulated cards, with the names of nvidia-ml-py."""

from __future__ import annotations

import os
import types
from collections.abc import Sequence
from typing import Any

from .card import Card
from .cuda import uuid_of

_POWER_CAP = 0x4
"""nvml.h, nvmlClocksEventReasonSwPowerCap."""
_WINDOW_S = 1 / 6
"""Utilisation covers the last 1/6 s to 1 s (nvml.h, nvmlUtilization_t)."""


def answers(cards: Sequence[Card]) -> Any:
    """Return a module `pynvml` for these cards."""
    by_uuid = {f"GPU-{uuid_of(card)}": card for card in cards}

    def processes(card: Card) -> list[Any]:
        return [types.SimpleNamespace(pid=pid) for pid in (os.getpid(), *range(1, 1 + card.truth.other_processes))]

    def reasons(card: Card) -> int:
        if card.clock_share == 1.0:
            return 0
        return _POWER_CAP if card.truth.throttle is None else card.truth.throttle.reason

    def power_mw(card: Card) -> int:
        """Return the power limit if it limits the clock, else nine tenths of it."""
        return round(card.truth.power_w * (1000 if reasons(card) == _POWER_CAP else 900))

    def utilisation(card: Card) -> Any:
        share = round(100 * card.active_share(_WINDOW_S))
        return types.SimpleNamespace(gpu=share, memory=share // 2)

    module = types.ModuleType("pynvml")
    module.__dict__.update(
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=by_uuid.__getitem__,
        nvmlSystemGetDriverVersion=lambda: "580.00",
        nvmlSystemGetCudaDriverVersion=lambda: 13000,
        nvmlDeviceGetClockInfo=lambda card, kind: round(card.truth.clock_hz * card.clock_share / 1e6),
        nvmlDeviceGetCurrentClocksEventReasons=reasons,
        nvmlDeviceGetPowerUsage=power_mw,
        nvmlDeviceGetEnforcedPowerLimit=lambda card: round(card.truth.power_w * 1000),
        nvmlDeviceGetPowerManagementDefaultLimit=lambda card: round(card.truth.power_w * 1000),
        nvmlDeviceGetUtilizationRates=utilisation,
        nvmlDeviceGetTemperature=lambda card, kind: 60,
        nvmlDeviceGetMemoryInfo=lambda card: types.SimpleNamespace(
            used=card.memory.total_bytes - card.memory.driver_free
        ),
        nvmlDeviceGetComputeRunningProcesses=processes,
        nvmlDeviceGetTotalEnergyConsumption=lambda card: round(
            1e3 * card.truth.power_w * (0.2 * card.host.now_s + 0.7 * card.busy_s)
        ),
    )
    return module
