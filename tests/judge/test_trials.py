"""Trials on a few layers predict the step of the whole model, and give a lever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_facts import KEY
from test_levers import SETTING, cell

from profiler.facts.measurements import StepSamples, Trial
from profiler.judge.cells import TrialResult, trial_results
from profiler.judge.levers import levers


def stepped(layers: int, layer_s: float, rest_s: float) -> StepSamples:
    return StepSamples((layers * layer_s,) * 7, (rest_s,) * 7)


def test_a_variant_is_compared_with_the_model_as_loaded() -> None:
    """Layers take a third of their time and the head stays the same: (4 + 10) / 34 of the step."""
    trial = Trial(KEY, "bfloat16", 6, 30, before=stepped(6, 1e-3, 4e-3), after=stepped(6, 1e-3 / 3, 4e-3))
    [found] = trial_results([trial])
    assert found.ratio == pytest.approx(14 / 34)
    assert found.half_width == pytest.approx(0, abs=1e-9)
    of_float32 = replace(SETTING, weight_bits=32.0)
    levers_then = levers(replace(cell(weights_s=20e-3, kernel_s=14e-3), tried=(found,)), of_float32)
    [lever] = [item for item in levers_then if item.basis == "tried"]
    assert (lever.change, lever.saves_s) == ("bfloat16", pytest.approx(20e-3))
    assert lever.because == "the step takes 14.0 ms then, extrapolated from a few layers"
    changes = {item.change for item in levers_then}
    assert "a 16-bit dtype" not in changes, "a tried variant replaces the computed change"
    assert "4-bit weights" in changes


def test_a_neighbour_in_one_of_two_turns_changes_nothing() -> None:
    """30 layers of 1 ms, 2.5 times as long in the first turn; the variant takes half as long."""
    before = StepSamples((*[15e-3] * 5, *[6e-3] * 5), (0.0,) * 10)
    [found] = trial_results([Trial(KEY, "int4wo", 6, 30, before, StepSamples((3e-3,) * 10, (0.0,) * 10))])
    assert found.ratio == pytest.approx(0.5)


def test_a_cost_is_listed_last_and_an_uncertain_change_not_at_all() -> None:
    slower, unclear = TrialResult("nf4", 1.4, 0.1, 6, 30), TrialResult("int8wo", 0.97, 0.05, 6, 30)
    ranked = levers(replace(cell(weights_s=20e-3), tried=(slower, unclear)), SETTING)
    assert [(item.change, item.saves_s) for item in ranked if item.basis == "tried"] == [("nf4", pytest.approx(-8e-3))]
    assert ranked[-1].change == "nf4"


def test_layers_that_do_not_represent_the_whole_step_claim_less() -> None:
    """6 layers predict 34 ms. A saving of a tenth is a claim if the step took 34 ms, but not if it took 40 ms."""
    trial = Trial(KEY, "bfloat16", 6, 30, before=stepped(6, 1e-3, 4e-3), after=stepped(6, 0.9e-3, 4e-3))
    tried = tuple(trial_results([trial]))
    good, poor = (replace(cell(weights_s=step_s), tried=tried) for step_s in (34e-3, 40e-3))
    assert any(item.basis == "tried" for item in levers(good, SETTING))
    assert not any(item.basis == "tried" for item in levers(poor, SETTING))
