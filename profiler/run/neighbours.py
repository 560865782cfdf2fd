"""Busy processes next to a run: it waits for them before anything is timed, and records those that stay."""

from __future__ import annotations

import time

from profiler.device.contention import Neighbours
from profiler.device.device import Device
from profiler.facts.contention import Contention
from profiler.run.budget import RunBudget
from profiler.run.stages import Stages

LOOK, UNSEEN = "the check for other processes", "busy processes are not detected"
"""Name of this part and the effect of its failure, for `Stages.optional`."""
_LOOK_S = 0.5


def host_threads(info: Device) -> int:
    """Return the host threads that a device needs: all of a CPU's, one to dispatch a GPU's steps."""
    return info.threads if info.kind == "cpu" else 1


def wait_for_neighbours(neighbours: Neighbours, stages: Stages, budget: RunBudget) -> list[Contention]:
    """Wait, for at most `budget.neighbours_s`, until no other process keeps cores busy that this run needs.

    Returns what still disturbs the run; empty if nothing does.
    """
    threads, most_s = host_threads(stages.machine.info), budget.neighbours_s
    others = neighbours.look()
    if not others.disturbs(threads):
        return []
    looks = int(most_s / _LOOK_S)
    if looks:
        stages.begin(
            "waiting",
            f"{others.busy_cores} busy with {others.who}: waiting at most {most_s:.0f} s for that to end",
        )
    for _ in range(looks):
        time.sleep(_LOOK_S)
        others = neighbours.look()
        if not others.disturbs(threads):
            return []
    return [others]
