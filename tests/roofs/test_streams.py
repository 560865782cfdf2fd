"""Streams over memories with known caches: the memory roof is that of the memory, not of a cache."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from memories import SimulatedMachine, SimulatedMemory

from profiler.roofs.bandwidth import measure_streams
from profiler.run.warnings import roof_warnings

MIB = 1 << 20


def cached(cache_bytes: int, cache_bytes_per_s: float, memory_bytes_per_s: float) -> Callable[[int], float]:
    """A least-recently-used cache, which serves all of a buffer that fits, and nothing of a larger one."""
    return lambda nbytes: cache_bytes_per_s if nbytes <= cache_bytes else memory_bytes_per_s


def falling(nbytes: int) -> float:
    """A cache shared with neighbours: 133, 111 and 91 GB/s at 64, 128 and 256 MiB, and flat from 1 GiB on."""
    steps = {64: 133e9, 128: 111e9, 256: 91e9, 512: 75e9}
    return next((per_s for size, per_s in steps.items() if nbytes <= size * MIB), 62e9)


@pytest.mark.parametrize(
    ("bytes_per_s", "memory_bytes_per_s", "stream_mib"),
    [
        (cached(MIB, 200e9, 40e9), 40e9, 512),  # a flat memory is done with two sizes
        pytest.param(falling, 62e9, 2048, marks=pytest.mark.slow),  # a curve that falls is followed to its plateau
        # An MI300X reports 4 MiB and has another cache of 256 MiB, about three times as fast as its memory. All rates
        # are a hundred times lower here, so the test needs fewer calls.
        (cached(256 * MIB, 120e9, 42e9), 42e9, 1024),
    ],
    ids=["flat", "falling", "an untold cache"],
)
def test_the_curve_is_followed_to_its_plateau(
    bytes_per_s: Callable[[int], float], memory_bytes_per_s: float, stream_mib: int
) -> None:
    """STREAM's rule counts all that a kernel touches: two buffers for a copy, three for a triad."""
    with SimulatedMemory(bytes_per_s) as memory:
        found = measure_streams(SimulatedMachine(memory), 1.5)
    assert [found.memory[name].per_s for name in ("read", "copy", "triad")] == [pytest.approx(memory_bytes_per_s)] * 3
    for operation in ("sum", "copy_", "add"):
        assert max(memory.footprints[operation]) == pytest.approx(found.stream_bytes, rel=1e-6)
    assert (found.stream_bytes, found.plateau, found.beyond_cache) == (stream_mib * MIB, True, True)
    assert roof_warnings(found) == []


def random_replacement(cache_bytes: int, times: float, memory_bytes_per_s: float) -> Callable[[int], float]:
    """A cache with random replacement, `times` as fast as its memory.

    It keeps the share h = exp(-(1 - h) N / C) of a buffer that is read repeatedly.
    """

    def per_s(nbytes: int) -> float:
        hits = 0.0 if nbytes > cache_bytes else 1.0
        for _ in range(200):
            hits = hits if nbytes <= cache_bytes else math.exp(-(1 - hits) * nbytes / cache_bytes)
        return memory_bytes_per_s / (hits / times + 1 - hits)

    return per_s


@pytest.mark.parametrize(
    ("bytes_per_s", "warns"),
    [(cached(MIB, 200e9, 25e9), False), (random_replacement(480 * MIB, 3.0, 25e9), True)],
    ids=["a neighbour's cache", "its own cache"],
)
def test_two_equal_sizes_past_a_large_cache_show_that_it_serves_nothing(
    bytes_per_s: Callable[[int], float], warns: bool
) -> None:
    """A CPU reports its socket's 480 MiB, of which it may have almost nothing.

    There is time for 1 GiB, not for 4 x 480 MiB.
    """
    with SimulatedMemory(bytes_per_s) as memory:
        found = measure_streams(SimulatedMachine(memory, 16 << 30, cache_bytes=480 * MIB), 1.5)
    assert found.stream_bytes == 1024 * MIB
    assert bool(roof_warnings(found)) == warns
