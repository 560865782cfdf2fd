"""Trials on a few layers predict the step of the whole model, and give a change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_facts import KEY
from test_computed_changes import SETTING, cell, linears

from profiler.facts.change_ids import ChangeId
from profiler.facts.measurements import StepSamples, Trial
from profiler.judge.changes import changes, saves_clearly
from profiler.judge.savings import ChangeEffect, TrialResult, trial_results

LINE = "from_pretrained(..., dtype=torch.bfloat16)"
OF_FLOAT32 = replace(SETTING, weight_bits=32.0, cache_bits=32.0, sixteen_bit_flops_per_s=100e12)


def stepped(layers: int, layer_s: float, rest_s: float) -> StepSamples:
    return StepSamples((layers * layer_s,) * 7, (rest_s,) * 7)


def shown(form: str, layers: int) -> Trial:
    return Trial(KEY, form, layers, 30, StepSamples((), ()), StepSamples((), ()))


def trial(layers: int, before: StepSamples, after: StepSamples, **more: Any) -> TrialResult:
    """The result of a trial of bfloat16 on `layers` of 30."""
    of = {"form": "bfloat16 weights", "line": LINE, "change": ChangeId.DTYPE, "value": "bfloat16", **more}
    [found] = trial_results([Trial(KEY, layers=layers, of_layers=30, before=before, after=after, **of)])
    return found


def tried(step_s: float, *results: TrialResult) -> list[ChangeEffect]:
    """The changes of a step that were tried; the last ones cost time."""
    of_step = replace(cell(weights_s=step_s), tried=results)
    return [item for item in changes(of_step, OF_FLOAT32) if item.basis == "tried"]


def test_a_change_is_compared_with_the_model_as_loaded() -> None:
    """Layers take a third of their time and the head stays the same: (4 + 10) / 34 of the step."""
    found = trial(6, stepped(6, 1e-3, 4e-3), stepped(6, 1e-3 / 3, 4e-3))
    assert found.ratio == pytest.approx(14 / 34)
    assert found.half_width == pytest.approx(0, abs=1e-9)
    [effect] = tried(34e-3, found)
    assert (effect.id, effect.value, effect.how) == (ChangeId.DTYPE, "bfloat16", LINE)
    assert effect.saves_s == pytest.approx(20e-3)
    assert effect.because == "the step then takes 14.0 ms, by 6 of 30 layers"
    step = cell(linears(1e9, 34e9), weights_s=34e-3)
    before, after = (changes(each, OF_FLOAT32) for each in (step, replace(step, tried=(found,))))
    lost = {item.value for item in before} - {item.value for item in after if item.basis == "computed"}
    assert lost == {"bfloat16"}, "a tried change replaces its own computed saving"


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ("unquantised bfloat16", (ChangeId.DTYPE, "bfloat16")),
        ("int4wo", (ChangeId.FORMAT, "int4wo")),
        ("a static cache and one CUDA graph per step", (ChangeId.GRAPH, "")),
        ("torch.compile", (ChangeId.COMPILED_STEP, "")),
        ("1 of 2 threads", (ChangeId.THREADS, "1")),
        ("eager experts", (ChangeId.EXPERTS, "eager")),
        ("a padding mask and math attention", None),
    ],
)
def test_a_trial_of_an_older_run_is_known_by_its_name(form: str, what: tuple[ChangeId, str] | None) -> None:
    """It executed no line. A change that left only says what it cost."""
    half, twice = ((stepped(30, 1e-3, 0.0), stepped(30, layer_s, 0.0)) for layer_s in (0.5e-3, 2e-3))
    faster, slower = (trial(30, *sides, form=form, line="", change=None) for sides in (half, twice))
    assert (faster.trial.what, slower.trial.what) == (what, what)
    assert len(tried(30e-3, faster)) == (what is not None)
    assert len(tried(30e-3, slower)) == 1


def test_a_neighbour_in_one_of_two_turns_changes_nothing() -> None:
    """30 layers of 1 ms, 2.5 times as long in the first turn; the change takes half as long."""
    before = StepSamples((*[15e-3] * 5, *[6e-3] * 5), (0.0,) * 10)
    assert trial(6, before, StepSamples((3e-3,) * 10, (0.0,) * 10)).ratio == pytest.approx(0.5)


def test_a_cost_is_listed_last_and_an_uncertain_change_not_at_all() -> None:
    slower, unclear = TrialResult(shown("nf4", 6), 1.4, 0.1), TrialResult(shown("int8wo", 6), 0.97, 0.05)
    assert [(item.change, item.saves_s) for item in tried(20e-3, slower, unclear)] == [("nf4", pytest.approx(-8e-3))]


def test_layers_that_do_not_represent_the_whole_step_claim_less() -> None:
    """6 layers predict 34 ms. A saving of a tenth is a claim if the step took 34 ms, but not if it took 40 ms."""
    found = trial(6, stepped(6, 1e-3, 4e-3), stepped(6, 0.9e-3, 4e-3))
    assert [len(tried(step_s, found)) for step_s in (34e-3, 40e-3)] == [1, 0]


def test_a_trial_of_the_whole_model_has_its_own_times() -> None:
    """A call of `generate` took 34 ms a step, and 31 with the change, where the run's own step takes 28."""
    found = trial(30, stepped(30, 1e-3, 4e-3), stepped(30, 0.9e-3, 4e-3))
    [effect] = tried(28e-3, found)
    assert effect.saves_s == pytest.approx(3e-3)
    assert effect.because == "the step then takes 31.0 ms"


@pytest.mark.parametrize(("ratio", "clear"), [(0.9, True), (0.93, False), (0.96, False)])
def test_a_saving_is_clear_if_its_lower_end_is_a_twentieth_of_the_step(ratio: float, clear: bool) -> None:
    found = TrialResult(shown("bfloat16", 30), ratio, 0.03, 20e-3)
    assert saves_clearly(cell(weights_s=20e-3), found) == clear
