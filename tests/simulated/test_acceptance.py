"""Checks of the acceptance script that flaked by nature; all of it runs by `python -m tests.simulated.acceptance`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .acceptance import CARDS, cut, on_card, scoreboard
from .native import why_not
from .truth import Throttle, Truth

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.mark.parametrize(
    "card",
    [
        pytest.param(CARDS["H100"].but(throttle=Throttle(after_busy_s=2.0, share=0.9)), id="warms"),
        pytest.param(
            CARDS["A100"].but(
                clock_hz=1.1 * CARDS["A100"].clock_hz,
                flops_per_s={name: 1.25 * speed for name, speed in CARDS["A100"].flops_per_s.items()},
            ),
            id="boosts",
        ),
    ],
)
def test_a_card_that_warms_or_boosts_fails_no_check_of_its_roofs(card: Truth, tmp_path: Path) -> None:
    with on_card(card) as acceptance:
        bench = acceptance._bench(tmp_path, dry_run=False)
        acceptance.run_selftest = lambda *_: ()
        found = list(acceptance.roofs(bench))
    assert len(found) > 10
    assert not [check for check in found if not check.passed]


def test_what_torch_keeps_is_no_room_that_a_full_card_lacks(tmp_path: Path) -> None:
    """A run before it has left 20 GB with torch, in which the batch that is to find no room would find it; and what the
    runs themselves took is free again."""
    with on_card(CARDS["A100"]) as acceptance, cut(acceptance, tmp_path, 1):
        bench = acceptance._bench(tmp_path, dry_run=False)
        torch.empty(20 << 30, dtype=torch.uint8, device=bench.device)
        [check] = acceptance._out_of_memory(bench)
    assert check.passed, check.value


def test_the_script_runs_to_its_end_in_its_time(tmp_path: Path) -> None:
    """With one layer of each model, two formats and no doubling; by its host's clock, judging and drawing included."""
    found = scoreboard(CARDS["T4"], tmp_path, layers=1)
    assert found["code"] == found["failed"] == 0
    assert found["passed"] > 30
    assert found["in_time"]
    assert sum(found["took_s"].values()) == pytest.approx(found["seconds"], rel=0.01)
