"""Where no claim is made about time, a run takes none to be sure of it.

`python tests/hurry.py run ...` is the command line in a process of its own, hurried.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from profiler import effort

HURRIED = replace(
    effort.STANDARD,
    rounds=2,
    warm_up_s=0.1,
    more_prefills_s=0.1,
    drift_calls=1,
    drift_bursts=1,
    checks_kept_roofs=False,
    roofs_again_s=0.0,
    weight_read_s=0.1,
    host_pace_s=0.1,
    twin_s=0.1,
    pictures=(),
)
"""Kept roofs stand, two visits and one short look at each are enough, and no unopened picture is drawn."""


def hurry(patch: pytest.MonkeyPatch, *, pictures: bool = False, **settings: object) -> None:
    """Every command takes `HURRIED`, with other `settings` where a test needs them."""
    drawn = {"pictures": effort.Effort().pictures} if pictures else {}
    patch.setattr(effort, "STANDARD", replace(HURRIED, **drawn, **settings))


def with_effort(patch: pytest.MonkeyPatch, **settings: object) -> None:
    """Every command takes these settings, and else those that it takes now."""
    patch.setattr(effort, "STANDARD", replace(effort.STANDARD, **settings))


if __name__ == "__main__":
    from profiler.cli.app import main

    hurry(pytest.MonkeyPatch())
    main()
