"""What nothing explains, by group of a step that was timed under hooks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_facts import KEY, facts

from profiler.facts.measurements import Hooked
from profiler.facts.operators import OperatorWork
from profiler.judge.module_times import unexplained_by_group

ROOF = 1e12


@pytest.mark.parametrize(("kind", "plain_s", "disturbed_s"), [("cuda", 3.7e-3, 3.6e-3), ("cpu", 2.7e-3, 2.6e-3)])
def test_what_hooks_slow_down_tells_nothing(kind: str, plain_s: float, disturbed_s: float) -> None:
    """1 ms at the roof, 3 ms under hooks in a step of 4: 2 are left to explain, unless hooks made that step longer.

    By a tenth on a card, where they cost its host; by half on a CPU, which may drift by a tenth of itself.
    """
    linear = OperatorWork("up", "mlp", 1, "float16", 0.0, 1e9, 0.0, 0.0)
    hooked = Hooked(KEY, {"mlp": (3e-3, 3e-3), "between modules": (1e-3, 1e-3)})
    made = replace(facts([linear], flops_per_s=1e15, bytes_per_s=ROOF, kind=kind), hooked={KEY: hooked})
    assert unexplained_by_group(made, KEY, plain_s)["mlp"] == pytest.approx(2e-3)
    assert unexplained_by_group(made, KEY, disturbed_s) == {}
