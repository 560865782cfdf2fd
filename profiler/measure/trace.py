"""One step under torch.profiler: kernels, gaps between them, and a Chrome trace."""

import gzip
import json
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from profiler.device.machine import Machine, recorded
from profiler.errors import RunError
from profiler.facts.measurements import Activity, KernelTime
from profiler.grid.cells import Cell, CellKey
from profiler.measure.subject import Subject

TRACE = "trace.json.gz"
"""The Chrome trace of one decode step in a run folder, for chrome://tracing and ui.perfetto.dev."""

_GAP_S = 1e-6
"""A shorter gap between kernels leaves the device no time to idle."""
_MICROSECOND_S = 1e-6
_KERNELS = 5
"""Kernels of a step that are named, those with the most time."""
_APPLYING = {"elementwise_kernel", "unrolled_elementwise_kernel", "vectorized_elementwise_kernel", "reduce_kernel"}
"""Kernels of torch that apply a function, which says what they do."""
_APPLIED = re.compile(r"\b(?!gpu_kernel)(\w*Functor(?:_\w+)?|\w+Ops|\w+_kernel(?:_impl)?(?:_cuda)?)(?=[<(])")
"""A functor, or a function whose lambda is applied; a functor's own functor is the last."""


@dataclass(frozen=True)
class Interval:
    """One kernel of a step, or one operator on a CPU."""

    start_s: float
    end_s: float
    name: str


def activity(key: CellKey, intervals: Sequence[Interval]) -> Activity:
    """Return what ran in a step; intervals that overlap count once."""
    busy_s = gap_s = 0.0
    gaps = 0
    end_s = min((item.start_s for item in intervals), default=0.0)
    seconds: dict[str, list[float]] = {}
    for item in sorted(intervals, key=lambda each: (each.start_s, each.end_s)):
        seconds.setdefault(kernel_name(item.name), []).append(item.end_s - item.start_s)
        idle_s = max(0.0, item.start_s - end_s)
        gap_s, gaps = gap_s + idle_s, gaps + (idle_s > _GAP_S)
        busy_s += max(0.0, item.end_s - max(item.start_s, end_s))
        end_s = max(end_s, item.end_s)
    each_s = [item.end_s - item.start_s for item in intervals]
    longest_s, median_s = max(each_s, default=0.0), statistics.median(each_s) if each_s else None
    kernels = [KernelTime(name, len(each), sum(each)) for name, each in seconds.items()]
    kernels.sort(key=lambda kernel: -kernel.seconds)
    return Activity(key, len(intervals), busy_s, gaps, gap_s, longest_s, median_s, tuple(kernels[:_KERNELS]))


def kernel_name(name: str) -> str:
    """Return a kernel's name without namespaces and arguments; of torch's elementwise ones, that of what they apply."""
    outer = re.split(r"[<(]", name.removeprefix("void ").replace("(anonymous namespace)::", ""), maxsplit=1)[0]
    last = outer.rsplit("::", 1)[-1].strip()
    applied = _APPLIED.findall(name) if last in _APPLYING else []
    return applied[-1] if applied else last


def trace_cell(subject: Subject, cell: Cell, folder: Path | None) -> list[Activity]:
    """Trace a prefill and a decode step, the latter also into `folder`; empty if the device reports nothing."""
    engine, machine = subject.engines[cell.engine], subject.machine
    activities = []
    with torch.inference_mode():
        fill = subject.start(cell)
        if cell.prompt_len:
            fill()
            activities.append(activity(CellKey("prefill", cell), _under_profiler(fill, machine, None)))
        state = engine.decode(fill())
        decode = _under_profiler(partial(engine.decode, state), machine, folder and folder / TRACE)
        activities.append(activity(CellKey("decode", cell), decode))
    return [each for each in activities if each.kernels]


def _under_profiler(step: Callable[[], object], machine: Machine, target: Path | None) -> list[Interval]:
    """Kernels and copies on the device, without ranges that compiled code names; on a CPU, the outermost operators."""
    with recorded(cuda=machine.is_cuda) as profiler:
        step()
        machine.clock.synchronize()
    if target is not None:
        _export(profiler, target)
    kind = torch.autograd.DeviceType.CUDA if machine.is_cuda else torch.autograd.DeviceType.CPU
    intervals = []
    for event in profiler.events():
        is_inner = event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
        is_work = event.name.startswith("aten::") and not is_inner
        if event.device_type == kind and (not event.is_user_annotation if machine.is_cuda else is_work):
            times = event.time_range
            intervals.append(Interval(times.start * _MICROSECOND_S, times.end * _MICROSECOND_S, event.name))
    return intervals


def _export(profiler: Any, target: Path) -> None:
    """Write a small, compressed trace for browsers, without torch's own annotations, its path and the host's name."""
    with tempfile.TemporaryDirectory(prefix="roofscope-trace-") as folder:
        whole = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(whole))
        content = json.loads(whole.read_text(encoding="utf-8"))
    events = [event for event in content["traceEvents"] if event.get("ph") in ("X", "M")]
    small, draft = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), target.with_suffix(".part")
    try:
        draft.write_bytes(gzip.compress(small.encode()))
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise RunError(f"{target} cannot be written: {error.strerror}.") from None
