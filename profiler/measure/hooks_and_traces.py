"""Passes that look inside a step: times by group of modules, experts, kernels and a trace, the parts of `generate`."""

import gzip
import itertools
import json
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.counting.module_kinds import is_attention
from profiler.counting.operators import Experts
from profiler.counting.walk import collapse_numbers
from profiler.device.clock import no_gc, now_s
from profiler.device.machine import Machine, recorded
from profiler.engines.transformers import EagerEngine, GenerateEngine
from profiler.errors import RunError
from profiler.facts.measurements import BETWEEN_MODULES, Activity, ExpertsTouched, GenerateSteps, HookedStep, KernelTime
from profiler.grid.cells import Cell, CellKey
from profiler.measure.subject import Subject
from profiler.measure.sweep import refuse_impossible_times
from profiler.patching import patched

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
    groups: dict[torch.nn.Module, str] = {}
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


# Both loops run this often in turn, for at most this many tokens; the first turn warms up.
_TURNS, _MOST_TOKENS = 3, 16

PartTimes = dict[str, list[float]]


def time_generate(subject: Subject, cells: Sequence[Cell], budget_s: float) -> Iterator[GenerateSteps]:
    """Time the parts of a decode step within `generate`, for each cell that it stepped, as far as `budget_s` goes.

    By the host's clock: if the device runs after the host, the wait is in the read that ends each step.
    """
    deadline_s = subject.machine.now_s() + budget_s
    for cell in cells:
        if not subject.engines[cell.engine].calls_generate:
            continue
        if subject.machine.now_s() > deadline_s:
            return
        with torch.inference_mode(), no_gc():
            yield _generate_steps(subject, cell)


def _generate_steps(subject: Subject, cell: Cell) -> GenerateSteps:
    import transformers

    model: Any = subject.loaded.module
    own_loop, engine = EagerEngine(model, subject.machine), GenerateEngine(model, subject.machine)
    ids = subject.prompts.of(cell).to(subject.machine.device)
    tokens = min(_MOST_TOKENS, cell.new_tokens)
    streamer = SimpleNamespace(put=lambda tokens: None, end=lambda: None)  # the cheapest: each token goes to the host
    runs: list[Callable[[Callable[[], object]], object]] = [
        partial(own_loop.call, ids, tokens),
        partial(engine.call, ids, tokens),
        partial(engine.call, ids, tokens, streamer=streamer),
    ]
    own, inside, streamed = parts = PartTimes(), PartTimes(), PartTimes()
    for turn in range(_TURNS):
        for steps, run in zip(parts, runs, strict=True):
            _add_steps(steps if turn else {}, model, run)
    few, more = (count_reads(partial(engine.call, ids, count, lambda: None)) for count in (2, 4))
    return GenerateSteps(
        cell=cell,
        transformers=transformers.__version__,
        parts_s={name: tuple(values) for name, values in inside.items()},
        own_s={name: tuple(values) for name, values in own.items()},
        streamed_s=tuple(streamed["read"]),
        reads_a_token=(more - few) / 2,
    )


def _add_steps(steps: PartTimes, model: Any, run: Callable[[Callable[[], object]], object]) -> None:
    """Add the seconds of each part to `steps`, per decode step; the first one, which grows the cache, is left out."""
    totals_by_step: list[tuple[float, dict[str, float]]] = []
    with _timed(model) as totals:
        run(lambda: totals_by_step.append((now_s(), dict(totals))))
    for (before_s, before), (after_s, after) in itertools.pairwise(totals_by_step[2:]):
        steps.setdefault("step", []).append(after_s - before_s)
        for name in after:
            steps.setdefault(name, []).append(after[name] - before[name])


@contextmanager
def _timed(model: Any) -> Iterator[dict[str, float]]:
    """Context manager that yields the seconds in each part so far; 0 for parts that this transformers lacks."""
    from transformers import cache_utils
    from transformers.generation import logits_process, stopping_criteria, utils

    targets = (
        ("stopping", stopping_criteria.StoppingCriteriaList, "__call__"),
        ("read", getattr(utils, "StopCheck", None), "__call__"),
        ("processors", logits_process.LogitsProcessorList, "__call__"),
        ("inputs", model, "prepare_inputs_for_generation"),
        ("inputs", model, "_update_model_kwargs_for_generation"),
        ("cache", cache_utils.Cache, "update"),
        ("forward", model, "forward"),
    )
    totals = {part: 0.0 for part, _, _ in targets}

    def adding(part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def timed(*args: Any, **named: Any) -> Any:
            start_s = now_s()
            try:
                return original(*args, **named)
            finally:
                totals[part] += now_s() - start_s

        return timed

    with ExitStack() as stack:
        for part, owner, name in targets:
            if hasattr(owner, name):
                stack.enter_context(patched(owner, **{name: adding(part, getattr(owner, name))}))
        yield totals


_READS = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default, torch.ops.aten.is_nonzero.default
"""The operators of `.item()`, `bool(tensor)` and printing, in any mode; a GPU's host waits for each."""


class _Counting(TorchDispatchMode):  # type: ignore[misc]
    reads = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.reads += func in _READS
        return func(*args, **(kwargs or {}))


def count_reads(run: Callable[[], object]) -> int:
    """Return how many single values the host reads from tensors while `run` runs."""
    counting = _Counting()
    with counting:
        run()
    return counting.reads
