"""The sentinel: a change of the machine is told from a single disturbed look."""

from __future__ import annotations

import pytest
import torch

from profiler.clock import HostClock
from profiler.hardware.sentinel import Sentinel, drift


def test_a_slower_second_half_is_drift_and_one_bad_look_is_not() -> None:
    steady = {"memory": 10e-3, "compute": 5e-3}
    slower = {"memory": 10e-3, "compute": 6e-3}
    assert drift([steady] * 3 + [slower] * 3) == pytest.approx(0.2)
    assert drift([steady] * 5 + [slower]) == 0.0
    assert drift([steady]) == 0.0
    assert drift([]) == 0.0


def test_the_same_work_takes_about_the_same_time() -> None:
    sentinel = Sentinel(torch.device("cpu"), HostClock())
    first, second = sentinel.look(), sentinel.look()
    for kind in ("memory", "compute"):
        assert second[kind] == pytest.approx(first[kind], rel=0.5)
