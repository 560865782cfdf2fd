"""Attention on simulated GPUs: cuDNN's plans, and the time and memory of the math path, as a run reports them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .held import REST, held
from .native import why_not
from .scenario import Scenario, said
from .truth import H100, T4

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

PLAN_S = 22e-3
"""Reported for one card (GB10); other cards take up to 440 ms."""


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


def test_the_copies_of_the_math_path_are_named_first(tmp_path: Path) -> None:
    """All kernels of this card reach their roof. Most of attention's loss is work that a fused kernel would not do."""
    run, _ = said(Scenario("mistral-7b-v0.3", 2, prompt_lens=[2048], batch_sizes=[4]), [T4], tmp_path)
    for row, item in zip(run.measured, run.document.evidence, strict=True):
        assert item.key == row.key
        assert item.levers[0].change == "a fused attention kernel"
        least_share = 0.7 if row.phase == "prefill" else 0.9
        assert least_share * row.kernel_s < item.levers[0].saves_s <= row.kernel_s
