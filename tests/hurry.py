"""Where no claim is made about time, a run takes none to be sure of it.

`python tests/hurry.py run ...` is the command line in a process of its own, hurried.
"""

from __future__ import annotations

import pytest


def hurry(patch: pytest.MonkeyPatch, *, pictures: bool = False) -> None:
    """Roofs that were kept stand, two visits and one short look at each are enough, no unopened picture is drawn."""
    patch.setattr("profiler.roofs.measure._outgrown", lambda _known, _machine: False)
    patch.setattr("profiler.run.measure.look_again", lambda *_: None)
    patch.setattr("profiler.roofs.host_dispatch.measure_host_pace.__defaults__", (0.1,))
    patch.setattr("profiler.run.setup._TWIN_MOST_S", 0.1)
    patch.setattr("profiler.run.setup._WITNESS_S", 0.1)
    patch.setattr("profiler.measure.sweep._MOST_ROUNDS", 2)
    patch.setattr("profiler.measure.visit._WARM_UP_S", 0.1)
    patch.setattr("profiler.measure.visit._MORE_PREFILLS_S", 0.1)
    patch.setattr("profiler.roofs.drift_probe._CALLS", 1)
    patch.setattr("profiler.roofs.drift_probe._MOST_BURSTS", 1)
    if not pictures:
        patch.setattr("profiler.report.write._PICTURES", ())
        patch.setattr("profiler.report.html._roofline", lambda _run: None)


if __name__ == "__main__":
    from profiler.cli.app import main

    hurry(pytest.MonkeyPatch())
    main()
