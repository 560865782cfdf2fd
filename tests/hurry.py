"""Shorter runs, for tests that make no claim about time.

`python tests/hurry.py run ...` is the command line with these settings.
"""

from dataclasses import replace

import pytest

from profiler import effort

HURRIED = replace(
    effort.STANDARD, rounds=2, whole_grid=True, ceiling_s=0.1, warm_up_s=0.1, more_prefills_s=0.1, drift_calls=1,
    drift_bursts=1, checks_kept_ceilings=False, ceilings_again_s=0.0, neighbours_share=0.0,
    shares={**effort.STANDARD.shares, "ceilings": 0.02},
)  # fmt: skip
"""Reuse cached ceilings, do not wait for other processes, time each cell twice, and measure briefly."""


def hurry(patch: pytest.MonkeyPatch, *, pictures: bool = False, **settings: object) -> None:
    """Make every command use `HURRIED` with `settings` replaced. Pages have pictures only with `pictures`."""
    patch.setattr(effort, "STANDARD", replace(HURRIED, **settings))
    if not pictures:
        patch.setattr("profiler.report.html.inline_svg", lambda *_: "")
    patch.setattr("profiler.roofs.measure._is_outdated", lambda *_: False)
    patch.setattr("profiler.roofs.measure.KEPT_FROM_S", 0.0)


def with_effort(patch: pytest.MonkeyPatch, **settings: object) -> None:
    patch.setattr(effort, "STANDARD", replace(effort.STANDARD, **settings))


if __name__ == "__main__":
    from profiler.cli.app import main

    hurry(pytest.MonkeyPatch(), script_least_s=2.0)
    main()
