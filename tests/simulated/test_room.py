"""The boundary of the rule for room on simulated GPUs: what fits by the rule runs, what does not is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from .native import why_not
from .scenario import Scenario, said, so
from .truth import A100, GIB, T4, Truth

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


LOST = 2.5 * 16 * 512 * 14336 * 2
"""Bytes that are free in pieces: 2.5 outputs of the widest matmul, in 16 bits, of 16 sequences of 512 tokens."""
PROBE = 270_000_000
"""The profiler's own buffers: 256 MiB of the drift probe, and some that are small."""


@pytest.mark.parametrize("truth", [A100, T4], ids=["fused attention", "math attention"])
def test_what_fits_by_the_rule_runs_and_what_does_not_is_refused(truth: Truth, tmp_path: Path) -> None:
    """The rule adds 2.5 outputs and 2 % to the true peak: a cell with that memory runs, one with 1 % less than its peak
    is refused before it is tried."""
    scenario = Scenario("mistral-7b-v0.3", 16, prompt_lens=[512], batch_sizes=[1, 16], new_tokens=4)
    known = so(scenario, truth.but(memory_bytes=80 * GIB), tmp_path)
    peak = max(phase.peak_bytes for phase in known)
    for name, free_bytes, status in (("fits", 1.01 * (peak + LOST) / 0.98, "ok"), ("refused", 0.99 * peak, "skipped")):
        gpu = truth.but(memory_bytes=int(free_bytes) + PROBE + truth.taken_bytes)
        run, _ = said(scenario, [gpu], tmp_path, out=tmp_path / name)
        prefills = run.cells[run.cells["phase"] == "prefill"].set_index("batch_size")["status"]
        assert prefills[1] == "ok"
        assert prefills[16] == status
