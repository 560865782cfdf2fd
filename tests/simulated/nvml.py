"""NVML for simulated cards, with the names of nvidia-ml-py."""

import math
import os
import types
from collections.abc import Sequence
from typing import Any

import pynvml

from .card import Card
from .cuda import uuid_of

_POWER_CAP = 0x4
GPM_REFRESH_S = 0.1
"""A sample has the counters of the last refresh (seen on an H100: nvml.h gives no figure)."""
STREAM_SHARE = 0.9
"""Attained bandwidth over the theoretical maximum, as in `truth.py`."""
_WINDOW_S = 1 / 6
"""Utilisation covers the last 1/6 s to 1 s (nvml.h, nvmlUtilization_t)."""


def answers(cards: Sequence[Card]) -> Any:
    by_uuid = {f"GPU-{uuid_of(card)}": card for card in cards}

    def processes(card: Card) -> list[Any]:
        return [types.SimpleNamespace(pid=pid) for pid in (os.getpid(), *range(1, 1 + card.truth.other_processes))]

    def reasons(card: Card) -> int:
        return 0 if card.core.clock_share == 1.0 else _POWER_CAP

    def power_mw(card: Card) -> int:
        """Return the power limit if it limits the clock, else nine tenths of it while busy, as in the energy."""
        busy = 200 + 700 * card.core.active_share(_WINDOW_S)
        return round(card.truth.power_w * (1000 if reasons(card) else busy))

    def limit_mw(card: Card) -> int:
        return round(card.truth.power_w * 1000)

    def counted(card: Card, _sample: Any) -> tuple[Card, float, float, float, float]:
        """What a GPM sample holds: a time, and busy seconds, seconds of arithmetic and bytes until then.

        With a log of kernels it is as old as the last refresh; without one it is new.
        """
        if card.log is None:
            return card, card.host.now_s, card.core.busy_s, card.core.computing_s, card.core.memory_bytes
        at_s = math.floor(card.host.now_s / GPM_REFRESH_S) * GPM_REFRESH_S
        run = [(min(1.0, (at_s - each.start_s) / each.duration_s), each) for each in card.log if each.start_s < at_s]
        busy_s = sum(share * each.duration_s for share, each in run)
        return card, at_s, busy_s, 0.0, sum(share * each.memory_bytes for share, each in run)

    def metrics(request: Any) -> None:
        card, *before = request.sample1
        seconds, busy_s, computing_s, nbytes = (b - a for a, b in zip(before, request.sample2[1:], strict=True))
        peak = card.truth.bytes_per_s / STREAM_SHARE
        shares = {2: busy_s / seconds, 5: computing_s / seconds, 10: nbytes / seconds / peak}
        for metric in request.metrics[: request.numMetrics]:
            metric.value, metric.nvmlReturn = 100 * shares[metric.metricId], 0

    gpm = {"SM_UTIL": 2, "ANY_TENSOR_UTIL": 5, "DRAM_BW_UTIL": 10}
    return types.SimpleNamespace(
        **{f"NVML_GPM_METRIC_{name}": number for name, number in gpm.items()},
        **{name: kind for name, kind in vars(pynvml).items() if name.startswith("NVMLError")},
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        NVML_GPM_METRICS_GET_VERSION=1,
        nvmlInit=lambda: None,
        nvmlGpmSampleAlloc=lambda: None,
        nvmlGpmSampleFree=lambda sample: None,
        nvmlGpmSampleGet=counted,
        nvmlGpmMetricsGet=metrics,
        c_nvmlGpmMetricsGet_t=lambda: types.SimpleNamespace(metrics=[types.SimpleNamespace() for _ in range(3)]),
        nvmlGpmQueryDeviceSupport=lambda card: types.SimpleNamespace(
            isSupportedDevice=int(card.truth.capability >= (9, 0))
        ),
        nvmlDeviceGetHandleByUUID=by_uuid.__getitem__,
        nvmlSystemGetDriverVersion=lambda: "580.00",
        nvmlSystemGetCudaDriverVersion=lambda: 13000,
        nvmlDeviceGetClockInfo=lambda card, kind: round(card.truth.clock_hz * card.core.clock_share / 1e6),
        nvmlDeviceGetCurrentClocksEventReasons=reasons,
        nvmlDeviceGetPowerUsage=power_mw,
        nvmlDeviceGetEnforcedPowerLimit=limit_mw,
        nvmlDeviceGetPowerManagementDefaultLimit=limit_mw,
        nvmlDeviceGetUtilizationRates=lambda card: types.SimpleNamespace(
            gpu=round(100 * card.core.active_share(_WINDOW_S)), memory=round(50 * card.core.active_share(_WINDOW_S))
        ),
        nvmlDeviceGetTemperature=lambda card, kind: 60,
        nvmlDeviceGetMemoryInfo=lambda card: types.SimpleNamespace(
            used=card.memory.total_bytes - card.memory.driver_free
        ),
        nvmlDeviceGetComputeRunningProcesses=processes,
        nvmlDeviceGetTotalEnergyConsumption=lambda card: round(
            1e3 * card.truth.power_w * (0.2 * card.host.now_s + 0.7 * card.core.busy_s)
        ),
    )
