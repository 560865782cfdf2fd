"""A planted silent loss is detected, and a run on a card that is lost keeps its cells. All: python -m tests.faults"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_samples import read_records
from simulated.native import why_not

from profiler.run.stages import Stages

from .campaign import Fault, Recorded, ran, recorded, state, tried

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A run of four cells without a fault."""
    folder = tmp_path_factory.mktemp("known")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield recorded("eager", folder)


@pytest.mark.ci
def test_a_planted_silent_loss_is_detected(known: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel fails once during replays, and the run reports it. The planted loss suppresses that report."""
    fault = Fault("eager", "kernel", "replays", 1, "passing")
    assert tried(known, fault) == []
    monkeypatch.setattr(Stages, "miss", lambda *_: None)
    assert any("facts are gone" in failure for failure in tried(known, fault))


@pytest.mark.ci
def test_a_card_that_is_lost(known: Recorded, tmp_path: Path) -> None:
    """The context breaks for good in the middle of the cells: every call gives the same error.

    https://docs.nvidia.com/cuda/cuda-runtime-api, cudaErrorLaunchFailure: the process must be ended. Measured cells
    stay, the folder and the screen report the loss, and a resume appends the rest.
    """
    fault = Fault("eager", "kernel", "timing", known.base.calls["kernel", "timing"] // 2, "lost")
    assert tried(known, fault) == []
    first = ran("eager", known.model, tmp_path, fault)
    lost, before = state(tmp_path), (tmp_path / "samples.jsonl").read_text()
    assert ran("eager", known.model, tmp_path, resume=True).code == 0
    assert first.code == 2
    assert lost is not None
    assert not lost.document["finished"]
    assert any("illegal memory access" in line for line in lost.document["warnings"])
    assert "illegal memory access" in first.err
    assert 0 < sum(row["status"] == "ok" for row in lost.rows.values()) < len(known.state.rows)
    assert (tmp_path / "samples.jsonl").read_text().startswith(before)
    repetitions = [
        (one["prompt_len"], one["batch_size"], one["round"]) for one in read_records(tmp_path) if "round" in one
    ]
    assert len(repetitions) == len(set(repetitions))
