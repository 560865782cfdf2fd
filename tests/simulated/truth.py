"""The truth of a simulated card and its host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True)
class Throttle:
    """After some busy seconds the clock falls to a share of itself."""

    after_busy_s: float = math.inf
    share: float = 1.0


@dataclass(frozen=True)
class PowerCap:
    """After some seconds of arithmetic the clock falls to a share of itself.

    It recovers after the same time of other work or rest. Matmuls draw all the power of the card, streams do not.
    """

    after_computing_s: float = math.inf
    share: float = 1.0
    dip_share: float = 1.0
    """The share to which it falls first."""
    settles_s: float = 0.0
    """The time constant with which it then reaches `share`; 0: at once. An H100 took about 0.1 s."""


@dataclass(frozen=True)
class Truth:
    """The truth of a card. Speeds are attained ones, not a datasheet's."""

    name: str
    capability: tuple[int, int]
    processors: int
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """FLOP/s by the dtype of a matmul's operands; `tfloat32` if float32 may be rounded."""
    l2_bytes: int
    l2_bytes_per_s: float
    l2_writes_back: bool = False
    """Whether a write larger than the L2 leaves its end there; other data that needs the space then waits for it."""
    launch_s: float = 7e-6
    """Seconds of the host per kernel, with Python."""
    host_operator_s: float = 1e-6
    """Seconds of the host per operator on its own small tensors."""
    event_s: float = 1e-6
    graph_launch_s: float = 10e-6
    plan_s: float = 0.0
    """Seconds of the host to plan attention of a shape that is new to cuDNN, on cards of capability 9.x and 10.x."""
    smallest_kernel_s: float = 2e-6
    link_bytes_per_s: float = 25e9
    """Bytes/s from pinned host memory over PCIe; ordinary memory reaches `pageable_share` of it."""
    pageable_share: float = 0.5
    clock_hz: float = 1.5e9
    power_w: float = 300.0
    throttle: Throttle = Throttle()
    power_cap: PowerCap = PowerCap()
    other_processes: int = 0
    taken_bytes: int = 300 << 20
    """Bytes that the driver's context and other processes take."""
    kernel_share: Mapping[str, float] = field(default_factory=dict)
    """Share of its ceiling that a kernel reaches, by a part of its operator's name; others reach all of it."""
    torch_version: tuple[int, int] = (2, 13)
    """The torch release that decides the state after a failed capture (`card`): 2.11 or older, 2.12, 2.13, 2.14."""

    def but(self, **changes: Any) -> Truth:
        return replace(self, **changes)


# Dense peaks and bandwidths of NVIDIA's datasheets, times 0.85 (matmuls) and 0.9 (streams): such cards attain about
# these speeds. L2 sizes are those that their drivers report.
H100 = Truth(
    "NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * GIB, 3.0e12,
    {"float16": 8.4e14, "bfloat16": 8.4e14, "float32": 5.7e13, "tfloat32": 4.2e14, "int8": 1.6e15, "float8": 1.6e15},
    50 << 20, 9.0e12, l2_writes_back=True, smallest_kernel_s=1.5e-6, link_bytes_per_s=50e9, clock_hz=1.98e9,
    power_w=700.0,
)  # fmt: skip
A100 = Truth(
    "NVIDIA A100-SXM4-40GB", (8, 0), 108, 40 * GIB, 1.4e12,
    {"float16": 2.65e14, "bfloat16": 2.65e14, "float32": 1.66e13, "tfloat32": 1.33e14, "int8": 5.3e14},
    40 << 20, 4.5e12, l2_writes_back=True, clock_hz=1.41e9, power_w=400.0,
)  # fmt: skip
T4 = Truth(
    "Tesla T4", (7, 5), 40, 15 * GIB, 2.7e11,
    {"float16": 4.5e13, "bfloat16": 3.0e12, "float32": 6.9e12, "int8": 9.0e13},
    4 << 20, 1.0e12, launch_s=10e-6, smallest_kernel_s=3e-6, link_bytes_per_s=12e9, clock_hz=1.59e9, power_w=70.0,
)  # fmt: skip
RTX_4090 = Truth(
    "NVIDIA GeForce RTX 4090", (8, 9), 128, 24 * GIB, 9.2e11,
    {"float16": 1.4e14, "bfloat16": 1.4e14, "float32": 7.0e13, "tfloat32": 7.0e13, "int8": 5.6e14, "float8": 2.8e14},
    72 << 20, 4.0e12, l2_writes_back=True, clock_hz=2.52e9, power_w=450.0,
)  # fmt: skip
# What the committed runs of an H200 measured; cuDNN planned its attention of each new shape in 37 ms there.
H200 = Truth(
    "NVIDIA H200", (9, 0), 132, 150_109_880_320, 4.39e12,
    {"float16": 6.8e14, "bfloat16": 6.8e14, "float32": 5.0e13, "tfloat32": 3.4e14, "int8": 1.3e15, "float8": 1.3e15},
    60 << 20, 1.3e13, l2_writes_back=True, launch_s=7.5e-6, plan_s=37e-3, smallest_kernel_s=1.04e-6,
    link_bytes_per_s=50e9, clock_hz=1.98e9, power_w=700.0,
)  # fmt: skip
CAPPED_SHARE = 0.89


def capped(settles_s: float) -> Truth:
    """Return an H100 under its power limit: 780 TFLOP/s for 20 ms, then 562 for about 50 ms, 692 to 700 after that."""
    return H100.but(power_cap=PowerCap(after_computing_s=0.02, share=CAPPED_SHARE, dip_share=0.72, settles_s=settles_s))
