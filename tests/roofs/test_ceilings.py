"""The probes with a fake clock, and once for real."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from clocks import FakeClock
from profiler.hardware import ceilings

from profiler.machine.device import Device, describe
from profiler.machine.memory import page_faults
from profiler.machine.telemetry import NoSource, Reading

CPU = torch.device("cpu")
SMALL = Device("cpu", "fake", 1 << 30, 1 << 20, 1, "none", None)


def test_rates_are_work_over_the_clocks_time() -> None:
    roofs = ceilings.measure(CPU, SMALL, ["float32"], model_dtype="float32", clock=FakeClock(), stage_budget_s=0.05)
    # A fake call takes 1 s, so that a rate is the work of one call: 2 n^3 FLOPs, and the buffer's bytes.
    size = int(roofs.compute["float32"].method.split("x")[0])
    assert roofs.compute["float32"].per_s == 2 * size**3
    assert roofs.memory["read"].per_s == roofs.stream_bytes
    assert roofs.memory["copy"].per_s == pytest.approx(2 / 3 * roofs.stream_bytes, rel=1e-6)
    assert roofs.memory["triad"].per_s == pytest.approx(roofs.stream_bytes, rel=1e-6)
    assert roofs.beyond_cache


class Ticking(NoSource):
    """A device whose clock is 1.2 GHz in the first look and 1.0 GHz ever after."""

    def __init__(self) -> None:
        self._clocks = itertools.chain([1.2e9], itertools.repeat(1.0e9))

    def read(self) -> Reading:
        return Reading(clock_hz=next(self._clocks))


def test_each_probe_knows_the_clock_it_ran_at() -> None:
    roofs = ceilings.measure(CPU, SMALL, ["float32"], model_dtype="float32", stage_budget_s=0.5, source=Ticking())
    assert all(roof.clock_hz == 1.0e9 for roof in (roofs.memory["gemv float32"], *roofs.compute.values()))
    silent = ceilings.measure(CPU, SMALL, ["float32"], model_dtype="float32", stage_budget_s=0.1, source=NoSource())
    assert silent.compute["float32"].clock_hz is None


def test_fresh_pages_are_counted_and_have_a_price() -> None:
    """A fresh buffer of 64 MiB touches all its pages, of 4 KiB or of 2 MiB each; zeroing them takes time."""
    before = page_faults()
    buffer = torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
    assert page_faults() - before >= 32
    before = page_faults()
    buffer.fill_(2)
    assert page_faults() - before < 32
    assert 0 < ceilings.measure(CPU, SMALL, [], model_dtype="float32", stage_budget_s=0.05).page_fault_s < 1e-2


def test_roofs_from_a_busy_minute_are_not_kept() -> None:
    """What was kept at half of today's speed is measured again; what still stands is taken as it is."""
    first = ceilings.measure(CPU, SMALL, ["float32"], model_dtype="float32", stage_budget_s=0.3)

    def again(slower: float) -> ceilings.Ceilings:
        memory = {name: replace(roof, per_s=roof.per_s / slower) for name, roof in first.memory.items()}
        known = replace(first, memory=memory)
        return ceilings.measure(CPU, SMALL, ["float32"], model_dtype="float32", stage_budget_s=0.3, known=known)

    assert again(2.0).measured_at_unix_s > first.measured_at_unix_s
    assert again(0.5).measured_at_unix_s == first.measured_at_unix_s


def test_a_slow_product_does_not_eat_the_budget() -> None:
    """A dtype without a fast kernel must not climb to sizes that take minutes."""
    calls: list[int] = []
    original = ceilings._square_product

    def counted(device: torch.device, dtype: str, size: int):  # type: ignore[no-untyped-def]
        calls.append(size)
        return original(device, dtype, size)

    ceilings._square_product = counted
    try:
        ceilings._gemm(CPU, "float32", FakeClock(), 0.05)
    finally:
        ceilings._square_product = original
    assert calls == [256]  # one call already took a (fake) second


def test_real_roofs_hold_a_minute_later() -> None:
    """A large product and a stream, timed by hand, against the roofs just measured."""
    import statistics
    import time

    info = describe(CPU)
    roofs = ceilings.measure(CPU, info, ["float32"], model_dtype="float32", stage_budget_s=1.0)
    x, w = torch.randn(2048, 2048), torch.randn(2048, 2048)
    data = torch.rand(roofs.stream_bytes // 4)

    def timed(call, repeats: int) -> float:  # type: ignore[no-untyped-def]
        call()
        seconds = []
        for _ in range(repeats):
            before = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - before)
        return statistics.median(seconds)

    gemm = 2 * 2048**3 / timed(lambda: torch.nn.functional.linear(x, w), 10)
    stream = roofs.stream_bytes / timed(data.sum, 10)
    # Wider than a quiet machine needs (0.85 to 1.05): the suite also runs on shared cores.
    assert 0.6 < gemm / roofs.compute_flops_per_s("float32") < 1.3
    assert 0.6 < stream / roofs.memory["read"].per_s < 1.3
