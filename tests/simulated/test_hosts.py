"""An H100 with hosts of known speed: which of them waits, for each engine, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from profiler.judge.breakdown import TERMS

from .oracle import Phase
from .scenario import REST, SAVE_THE_HOST, Scenario, first_change, held, said
from .truth import H100

pytestmark = pytest.mark.slow

HOSTS = {"slow": 40e-6, "middling": 7e-6, "fast": 2e-6}


def by_arithmetic(phase: Phase, launch_s: float) -> set[str]:
    """Return the possible labels, computed from launches and kernels.

    A host that takes twice as long as its card idles it for half of the step. A host that takes less than the card has
    no effect. In between, a graph gains something, but less than half. Near a tie, either label may apply.
    """
    host_s = phase.launches * launch_s
    by_card = {"prefill": "compute-bound", "decode": "memory-bound"}[phase.phase]
    if host_s > 2 * phase.device_s:
        return {"overhead-bound"}
    if host_s > 1.25 * phase.device_s:
        return {"mixed"}
    return {by_card} if host_s < 0.8 * phase.device_s else {by_card, "mixed"}


@pytest.mark.parametrize(
    ("engine", "host"),
    [*(("eager", host) for host in HOSTS), ("static", "fast"), ("compile", "middling"), ("graph", "slow")],
)
def test_the_verdict_follows_the_host(engine: str, host: str, tmp_path: Path) -> None:
    """A step of 4 layers of Mistral-7B on an H100 has 180 launches and 0.9 ms of kernels. A graph has one launch."""
    truth = H100.but(launch_s=HOSTS[host])
    scenario = Scenario("mistral-7b-v0.3", 4, engine=engine, prompt_lens=[512], batch_sizes=[1, 8])
    run, _ = said(scenario, [truth], tmp_path)
    for phase, row in held(scenario, truth, run, tmp_path):
        expected = by_arithmetic(phase, truth.launch_s)
        assert {phase.regime, row["regime"]} <= expected, f"{phase.phase} {phase.batch_size}: {row['regime']}"
        if phase.batch_size == 8:  # no larger batch was measured
            waits = expected in ({"overhead-bound"}, {"mixed"})
            assert (first_change(run, row) in SAVE_THE_HOST) == waits


def test_llm_int8_waits_in_every_linear(tmp_path: Path) -> None:
    """bitsandbytes reads in every linear whether a column has an outlier, so no graph can contain such a step.

    The kernels are replayed without that read: their time is the card's, and the rest is the host's.
    """
    scenario = Scenario("mistral-7b-v0.3", 2, quant="int8", engine="eager,graph", prompt_lens=[128], batch_sizes=[1, 4])
    run, _ = said(scenario, [H100], tmp_path)
    cells = run.cells
    assert set(cells[cells["engine"] == "graph"]["status"]) == {"failed"}
    for phase, row in held(replace(scenario, engine="eager"), H100, run, tmp_path):
        cell = f"{phase.phase} {phase.batch_size}"
        assert row["regime"] == phase.regime == "overhead-bound", cell
        assert min(row[name] for name in TERMS) > -REST * phase.latency_s, cell
