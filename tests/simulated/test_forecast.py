"""Forecasts on cards of known truth: within a run, and for a model that never ran on the profiled card."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from profiler.device.machine import machine_for
from profiler.forecast.command import run_facts
from profiler.gpu_profile.kernels import fitted_on
from profiler.gpu_profile.measure import measure_profile
from profiler.loading.meta_model import quiet_libraries
from profiler.roofs.measure import measure

from .native import why_not
from .scenario import Scenario, said
from .truth import A100
from .world import simulated

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

LAYERS = 2


def test_a_run_and_a_profile_forecast_a_card_of_known_truth(tmp_path: Path) -> None:
    """Forecasts of two layers of Mistral-7B have median errors below 5 %.

    They predict each cell from the others, the extremes from the rest, and all cells from a card's profile. This model
    never ran on the profiled card.
    """
    with simulated(A100), quiet_libraries():
        machine = machine_for(torch.device("cuda", 0))
        ceilings = measure(machine, ["float16"], model_dtype="float16", stage_budget_s=0.2)
        profile = measure_profile(machine, ceilings, ["float16"], 0.1)
    run, _ = said(Scenario("mistral-7b-v0.1", LAYERS, prompt_lens=[128, 512], batch_sizes=[1, 8]), [A100], tmp_path)
    known = run_facts(run.folder)
    assert known.trained.within.median < 0.05
    assert known.trained.outside.median < 0.05
    forecast = fitted_on(profile, "float16", LAYERS).forecast(known.trained.measured.demanded)
    off = forecast.latency_s / known.trained.measured.latency_s - 1
    decode = ~known.trained.measured.demanded.steps.prefill
    assert np.median(np.abs(off[decode])) < 0.05
    assert np.median(np.abs(off[~decode])) < 0.05
