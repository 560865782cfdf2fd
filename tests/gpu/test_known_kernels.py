"""Known kernels on this CPU and on simulated cards, the effect of wrong roofs, and the time that slow kernels lose."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from unittest import mock

import pytest
import torch
from claims.kernels import UNKNOWN, judged_kernels
from machines import HOST
from simulated.truth import H100, RTX_4090, Truth
from simulated.world import simulated

from profiler.device.machine import machine_for
from profiler.facts.roofs import Ceilings
from profiler.judge.breakdown import TERMS
from profiler.roofs.measure import measure

LABELS = [
    "compute-bound", "memory-bound", "mixed", "overhead-bound", "overhead-bound",
    "kernel-bound, kernels below the roof", "kernel-bound, dequantisation", "link-bound",
]  # fmt: skip


@pytest.fixture(scope="module")
def roofs() -> Ceilings:
    return measure(HOST, ["float32"], model_dtype="float32")


@pytest.mark.timing
@pytest.mark.slow
def test_every_known_kernel_gets_its_label_or_none(roofs: Ceilings) -> None:
    """On a shared machine a label may be missing, but it is never a wrong one."""
    found = list(judged_kernels(HOST, roofs, seconds=1.5))
    assert [item.kernel.label for item in found] == LABELS
    assert [(item.kernel.name, item.label, item.rounds) for item in found if item.is_wrong] == []
    for item in found:
        assert sum(getattr(item.split, term) for term in TERMS) == pytest.approx(item.split.latency_s, rel=1e-9)


@pytest.mark.timing
@pytest.mark.slow
def test_wrong_roofs_move_the_verdict(roofs: Ceilings) -> None:
    """With three times the memory roof and four times the compute roof, no kernel reaches a roof."""
    faster = replace(
        roofs,
        memory={name: replace(roof, per_s=3 * roof.per_s) for name, roof in roofs.memory.items()},
        compute={name: replace(roof, per_s=4 * roof.per_s) for name, roof in roofs.compute.items()},
    )
    assert [item.label for item in islice(judged_kernels(HOST, faster, seconds=1.5), 2)] == [UNKNOWN, UNKNOWN]


# A B200 has 126 MiB of L2 and 8 TB/s (NVIDIA's datasheet), an RTX 4090 72 MiB.
_B200 = H100.but(bytes_per_s=7.2e12, l2_bytes=126 << 20, l2_bytes_per_s=20e12)


@pytest.mark.slow
@pytest.mark.parametrize("truth", [RTX_4090.but(launch_s=20e-6), _B200.but(launch_s=8e-6)], ids=["RTX 4090", "B200"])
def test_no_cache_hides_the_weights_of_a_known_kernel(truth: Truth) -> None:
    """The 64 MiB of a 4096 x 4096 matrix in float32 fit in both caches: sixteen rows of it would wait for the host."""
    brief = {"CHAIN": 200, "LOOK_S": 1e-3, "LEAST_ROUNDS": 2, "MOST_ROUNDS": 2}
    with simulated(truth), mock.patch.multiple("claims.kernels", **brief):
        machine = machine_for(torch.device("cuda", 0))
        ceilings = measure(machine, ["float32"], model_dtype="float32", stage_budget_s=0.1)
        found = list(judged_kernels(machine, ceilings))
    assert [(item.kernel.name, item.label) for item in found if item.label != item.kernel.label] == []
