"""Passes that look inside a step: times by group of modules, the experts that it uses, kernels and a Chrome trace."""

import gzip
import json
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from profiler.counting.module_kinds import is_attention
from profiler.counting.operators import Experts
from profiler.counting.walk import collapse_numbers
from profiler.device.machine import Machine, recorded
from profiler.errors import RunError
from profiler.facts.measurements import BETWEEN_MODULES, Activity, ExpertsTouched, HookedStep, KernelTime
from profiler.grid.cells import Cell, CellKey
from profiler.measure.subject import Subject
from profiler.measure.sweep import refuse_impossible_times

_STEPS = 6
_ROUTED_STEPS = 8


def hook_cell(subject: Subject, cell: Cell) -> list[HookedStep]:
    """Return the seconds of each group in each phase of a cell; empty if the engine's code cannot be hooked.

    A step is cut at the entry and the exit of every known module, and each piece counts for the innermost one. The
    pieces add up to the hooked step by construction.
    """
    engine = subject.engines[cell.engine]
    if not engine.hookable:
        return []
    # The groups of operators, and the attention modules around the cores.
    group_by_name: dict[str, str] = {operator.name: str(operator.group) for operator in subject.work.operators}
    groups: dict[nn.Module, str] = {}
    for name, module in subject.loaded.module.named_modules():
        if is_attention(module):
            groups[module] = "attention"
        elif (group := group_by_name.get(collapse_numbers(name))) is not None:
            groups[module] = group
    pieces = Pieces(subject.machine)
    hooked = []
    with torch.inference_mode():
        fill = subject.start(cell)
        state = fill()
        with ExitStack() as hooks:
            for module, group in groups.items():
                hooks.enter_context(module.register_forward_pre_hook(partial(pieces.enter, group)))
                hooks.enter_context(module.register_forward_hook(pieces.leave))
            if cell.prompt_len:
                pieces.start()
                state = fill()
                hooked.append(_by_group(CellKey("prefill", cell), [pieces.finish()]))
            steps = []
            for _ in range(min(_STEPS, cell.decode_steps)):
                pieces.start()
                state = engine.decode(state)
                steps.append(pieces.finish())
        hooked.append(_by_group(CellKey("decode", cell), steps[1:]))
    return hooked


def _by_group(key: CellKey, steps: list[dict[str, float]]) -> HookedStep:
    return HookedStep(key, {group: tuple(step.get(group, 0.0) for step in steps) for group in steps[0]})


class Pieces:
    """Clock marks at every entry and exit, and the group that owns the time between two of them, also an NVTX range."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._stack = [BETWEEN_MODULES]

    def start(self) -> None:
        self.marks, self.owners = [self._machine.clock.mark()], list[str]()

    def enter(self, group: str, *_: object) -> None:
        self._machine.push_range(group)
        self._cut()
        self._stack.append(group)

    def leave(self, *_: object) -> None:
        self._cut()
        self._stack.pop()
        self._machine.pop_range()

    def finish(self) -> dict[str, float]:
        """Return the seconds by group since `start`. Raises RuntimeError if the clock gives impossible times."""
        self._cut()
        self._machine.clock.synchronize()
        total: dict[str, float] = {}
        for owner, seconds in zip(self.owners, self._machine.clock.seconds(self.marks), strict=True):
            if not seconds >= 0:  # a clock went back, or gave no number
                raise RuntimeError(f"the clock gave a part of a step {seconds:g} s")
            total[owner] = total.get(owner, 0.0) + seconds
        refuse_impossible_times([sum(total.values())])
        return total

    def _cut(self) -> None:
        self.owners.append(self._stack[-1])
        self.marks.append(self._machine.clock.mark())


def experts_touched(subject: Subject, cell: Cell) -> list[ExpertsTouched]:
    """Return how many distinct experts each phase of a cell uses, by layer and step on average.

    Empty without experts, or if none is told the router's choice as a tensor (remote code, fused kernels).
    """
    engine = subject.engines[cell.engine]
    operators = {operator.name: operator for operator in subject.work.of_kind(Experts)}
    if not operators or not engine.hookable or not cell.prompt_len:
        return []
    seen, touched = list[tuple[int, float, int]](), list[ExpertsTouched]()

    def note(operator: Experts, module: object, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Add (distinct experts, their expected number, all experts) of a call, given [tokens, k] indices."""
        for value in (*args, *named.values()):
            if isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim() == 2:
                real = value[(value >= 0) & (value < operator.num_experts)]
                expected = float(operator.touched(value.shape[0]))
                seen.append((real.unique().numel(), expected, operator.num_experts))
                return

    with torch.inference_mode(), ExitStack() as hooks:
        for name, module in subject.loaded.module.named_modules():
            if (operator := operators.get(collapse_numbers(name))) is not None:
                hooks.enter_context(module.register_forward_pre_hook(partial(note, operator), with_kwargs=True))
        state = subject.start(cell)()
        touched += _mean(CellKey("prefill", cell), seen)
        seen.clear()
        for _ in range(min(_ROUTED_STEPS, cell.decode_steps)):
            state = engine.decode(state)
        touched += _mean(CellKey("decode", cell), seen)
    return touched


def _mean(key: CellKey, seen: list[tuple[int, float, int]]) -> list[ExpertsTouched]:
    if not seen:
        return []
    touched, expected, experts = zip(*seen, strict=True)
    return [ExpertsTouched(key, statistics.fmean(touched), statistics.fmean(expected), max(experts))]


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
