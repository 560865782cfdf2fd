"""Verdicts on known kernels on this machine, the effect of a wrong roof, and the time that slow kernels lose."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from docs.schemas import assert_follows
from hurry import with_effort
from machines import HOST

from profiler.checks.selftest import run_selftest
from profiler.device.clock import time_calls
from profiler.facts.roofs import Ceilings
from profiler.judge.breakdown import TERMS
from profiler.roofs.measure import measure

pytestmark = [pytest.mark.timing, pytest.mark.slow]


@pytest.fixture(scope="module")
def roofs() -> Ceilings:
    return measure(HOST, ["float32"], model_dtype="float32")


LABELS = {
    *((regime, "") for regime in ("compute-bound", "memory-bound", "overhead-bound", "mixed", "link-bound")),
    *(("kernel-bound", cause) for cause in ("kernels below the roof", "dequantisation")),
}


def test_every_known_kernel_gets_its_label_or_none(
    roofscope,  # type: ignore[no-untyped-def]
    roofs: Ceilings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a shared machine a label may be missing, but it is never a wrong one."""
    monkeypatch.setattr("profiler.roofs.measure.measure", lambda *_, **__: roofs)
    with_effort(monkeypatch, selftest_s=1.5)
    done = roofscope("selftest", "--format", "json")
    kernels = json.loads(done.out)
    assert_follows("selftest", kernels)
    assert {(item["expected"], item["expected_cause"]) for item in kernels} == LABELS
    for item in kernels:
        assert item["regime"] in (item["expected"], "inconclusive"), item
        assert item["cause"] in (item["expected_cause"], ""), item
        assert sum(item["split"][term] for term in TERMS) == pytest.approx(item["latency_s"], rel=1e-9)
    assert done.code == (0 if all(item["right"] for item in kernels) else 3)


def test_wrong_roofs_move_the_verdict(roofs: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    """With three times the memory roof and four times the compute roof, no kernel reaches a roof."""
    with_effort(monkeypatch, selftest_s=1.5)
    faster = replace(
        roofs,
        memory={name: replace(roof, per_s=3 * roof.per_s) for name, roof in roofs.memory.items()},
        compute={name: replace(roof, per_s=4 * roof.per_s) for name, roof in roofs.compute.items()},
    )
    labels = {result.name: result.regime for result in islice(run_selftest(HOST, faster), 2)}
    assert labels["a stream past every cache"] == "inconclusive"
    assert labels["a large matrix product"] == "inconclusive"


def test_better_kernels_recover_the_time_that_slow_ones_lose() -> None:
    """As kernel-bound predicts, the products take at most half as long in one call, or with unpacked weights."""
    rows, weight = torch.randn(16, 4096), torch.randn(4096, 4096)
    packed = torch.randint(-127, 128, (4096, 4096), dtype=torch.int8)

    def fastest_s(call: Callable[[], object]) -> float:
        return min(time_calls(call, HOST.clock, 9))

    # The product of the transposes has the same 16 x 4096 x 4096 multiplications.
    one_call_s = min(fastest_s(lambda: F.linear(rows, weight)), fastest_s(lambda: weight @ rows.t()))
    assert fastest_s(lambda: [F.linear(row, weight) for row in rows]) > 2 * one_call_s
    assert fastest_s(lambda: F.linear(rows[0], packed.float() * 0.5)) > 2 * fastest_s(lambda: F.linear(rows[0], weight))


def test_ceilings_command(roofscope, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    with_effort(monkeypatch, roof_s=0.1, host_pace_s=0.1)
    document = json.loads(roofscope("ceilings", "--format", "json").out)
    assert_follows("ceilings", document)
    assert {"float32", "bfloat16", "float16", "int8"} <= set(document["compute"])
    assert {"read", "copy", "triad", "gemv"} <= set(document["memory"])
    assert 1e-8 < document["launch"]["submit_s"] < 1e-3
    # A step of thirty layers calls hundreds of operators: between 0.1 ms and 1 s on any host.
    assert 1e-4 < document["host"]["step_s"] < 1
    assert document["host_index"] == document["host"]["step_s"] / document["reference_host"]["step_s"]
