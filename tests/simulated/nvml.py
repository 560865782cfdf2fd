"""NVML's answers about simulated cards, under the names of nvidia-ml-py."""

from __future__ import annotations

import os
import types
from collections.abc import Sequence
from typing import Any

from .card import Card
from .cuda import uuid_of

_WINDOW_S = 1 / 6
"""Utilisation is of the last sixth of a second to second (nvml.h, nvmlUtilization_t)."""


def answers(cards: Sequence[Card]) -> Any:
    """A module `pynvml` for these cards."""
    by_uuid = {f"GPU-{uuid_of(card)}": card for card in cards}

    def processes(card: Card) -> list[Any]:
        return [types.SimpleNamespace(pid=pid) for pid in (os.getpid(), *range(1, 1 + card.truth.other_processes))]

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
        nvmlDeviceGetCurrentClocksEventReasons=lambda card: card.truth.throttle.reason if card.clock_share < 1 else 0,
        nvmlDeviceGetPowerUsage=lambda card: round(card.truth.power_w * 900),
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
