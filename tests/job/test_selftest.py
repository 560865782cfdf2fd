"""The verdicts on known kernels, on this machine; and that a wrong roof is found out."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from machines import HOST

from profiler.job.selftest import run_selftest
from profiler.roofs.measure import measure
from profiler.roofs.values import Ceilings

pytestmark = pytest.mark.timing


@pytest.fixture(scope="module")
def roofs() -> Ceilings:
    return measure(HOST, ["float32"], model_dtype="float32")


@pytest.mark.slow
def test_every_known_kernel_gets_its_label(roofscope) -> None:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    done = roofscope("selftest", "--format", "json")
    assert time.perf_counter() - start < 30
    labels = {item["expected"]: item["regime"] for item in json.loads(done.out)}
    assert labels == {name: name for name in ("compute-bound", "memory-bound", "overhead-bound", "mixed")}
    assert done.code == 0


def test_wrong_roofs_move_the_verdict(roofs: Ceilings) -> None:
    """Were memory three times as fast and compute four times, nothing here would reach a roof."""
    faster = replace(
        roofs,
        memory={name: replace(roof, per_s=3 * roof.per_s) for name, roof in roofs.memory.items()},
        compute={name: replace(roof, per_s=4 * roof.per_s) for name, roof in roofs.compute.items()},
    )
    labels = {result.name: result.verdict.regime for result in run_selftest(HOST, faster)}
    assert labels["a stream past every cache"] != "memory-bound"
    assert labels["a large matrix product"] != "compute-bound"


def test_roofs_and_curve(roofs: Ceilings) -> None:
    """A working set that a cache holds is read faster than memory; one past every cache is not."""
    small, large = 1 << 20, roofs.stream_bytes
    assert roofs.memory_bytes_per_s_for(large * 2) == roofs.memory_bytes_per_s
    assert roofs.memory_bytes_per_s_for(small) >= roofs.memory_bytes_per_s_for(large)
    assert not roofs.cache_resident(large)
    sizes = [point.nbytes for point in roofs.curve]
    assert sizes == sorted(sizes)
    assert sizes[0] == 1 << 20


def test_ceilings_command(roofscope, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    import profiler.roofs.measure as module

    monkeypatch.setattr(module, "STAGE_BUDGET_S", 0.05)
    monkeypatch.setattr(module.measure, "__kwdefaults__", {**module.measure.__kwdefaults__, "stage_budget_s": 0.1})
    document = json.loads(roofscope("ceilings", "--format", "json").out)
    assert {"float32", "bfloat16", "float16", "int8"} <= set(document["compute"])
    assert {"read", "copy", "triad", "gemv"} <= set(document["memory"])
    assert 1e-8 < document["launch"]["submit_s"] < 1e-3


def test_gpus_command(roofscope) -> None:  # type: ignore[no-untyped-def]
    listed = {gpu["gpu"]: gpu for gpu in json.loads(roofscope("gpus", "--format", "json").out)}
    assert len(listed) >= 35
    assert listed["H100 SXM"]["ridge_flops_per_byte"]["bfloat16"] == pytest.approx(295.3, abs=0.1)
    table = roofscope("gpus").out
    assert "A100 80GB SXM" in table
    assert max(map(len, table.splitlines())) <= 100
