"""Decode steps after the device was idle: clocks fall, caches and threads go cold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from profiler.device.clock import no_gc, time_calls
from profiler.device.machine import Machine
from profiler.effort import STANDARD
from profiler.engines.base import Engine
from profiler.facts.measurements import AfterIdle
from profiler.grid.cells import Cell

# Decode steps before and after the pause.
_WARM_STEPS = 4
_STEPS = 4


def steps_after_idle(
    engine: Engine,
    cell: Cell,
    machine: Machine,
    pauses: Sequence[tuple[float, int]] = STANDARD.idle_pauses,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[AfterIdle]:
    """Time the first decode steps of a cell after pauses in which this process uses no device.

    `pauses` are pairs of seconds and the number of repetitions.
    """
    clock = machine.clock
    slots = cell.depth + _WARM_STEPS + _STEPS + 1
    with torch.inference_mode(), no_gc():
        for silence_s, times in pauses:
            steps_s = []
            for _ in range(times):
                engine.announce(cell, None)
                engine.prepare(cell.batch_size, slots)
                state = engine.fill(cell.batch_size, cell.depth, slots)
                for _ in range(_WARM_STEPS):
                    state = engine.decode(state)

                def step() -> None:
                    nonlocal state
                    state = engine.decode(state)

                clock.synchronize()
                wait(silence_s)
                steps_s.append(tuple(time_calls(step, clock, _STEPS, drop_first=False)))
            yield AfterIdle(cell, silence_s, tuple(steps_s))
