"""Every condition holds after each fault of a sample, and a planted silent loss breaks one of them.

All faults: python -m tests.faults
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated.native import why_not

from profiler.run.stages import Stages

from .campaign import recorded
from .sites import Injection
from .trial import SCENARIOS, tried

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

SAMPLE, SEED = 16, 0


def test_a_sample_of_faults() -> None:
    """A separate process forks without threads, so it can start each fault from the same state."""
    command = [sys.executable, "-m", "tests.faults", "--sample", str(SAMPLE), "--seed", str(SEED)]
    asked = [*command, "--scenarios", "eager,graph,nf4"]
    root = Path(__file__).parents[2]
    done = subprocess.run(asked, cwd=root, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"{SAMPLE} faults, 0 after which something does not hold" in done.stdout


@pytest.mark.ci
def test_a_planted_silent_loss_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel fails once during replays, and the run reports it. The planted loss suppresses that report."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known = recorded(SCENARIOS["eager"], tmp_path)
    [call, *_] = [call for call in known.base.calls if call.site.api == "kernel" and call.stage == "replays"]
    fault = Injection(call.site, call.number, "passing", "once", "eager")
    assert tried(fault, known.played, known.model, known.base).failures == ()
    monkeypatch.setattr(Stages, "miss", lambda *_: None)
    caught = {failure.partition(":")[0] for failure in tried(fault, known.played, known.model, known.base).failures}
    assert "loses_nothing_in_silence" in caught
