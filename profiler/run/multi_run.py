"""Runs of several precisions or devices on one grid, one after the other, and their comparison."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from profiler.errors import RequestError
from profiler.judge.device_health import DeviceHealth, DeviceRun, healths
from profiler.run.options import Options
from profiler.run.pipeline import execute, grid_of
from profiler.run.stages import Listener
from profiler.run.validate import PreparedRun, prepare
from profiler.store.folder import Run


def run_precisions(options: Options, precisions: Sequence[str], listener: Listener) -> list[Run]:
    """Profile the model in each precision: one folder with a run folder for each, and a report that compares them.

    All requests are checked before the first run begins. Raises RequestError, before anything is loaded, for a
    precision that is named twice or does not exist.
    """
    runs = _run_each([replace(options, quant=name) for name in precisions], precisions, "--quant", listener)
    from profiler.run.screens import write_comparison

    write_comparison(runs, runs[0].folder.parent)
    return runs


def run_devices(options: Options, devices: Sequence[str], listener: Listener) -> list[Run]:
    """Profile the model on each device, one after the other: one folder with a run folder for each.

    All requests are checked before the first run begins. Raises RequestError for a device that is named twice or is not
    there.
    """
    # Measured fresh: cached roofs may be those of another card of the same kind.
    each = [replace(options, device=name, fresh=True) for name in devices]
    return _run_each(each, devices, "--device", listener)


def _run_each(options: Sequence[Options], names: Sequence[str], flag: str, listener: Listener) -> list[Run]:
    """A run for each value of an option, each with the budget, on one grid, in a common folder."""
    if len(set(names)) < len(names):
        raise RequestError(f"{flag} {','.join(names)} names one of them twice.")
    prepared = [prepare(one) for one in options]
    base = Path(options[0].out or prepared[0].out)
    prepared = [replace(one, out=base / name.replace(":", "")) for one, name in zip(prepared, names, strict=True)]
    if prepared[0].ladder:
        prepared = _on_one_grid(prepared, listener)
    runs = []
    for number, one in enumerate(prepared, start=1):
        runs.append(execute(one, listener, further_runs=len(prepared) - number))
        gc.collect()  # the model of the last run
    return runs


def _on_one_grid(prepared: Sequence[PreparedRun], listener: Listener) -> list[PreparedRun]:
    """The runs on the default grid of the slowest: each model is loaded and warmed up for that."""
    chosen = []
    for one in prepared:
        chosen.append(grid_of(one, listener))
        gc.collect()  # the model that was warmed up
    slowest = max(chosen, key=lambda found: prepared[0].ladder.index(found.grid))
    return [replace(one.on(slowest.grid), ladder=(), larger=slowest.larger) for one in prepared]


def device_healths(runs: Sequence[Run], devices: Sequence[str]) -> tuple[DeviceHealth, ...]:
    """Return the health of each device of `run_devices`, compared with the others."""
    return healths(
        [
            DeviceRun(name, run.model.dtype, run.measured, run.document.ceilings.ceilings)
            for name, run in zip(devices, runs, strict=True)
        ]
    )
