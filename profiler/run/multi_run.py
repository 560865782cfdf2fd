"""Several precisions or devices on one grid, run one after the other and compared."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from profiler.errors import RequestError
from profiler.judge.device_health import DeviceHealth, DeviceRun, healths
from profiler.run.options import Options
from profiler.run.pipeline import execute
from profiler.run.stages import Listener
from profiler.run.validate import Prepared, prepare
from profiler.store.folder import Run


def run_precisions(options: Options, precisions: Sequence[str], listener: Listener) -> list[Run]:
    """Profile the model once in each precision: one folder, with a run folder for each and a report that compares them.

    All are checked before the first begins.

    Raises RequestError for a precision that is named twice or does not exist, before anything is loaded.
    """
    if len(set(precisions)) < len(precisions):
        raise RequestError(f"--quant {','.join(precisions)}: a precision is named twice.")
    options = replace(options, budget_s=_budget_of_each(options, len(precisions)))
    base = Path(options.out or prepare(replace(options, quant=precisions[0]), compared=True).out)
    prepared = [prepare(replace(options, quant=name, out=base / name), compared=True) for name in precisions]
    runs = [execute(one, listener, further_runs=left) for left, one in _counted_down(prepared)]
    from profiler.report.write import write_comparison

    write_comparison(runs, base)
    return runs


def run_devices(options: Options, devices: Sequence[str], listener: Listener) -> list[Run]:
    """Profile the model on each device by itself, one after the other and never two at once: a folder for each.

    All are checked before the first begins. Raises RequestError for a device that is named twice or is not there.
    """
    if len(set(devices)) < len(devices):
        raise RequestError(f"--device {','.join(devices)}: a device is named twice.")
    options = replace(options, budget_s=_budget_of_each(options, len(devices)))
    base = Path(options.out or prepare(replace(options, device=devices[0]), compared=True).out)
    # Roofs that were kept are another card's, if it is of the same kind.
    asked = [replace(options, device=name, fresh=True, out=base / name.replace(":", "")) for name in devices]
    prepared = [prepare(one, compared=True) for one in asked]
    runs = []
    for left, one in _counted_down(prepared):
        runs.append(execute(one, listener, further_runs=left))
        gc.collect()
    return runs


def _counted_down(prepared: Sequence[Prepared]) -> Iterator[tuple[int, Prepared]]:
    """Each run after the number of those that follow it."""
    return zip(reversed(range(len(prepared))), prepared, strict=True)


def _budget_of_each(options: Options, runs: int) -> float | None:
    """Seconds of each run: the budget is that of all, and where none is given each has the default one."""
    return None if options.budget_s is None else options.budget_s / runs


def device_healths(runs: Sequence[Run], devices: Sequence[str]) -> tuple[DeviceHealth, ...]:
    """Each device of `run_devices` against the others."""
    return healths(
        [
            DeviceRun(name, run.model.dtype, run.measured, run.document.ceilings.ceilings)
            for name, run in zip(devices, runs, strict=True)
        ]
    )
