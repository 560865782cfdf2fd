"""The boundary of the rule for room on simulated GPUs: what fits by the rule runs, what does not is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from .native import why_not
from .scenario import Scenario, said, so
from .truth import A100, T4, Truth

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.mark.parametrize("truth", [A100, T4], ids=["fused attention", "math attention"])
@pytest.mark.parametrize(("free", "fits"), [(1.03, True), (0.99, False)])
def test_the_boundary_is_within_3_percent_of_the_true_peak(
    truth: Truth, free: float, fits: bool, tmp_path: Path
) -> None:
    """A cell with 3 % more free memory than its true peak runs; with 1 % less it is refused before it is tried."""
    scenario = Scenario("mistral-7b-v0.3", 2, prompt_lens=[512], batch_sizes=[1, 256], new_tokens=4)
    peak = max(phase.peak_bytes for phase in so(scenario, truth, tmp_path))
    run, _ = said(scenario, [truth.but(memory_bytes=int(free * peak) + truth.taken_bytes)], tmp_path)
    prefills = run.cells[run.cells["phase"] == "prefill"].set_index("batch_size")["status"]
    assert prefills[1] == "ok"
    assert prefills[256] == ("ok" if fits else "skipped")
