"""Attention on simulated GPUs: cuDNN's plans, and the time and memory of the math path, as a run reports them."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.store.folder import Run

from .held import REST, held
from .native import why_not
from .scenario import Scenario, said, so
from .truth import H100, T4

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

PLAN_S = 22e-3
"""Reported for one card (GB10); other cards take up to 440 ms."""
LONG = Scenario("mistral-7b-v0.3", 2, prompt_lens=[2048], batch_sizes=[4])


def test_plans_are_not_part_of_a_steps_time(tmp_path: Path) -> None:
    """A server plans once for each length, and then never again."""
    truth = H100.but(plan_s=PLAN_S)
    scenario = Scenario("mistral-7b-v0.3", 2, prompt_lens=[128, 512], batch_sizes=[1, 4])
    run, _ = said(scenario, [truth], tmp_path)
    for _, row in held(scenario, truth, run, tmp_path):
        assert row["confidence"] != "unusable"
    slow = {item.key: item.first_use_s for item in run.document.evidence if item.first_use_s is not None}
    assert slow, "the first cell used its lengths when the engine warmed up, the others did not"
    for row in run.measured:
        if row.key in slow:
            assert slow[row.key] == pytest.approx(row.latency_s + PLAN_S, rel=REST)
    assert any("torch.backends.cuda.enable_cudnn_sdp(False)" in text for text in run.answer)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("long")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return said(LONG, [T4], folder)[0]


@pytest.mark.parametrize(("phase", "least_share"), [("prefill", 0.7), ("decode", 0.9)])
def test_the_copies_of_the_math_path_are_named_first(phase: str, least_share: float, long_run: Run) -> None:
    """All kernels of this card reach their roof. Most of attention's loss is work that a fused kernel would not do."""
    [row] = [row for row in long_run.cells.to_dict("records") if row["phase"] == phase]
    [item] = [item for item in long_run.document.evidence if item.phase == phase]
    assert item.levers[0].change == "a fused attention kernel"
    assert least_share * row["kernel_s"] < item.levers[0].saves_s <= row["kernel_s"]


def test_the_peak_of_the_math_path_is_predicted(long_run: Run, tmp_path: Path) -> None:
    [known, _] = so(LONG, T4, tmp_path)
    [prefill] = [item for item in long_run.document.evidence if item.phase == "prefill"]
    assert prefill.predicted_peak_memory_bytes == pytest.approx(known.peak_bytes, rel=REST)
