"""Busy processes next to a run: it waits for them before anything is timed, and records those that stay."""

from __future__ import annotations

import time

from profiler.device.contention import Neighbours
from profiler.device.device import Device
from profiler.facts.contention import Contention
from profiler.run.budget import RunBudget
from profiler.run.stages import Stages

LOOK, UNSEEN = "the look at other processes", "busy neighbours are not seen"
"""The name of this part where it fails, and what its absence means."""
_LOOK_S = 0.5


def host_threads(info: Device) -> int:
    """Threads of the host that a device needs for itself: a GPU's steps are dispatched by one."""
    return info.threads if info.kind == "cpu" else 1


def wait_for_neighbours(neighbours: Neighbours, stages: Stages, budget: RunBudget) -> list[Contention]:
    """Wait for processes that keep cores busy which this run needs, for at most `budget.neighbours_s`.

    Returns what still disturbs the run; empty where nothing does.
    """
    threads, most_s = host_threads(stages.machine.info), budget.neighbours_s
    found = neighbours.look()
    if not found.disturbs(threads):
        return []
    looks = int(most_s / _LOOK_S)
    if looks:
        stages.begin(
            "waiting", f"{found.busy_cores} busy with {found.who}: waiting at most {most_s:.0f} s for that to end"
        )
    for _ in range(looks):
        time.sleep(_LOOK_S)
        found = neighbours.look()
        if not found.disturbs(threads):
            return []
    return [found]
