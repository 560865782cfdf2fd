"""An H100 with hosts of known speed: which of them waits, for each engine, and the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.facts.change_ids import ChangeId

from .oracle import Phase
from .scenario import SAVE_THE_HOST, Scenario, first_change, held, said
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
        assert row["regime"] in expected, f"{phase.phase} {phase.batch_size}: {row['regime']}"
        if phase.batch_size == 8:  # no larger batch was measured
            waits = expected in ({"overhead-bound"}, {"mixed"})
            effect = first_change(run, row)  # compiled code also saves small kernels, a graph only what the host adds
            assert effect in SAVE_THE_HOST if waits else effect is not ChangeId.GRAPH
