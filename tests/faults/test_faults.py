"""A planted silent loss is detected, and a run on a card that is lost keeps its cells. All: python -m tests.faults"""

from __future__ import annotations

from pathlib import Path

import pytest
from raw_samples import read_records
from simulated.native import why_not

from profiler.run.stages import Stages

from .__main__ import Fault, Ran, ran, tried, whole

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run of four cells without a fault."""
    return whole("eager", tmp_path_factory.mktemp("known"))


@pytest.mark.ci
def test_a_planted_silent_loss_is_detected(known: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel fails once during replays, and the run reports it. The planted loss suppresses that report."""
    fault = Fault("eager", "kernel", "replays", 1, "passing")
    assert tried(known, fault) == []
    monkeypatch.setattr(Stages, "miss", lambda *_: None)
    assert any("what is missing is named" in failure for failure in tried(known, fault))


@pytest.mark.ci
def test_a_card_that_is_lost(known: Ran, tmp_path: Path) -> None:
    """The context breaks for good in the middle of the cells: every call gives the same error.

    https://docs.nvidia.com/cuda/cuda-runtime-api, cudaErrorLaunchFailure: the process must be ended. Measured cells
    stay, the folder and the screen report the loss, and a resume appends the rest.
    """
    fault = Fault("eager", "kernel", "timing", known.calls["kernel", "timing"] // 2, "lost")
    assert tried(known, fault) == []
    lost = ran("eager", tmp_path, fault)
    samples = tmp_path / "run" / "samples.jsonl"
    before = samples.read_text()
    assert lost.code == 2
    assert not lost.document["finished"]
    assert any("illegal memory access" in line for line in lost.document["warnings"])
    assert "illegal memory access" in lost.err
    assert 0 < sum(row["status"] == "ok" for row in lost.rows.values()) < len(known.rows)
    assert ran("eager", tmp_path, resume=True).code == 0
    assert samples.read_text().startswith(before)
    records = [record for record in read_records(samples.parent) if "round" in record]
    repetitions = [(one["prompt_len"], one["batch_size"], one["round"]) for one in records]
    assert len(repetitions) == len(set(repetitions))
