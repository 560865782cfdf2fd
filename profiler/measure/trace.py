"""One step under torch.profiler: kernels, gaps between them, and a Chrome trace."""

from __future__ import annotations

import gzip
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from profiler.device.machine import Machine
from profiler.device.torch_profiler import recorded
from profiler.errors import RunError
from profiler.facts.measurements import Activity
from profiler.grid.cells import Cell, CellKey
from profiler.measure.subject import Subject

TRACE = "trace.json.gz"
"""The Chrome trace of one decode step in a run folder, for chrome://tracing and ui.perfetto.dev."""

# A shorter gap between kernels leaves the device no time to idle.
_GAP_S = 1e-6
_MICROSECOND_S = 1e-6


def activity(key: CellKey, intervals: Sequence[tuple[float, float]]) -> Activity:
    """Return the sum of (start, end) intervals in seconds; overlapping ones count once."""
    busy_s = gap_s = longest_s = 0.0
    gaps = 0
    end_s = None
    for start, end in sorted(intervals):
        longest_s = max(longest_s, end - start)
        if end_s is None or start > end_s:
            if end_s is not None:
                gap_s += start - end_s
                gaps += start - end_s > _GAP_S
            busy_s += end - start
            end_s = end
        elif end > end_s:
            busy_s += end - end_s
            end_s = end
    median_s = statistics.median(end - start for start, end in intervals) if intervals else None
    return Activity(key, len(intervals), busy_s, gaps, gap_s, longest_s, median_s)


def trace_cell(subject: Subject, cell: Cell, folder: Path | None) -> list[Activity]:
    """Trace kernels and gaps in a prefill and a decode step of a cell; empty if the device reports none (no CUPTI).

    With a `folder`, the decode step is also written there as a Chrome trace.
    """
    engine, machine = subject.engines[cell.engine], subject.machine
    activities = []
    with torch.inference_mode():
        engine.announce(cell, None)
        engine.prepare(cell.batch_size, cell.slots)
        if cell.prompt_len:
            ids = subject.prompts.of(cell).to(machine.device)
            engine.prefill(ids, cell.slots)
            prefill = _under_profiler(lambda: engine.prefill(ids, cell.slots), machine, None)
            activities.append(activity(CellKey("prefill", cell), prefill))
            state = engine.prefill(ids, cell.slots)
        else:
            state = engine.fill(cell.batch_size, cell.context_len, cell.slots)
        state = engine.decode(state)
        target = None if folder is None else folder / TRACE
        decode = _under_profiler(lambda: engine.decode(state), machine, target)
        activities.append(activity(CellKey("decode", cell), decode))
    return [each for each in activities if each.kernels]


def _under_profiler(step: Callable[[], object], machine: Machine, target: Path | None) -> list[tuple[float, float]]:
    with recorded(cuda=machine.is_cuda) as profiler:
        step()
        machine.clock.synchronize()
    if target is not None:
        _export(profiler, target)
    return _intervals(profiler, machine.is_cuda)


def _intervals(profiler: Any, on_cuda: bool) -> list[tuple[float, float]]:
    """Kernels and copies on the device; on a CPU, the operators that no other operator called.

    A range named by compiled code (`record_function`) is also a CUDA event, but runs nothing.
    """
    kind = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
    intervals = []
    for event in profiler.events():
        is_inner = event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
        is_work = not event.is_user_annotation if on_cuda else event.name.startswith("aten::") and not is_inner
        if event.device_type == kind and is_work:
            intervals.append((event.time_range.start * _MICROSECOND_S, event.time_range.end * _MICROSECOND_S))
    return intervals


def _export(profiler: Any, target: Path) -> None:
    """Write a small, compressed trace: what browsers' viewers need, without torch's own annotations."""
    with tempfile.TemporaryDirectory(prefix="roofscope-trace-") as folder:
        whole = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(whole))
        content = json.loads(whole.read_text(encoding="utf-8"))
        events = [event for event in content["traceEvents"] if event.get("ph") in ("X", "M")]
        small = Path(folder) / TRACE
        with gzip.open(small, "wt", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
        draft = target.with_suffix(".part")
        try:
            shutil.copyfile(small, draft)
            draft.replace(target)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise RunError(f"{target} cannot be written: {error.strerror}.") from None
