"""What nothing explains, by group of a step that was timed under hooks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_facts import KEY, facts

from profiler.diagnosis.facts import Hooked, OperatorWork
from profiler.diagnosis.inside import unexplained_by_group

ROOF = 1e12


def test_what_hooks_slow_down_tells_nothing() -> None:
    """1 ms at the roof, 3 ms under hooks in a step of 4: 2 are left to explain, unless the step takes 2.5 without."""
    linear = OperatorWork("up", "mlp", 1, "float16", 0.0, 1e9, 0.0, 0.0)
    hooked = Hooked(KEY, {"mlp": (3e-3, 3e-3), "between modules": (1e-3, 1e-3)})
    made = replace(facts([linear], flops_per_s=1e15, bytes_per_s=ROOF), hooked={KEY: hooked})
    assert unexplained_by_group(made, KEY, 4e-3)["mlp"] == pytest.approx(2e-3)
    assert unexplained_by_group(made, KEY, 2.5e-3) == {}
