"""A card is lost during a run: measured cells stay, the folder reports the loss, and a resume finishes the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from profiler.engines.transformers import EagerEngine
from profiler.errors import DeviceError
from profiler.report.progress import QuietListener
from profiler.report.write import markdown_report
from profiler.run.options import Options
from profiler.run.pipeline import execute
from profiler.run.validate import prepare_resume
from profiler.store.folder import read_run
from profiler.store.samples import read_records

from .scenario import Scenario, said
from .truth import T4
from .world import simulated

pytestmark = pytest.mark.slow

SCENARIO = Scenario("smollm2-135m", layers=1, prompt_lens=(16, 32, 64), batch_sizes=(1, 2))
LOST = "CUDA error: unspecified launch failure"


@pytest.mark.ci
def test_a_card_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the fourth of six cells the context breaks for good, as after an Xid: every call gives the same error.

    https://docs.nvidia.com/cuda/cuda-runtime-api, cudaErrorLaunchFailure: the process must be ended.
    """
    real = EagerEngine.prefill
    fourth = (2, 32)

    def fails(*_arguments: Any, **_named: Any) -> Any:
        raise RuntimeError(LOST)

    def prefill(engine: EagerEngine, ids: torch.Tensor, slots: int) -> Any:
        if tuple(ids.shape) == fourth:
            monkeypatch.setattr(torch.cuda, "synchronize", fails)
            monkeypatch.setattr(torch.cuda, "empty_cache", fails)
            fails()
        return real(engine, ids, slots)

    with monkeypatch.context() as patch:
        patch.setattr(EagerEngine, "prefill", prefill)
        with pytest.raises(DeviceError, match=LOST):
            said(SCENARIO, [T4], tmp_path)
    folder = tmp_path / "run"
    run = read_run(folder)
    assert not run.document.finished
    assert any(LOST in line for line in run.document.warnings)
    assert LOST in markdown_report(run)
    before = {(row.prompt_len, row.batch_size) for row in run.measured}
    assert 3 <= len(before) < 6
    with simulated(T4):
        model = str(SCENARIO.folder(tmp_path))
        run = execute(prepare_resume(folder, Options(model=model, device="cuda", no_levers=True)), QuietListener())
    assert run.document.finished
    assert not any(LOST in line for line in run.document.warnings)
    assert len(run.measured) == len(run.results) == 12
    visits = [
        (record["prompt_len"], record["batch_size"], record["round"])
        for record in read_records(folder)
        if "round" in record
    ]
    assert len(visits) == len(set(visits))
    assert len({(prompt, batch) for prompt, batch, _ in visits}) == 6
