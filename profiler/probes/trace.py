"""One step under torch.profiler: its kernels, the gaps between them, and a Chrome trace; never while timing."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from profiler.engines.base import Engine
from profiler.grid import Cell, Grid, Phase
from profiler.machine.kineto import recorded
from profiler.probes.subject import Context, step_of
from profiler.record.run import CELL_KEY
from profiler.timing.visit import seeded_prompts

TRACE = "trace.json.gz"
"""The Chrome trace of one decode step in a run folder; chrome://tracing and ui.perfetto.dev open it."""

# Kernels that follow each other closer than this leave the device no time to idle.
_GAP_S = 1e-6
_MICROSECOND_S = 1e-6


@dataclass(frozen=True)
class Activity:
    """What ran during a step: kernels on CUDA, operators on a CPU (where each is a call of the host)."""

    kernels: int
    busy_s: float
    """Time in which at least one of them ran."""
    gaps: int
    """Pauses of more than a microsecond between them."""
    gap_s: float
    longest_s: float
    """The longest single kernel."""

    @property
    def busy_share(self) -> float:
        """Share of the span from the first to the last kernel in which one ran."""
        span_s = self.busy_s + self.gap_s
        return self.busy_s / span_s if span_s else 0.0


def activity(intervals: Sequence[tuple[float, float]]) -> Activity:
    """What (start, end) intervals in seconds add up to; overlapping ones count once."""
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
    return Activity(len(intervals), busy_s, gaps, gap_s, longest_s)


def trace_steps(
    context: Context, engine: Engine, cells: Sequence[Cell], grid: Grid, folder: Path | None
) -> list[dict[str, Any]]:
    """Kernels and gaps of a prefill and a decode step of each cell, as records for run.json.

    With a `folder`, the decode step of the first cell is kept there as a Chrome trace as well.
    """
    records = []
    for number, cell in enumerate(cells):
        records += _traced_cell(context, engine, cell, grid, folder if number == 0 else None)
    return records


def _traced_cell(context: Context, engine: Engine, cell: Cell, grid: Grid, folder: Path | None) -> list[dict[str, Any]]:
    device, slots = context.loaded.request.device, cell.depth + grid.new_tokens
    records = []
    with torch.inference_mode():
        engine.prepare(cell.batch_size, slots)
        if cell.prompt_len:
            ids = seeded_prompts(cell, context.loaded.config.get_text_config().vocab_size).to(device)
            state = engine.prefill(ids, slots)
            found = _under_profiler(lambda: engine.prefill(ids, slots), device, None)
            records.append(_record(cell, "prefill", grid, found))
            state = engine.prefill(ids, slots)
        else:
            state = engine.fill(cell.batch_size, cell.context_len, slots)
        state = engine.decode(state)
        target = None if folder is None else folder / TRACE
        found = _under_profiler(lambda: engine.decode(state), device, target)
        records.append(_record(cell, "decode", grid, found))
    return records


def _record(cell: Cell, phase: Phase, grid: Grid, found: Activity) -> dict[str, Any]:
    context_len = int(step_of(phase, cell, grid).context)
    key = dict(zip(CELL_KEY, (phase, cell.batch_size, cell.prompt_len, context_len, cell.engine), strict=True))
    return {**key, **asdict(found), "busy_share": found.busy_share}


def _under_profiler(step: Callable[[], object], device: torch.device, target: Path | None) -> Activity:
    on_cuda = device.type == "cuda"
    with recorded(cuda=on_cuda) as profiler:
        step()
        if on_cuda:
            torch.cuda.synchronize(device)
    if target is not None:
        _export(profiler, target)
    return activity(_intervals(profiler, on_cuda))


def _intervals(profiler: Any, on_cuda: bool) -> list[tuple[float, float]]:
    """Kernels and copies on the device, or on a CPU the operators that no other operator called."""
    kind = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
    found = []
    for event in profiler.events():
        called = event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
        if event.device_type == kind and (on_cuda or (event.name.startswith("aten::") and not called)):
            found.append((event.time_range.start * _MICROSECOND_S, event.time_range.end * _MICROSECOND_S))
    return found


def _export(profiler: Any, target: Path) -> None:
    """A small trace: what the browser's viewers need, without torch's own notes, packed."""
    with tempfile.TemporaryDirectory(prefix="roofscope-trace-") as folder:
        whole = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(whole))
        content = json.loads(whole.read_text(encoding="utf-8"))
        events = [event for event in content["traceEvents"] if event.get("ph") in ("X", "M")]
        small = Path(folder) / TRACE
        with gzip.open(small, "wt", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
        shutil.copyfile(small, target)
