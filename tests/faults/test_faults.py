"""Every condition holds after each fault of a sample, and a planted silent loss breaks one of them.

All faults: python -m tests.faults
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_samples import read_records
from simulated.native import why_not

from profiler.run.stages import Stages

from .campaign import Recorded, recorded
from .oracles import Case, failures
from .sites import Injection
from .trial import SCENARIOS, ran

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


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A run of four cells without a fault."""
    folder = tmp_path_factory.mktemp("known")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield recorded(SCENARIOS["eager"], folder)


def kernel(known: Recorded, kind: str, stage: str, cell: str = "") -> Injection:
    """Return a fault of the first kernel in a stage, or in a cell of it."""
    site, number = next(
        (call.site, call.number)
        for call in known.base.calls
        if (call.site.api, call.stage) == ("kernel", stage) and cell in ("", call.cell)
    )
    return Injection(site, number, kind, "once", "eager")


@pytest.mark.ci
def test_a_planted_silent_loss_is_detected(known: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel fails once during replays, and the run reports it. The planted loss suppresses that report."""
    fault = kernel(known, "passing", "replays")
    assert known.tried(fault).failures == ()
    monkeypatch.setattr(Stages, "miss", lambda *_: None)
    assert "loses_nothing_in_silence" in {failure.partition(":")[0] for failure in known.tried(fault).failures}


@pytest.mark.ci
def test_a_card_that_is_lost(known: Recorded, tmp_path: Path) -> None:
    """The context breaks for good in one of four cells, as after an Xid: every call gives the same error.

    https://docs.nvidia.com/cuda/cuda-runtime-api, cudaErrorLaunchFailure: the process must be ended. Measured cells
    stay, the folder and the screen report the loss, and a resume finishes the run.
    """
    fault = kernel(known, "sticky", "timing", cell="eager/2/32")
    first = ran(known.played, known.model, tmp_path, fault)
    before = (tmp_path / "samples.jsonl").read_text()
    resumed = ran(known.played, known.model, tmp_path, resume=True)
    assert failures(Case(fault, known.base, first, resumed)) == []
    assert first.code == 2
    assert not first.folder.document["finished"]
    assert any("illegal memory access" in line for line in first.folder.document["warnings"])
    assert "illegal memory access" in first.err
    measured = {key for key, row in first.folder.rows.items() if row["status"] == "ok"}
    assert 0 < len(measured) < len(known.base.folder.rows)
    assert (tmp_path / "samples.jsonl").read_text().startswith(before)
    visits = [(one["prompt_len"], one["batch_size"], one["round"]) for one in read_records(tmp_path) if "round" in one]
    assert len(visits) == len(set(visits))
