"""The unexplained time of a hooked step, by group of operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_facts import KEY, facts

from profiler.facts.measurements import HookedStep
from profiler.facts.operators import OperatorWork
from profiler.judge.module_times import unexplained_by_group

ROOF = 1e12


@pytest.mark.parametrize(("kind", "plain_s", "disturbed_s"), [("cuda", 3.7e-3, 3.6e-3), ("cpu", 2.7e-3, 2.6e-3)])
def test_a_step_slowed_by_hooks_gives_no_times_by_group(kind: str, plain_s: float, disturbed_s: float) -> None:
    """An operator of 1 ms at the roof takes 3 of 4 ms with hooks: 2 ms are unexplained, unless hooks slowed the step.

    The limit is a tenth on a GPU, where hooks slow the host, and half on a CPU, whose speed may drift by a tenth.
    """
    linear = OperatorWork("up", "mlp", 1, "float16", 0.0, 1e9, 0.0, 0.0)
    hooked = HookedStep(KEY, {"mlp": (3e-3, 3e-3), "between modules": (1e-3, 1e-3)})
    made = replace(facts([linear], flops_per_s=1e15, bytes_per_s=ROOF, kind=kind), hooked={KEY: hooked})
    assert unexplained_by_group(made, KEY, plain_s)["mlp"] == pytest.approx(2e-3)
    assert unexplained_by_group(made, KEY, disturbed_s) == {}
