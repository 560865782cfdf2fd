"""The acceptance script on a card whose truth is known, so that its first use on a real one is not its first use."""

from __future__ import annotations

from pathlib import Path

import pytest

from .acceptance import CARDS, on_card, scoreboard
from .guard import why_not
from .truth import Throttle, Truth

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

NINE_MINUTES_S = 9 * 60


@pytest.fixture(autouse=True)
def _no_kept_roofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated roof must never be kept beside measured ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_script_runs_to_its_end(tmp_path: Path) -> None:
    """Every check of an H100, on one layer of each model: `python -m tests.simulated.acceptance` takes all of them."""
    found = scoreboard(CARDS["H100"], tmp_path, layers=1)
    failed = [check for check in found["checks"] if check["passed"] is False]
    assert not failed
    assert found["code"] == 0
    assert found["passed"] > 45
    assert all(check["why"] for check in found["checks"] if check["passed"] is None)
    assert found["seconds"] < NINE_MINUTES_S


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
