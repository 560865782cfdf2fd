"""From a few layers to all, and from a trial to a lever: by arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_facts import KEY
from test_levers import SETTING, cell

from profiler.facts.measurements import Stepped, Trial
from profiler.judge.cells import trial_results, whole_step
from profiler.judge.levers import levers


def stepped(layers: int, layer_s: float, beside_s: float) -> Stepped:
    return Stepped((layers * layer_s,) * 7, (beside_s,) * 7)


def test_layers_that_were_left_out_cost_what_the_others_do() -> None:
    """4 ms beside the layers and 1 ms each: 34 ms with 30 of them, as 6 tell."""
    assert whole_step(stepped(6, 1e-3, 4e-3), 30 / 6).quartile_s == pytest.approx(34e-3)
    assert whole_step(stepped(30, 1e-3, 4e-3), 1.0).quartile_s == pytest.approx(34e-3)


def test_a_form_is_weighed_against_the_model_as_it_is() -> None:
    """Layers at a third of their time under the same head: (4 + 10) / 34 of the step."""
    trial = Trial(KEY, "bfloat16", 6, 30, before=stepped(6, 1e-3, 4e-3), after=stepped(6, 1e-3 / 3, 4e-3))
    [found] = trial_results([trial])
    assert found.ratio == pytest.approx(14 / 34)
    assert found.half_width == pytest.approx(0, abs=1e-9)
    of_float32 = replace(SETTING, weight_bits=32.0)
    levers_then = levers(replace(cell(weights_s=20e-3, kernel_s=14e-3), tried=(found,)), of_float32)
    [lever] = [item for item in levers_then if item.basis == "tried"]
    assert (lever.change, lever.saves_s) == ("bfloat16", pytest.approx(20e-3))
    assert lever.because == "on 6 of 30 layers; the step takes 14.0 ms then"
    changes = {item.change for item in levers_then}
    assert "a 16-bit dtype" not in changes, "what was tried stands in the place of what would be computed"
    assert "4-bit weights" in changes


def test_a_neighbour_in_one_of_two_turns_changes_nothing() -> None:
    """30 layers of 1 ms, twice and a half as long through the first turn; the other form takes half as long."""
    before = Stepped((*[15e-3] * 5, *[6e-3] * 5), (0.0,) * 10)
    [found] = trial_results([Trial(KEY, "int4wo", 6, 30, before, Stepped((3e-3,) * 10, (0.0,) * 10))])
    assert found.ratio == pytest.approx(0.5)


def test_what_costs_is_said_and_what_cannot_be_told_is_not() -> None:
    slower = replace(_found("nf4", 1.4), half_width=0.1)
    unclear = replace(_found("int8wo", 0.97), half_width=0.05)
    found = levers(replace(cell(weights_s=20e-3), tried=(slower, unclear)), SETTING)
    assert [(item.change, item.saves_s) for item in found if item.basis == "tried"] == [("nf4", pytest.approx(-8e-3))]
    assert found[-1].change == "nf4", "what costs stands last"


def test_layers_that_do_not_stand_for_their_own_step_claim_less() -> None:
    """6 layers say 34 ms. Where the step took 34 ms, a tenth saved is a claim; where it took 40 ms, it is not."""
    trial = Trial(KEY, "bfloat16", 6, 30, before=stepped(6, 1e-3, 4e-3), after=stepped(6, 0.9e-3, 4e-3))
    tried = tuple(trial_results([trial]))
    good, poor = (replace(cell(weights_s=step_s), tried=tried) for step_s in (34e-3, 40e-3))
    assert any(item.basis == "tried" for item in levers(good, SETTING))
    assert not any(item.basis == "tried" for item in levers(poor, SETTING))


def _found(form: str, ratio: float):  # type: ignore[no-untyped-def]
    from profiler.judge.cells import TrialResult

    return TrialResult(form, ratio, 0.0, 6, 30)
