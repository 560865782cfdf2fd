"""What it costs to dispatch a step, measured on the hollow twin."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from profiler.diagnosis.step_time import Dispatch
from profiler.engines.base import Engine
from profiler.engines.registry import ENGINES
from profiler.engines.transformers import CompileEngine
from profiler.grid import Phase
from profiler.loading import LoadedModel, ModelRequest, load
from profiler.machine.clock import Clock, Timing, no_gc, timing_of
from profiler.probes.hollow import hollow_config
from profiler.probes.kernels import conversions, core_alone, replayable_cores, replayable_linears
from profiler.probes.replay import replay_calls
from profiler.work.formats import is_linear, stored
from profiler.work.step import Step
from profiler.work.walk import linear_modules, walk

_TWIN_STEPS = 24
_TWIN_RUN = 6
_TWIN_BUDGET_S = 1.5
_TWIN_PROMPT = 8
_TWIN_SLOTS = _TWIN_PROMPT + _TWIN_STEPS
_TWIN_REPLAY_S = 0.1


DispatchTable = dict[tuple[str, Phase, int], Dispatch]
"""Dispatch by engine, phase and batch size; empty where the twin could not be built."""


def measure_dispatch(
    loaded: LoadedModel, config: Any, clock: Clock, batch_sizes: Sequence[int], engines: Sequence[str]
) -> DispatchTable:
    """What it costs to dispatch a prefill and a decode step with each engine, on the hollow twin.

    Compiled code is left out: the twin's would be other code than the model's, and take as long to compile.

    On a CPU a step's weights stream through the caches between its operators, so that Python and the dispatcher run
    cold: a twin that steps alone is too fast (6.2 instead of 10.6 ms for SmolLM2-135M on two cores). There the twin
    therefore steps with the model's own linears, and their time, measured in turn with it, is taken off again. On CUDA
    the host's caches do not see the weights, and the twin steps alone.
    """
    request = loaded.request
    try:
        twin = load(replace(request, weights="random"), hollow_config(config, request.quant))
        table: DispatchTable = {}
        for name in engines:
            if name == CompileEngine.name:
                continue
            engine = ENGINES[name](twin.module)
            if request.device.type == "cpu" and not loaded.offloaded:
                found = _dispatch_among_weights(loaded, twin, engine, clock, batch_sizes)
            else:
                found = _dispatch_alone(twin, engine, clock, batch_sizes)
            table |= {(name, phase, batch): dispatch for (phase, batch), dispatch in found.items()}
    except Exception:
        return {}
    return table


def _dispatch_alone(
    twin: LoadedModel, engine: Engine, clock: Clock, batch_sizes: Sequence[int]
) -> dict[tuple[Phase, int], Dispatch]:
    prefill, decode = _twin_alone(twin, engine, clock)
    # On CUDA a replayed kernel's launch hides behind the one before it, so nothing is paid twice.
    alone: dict[Phase, Dispatch] = {
        "prefill": Dispatch(prefill.median_s, 0.0, half_width_s=prefill.half_width_s),
        "decode": Dispatch(decode.median_s, 0.0, half_width_s=decode.half_width_s),
    }
    return {(phase, batch): alone[phase] for phase in alone for batch in batch_sizes}


def _twin_alone(twin: LoadedModel, engine: Engine, clock: Clock) -> tuple[Timing, Timing]:
    """(prefill, decode step) of the twin. A low quantile: what slows a step down is noise, not more dispatch."""
    ids = torch.zeros(1, _TWIN_PROMPT, dtype=torch.long, device=twin.request.device)
    prefills: list[float] = []
    decodes: list[float] = []
    with torch.inference_mode(), no_gc():
        engine.prepare(1, _TWIN_SLOTS)
        for _ in range(4):
            marks = [clock.mark()]
            state = engine.prefill(ids, _TWIN_SLOTS)
            marks.append(clock.mark())
            for _ in range(_TWIN_STEPS):
                state = engine.decode(state)
                marks.append(clock.mark())
            clock.synchronize()
            prefill_s, *decode_s = clock.seconds(marks)
            prefills.append(prefill_s)
            decodes += decode_s[1:]
    return (
        Timing(min(prefills), timing_of(prefills).half_width_s),
        Timing(sorted(decodes)[len(decodes) // 4], timing_of(decodes).half_width_s),
    )


def _dispatch_among_weights(
    loaded: LoadedModel, twin: LoadedModel, engine: Engine, clock: Clock, batch_sizes: Sequence[int]
) -> dict[tuple[Phase, int], Dispatch]:
    pairs = _paired_linears(loaded.module, twin.module)
    warm_prefill, warm_decode = _twin_alone(twin, engine, clock)

    def dispatch(warm: Timing, batch: int, query: int, context: int) -> Dispatch:
        among, calls_s = _among_weights(twin, engine, pairs, clock, batch=batch, query=query, request=loaded.request)
        calls_s += _cores_alone_s(twin, clock, batch=batch, query=query, context=context)
        converting_s = _conversions_alone_s(twin, clock, rows=batch * query)
        return cold_dispatch(warm, among, calls_s, converting_s)

    prefill = dispatch(warm_prefill, 1, _TWIN_PROMPT, 0)
    table: dict[tuple[Phase, int], Dispatch] = {}
    for batch in batch_sizes:
        table["prefill", batch] = prefill
        table["decode", batch] = dispatch(warm_decode, batch, 1, _TWIN_PROMPT)
    return table


def cold_dispatch(warm: Timing, among: Timing, calls_s: float, converting_s: float = 0.0) -> Dispatch:
    """Dispatch within a real step, from the twin's step alone, its step among the weights, and its bare calls.

    `among` is a difference of two times, and a busy machine can make it anything, less than nothing included; cold
    caches cannot make a step faster than warm ones, so the twin alone is its floor. The calls are a part of the step,
    and those that only convert between formats a part of the calls.
    """
    step_s = max(among.median_s, warm.median_s)
    in_kernels_s = min(calls_s, step_s)
    half_width_s = math.hypot(among.half_width_s, warm.half_width_s)
    return Dispatch(step_s, in_kernels_s, min(converting_s, in_kernels_s), half_width_s)


def _paired_linears(model: nn.Module, twin: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """(hollow, real) linears of the same name, in the order in which they stand."""
    real = dict(model.named_modules())
    return [(hollow, real[name]) for name, hollow in twin.named_modules() if is_linear(hollow)]


def _among_weights(
    twin: LoadedModel,
    engine: Engine,
    pairs: Sequence[tuple[nn.Module, nn.Module]],
    clock: Clock,
    *,
    batch: int,
    query: int,
    request: ModelRequest,
) -> tuple[Timing, float]:
    """Dispatch of a step whose weights stream by: (all of it, seconds of the calls of linears alone).

    The twin steps with the model's own linears in the place of its hollow ones; these linears one after the other take
    their time off again, and the calls that they need with it: those are measured as the twin's own linears, called
    between the model's, under the caches that a replay meets.
    """
    device, dtype = request.device, request.dtype
    widths = {stored(linear).in_features for pair in pairs for linear in pair}
    inputs = {width: torch.randn(batch, query, width, device=device, dtype=dtype) for width in widths}
    bare, calls = (
        [(linear, inputs[stored(linear).in_features]) for linear in side] for side in zip(*pairs, strict=True)
    )
    ids = torch.zeros(batch, _TWIN_PROMPT, dtype=torch.long, device=device)
    steps: list[float] = []
    linears: list[float] = []
    with_bare: list[float] = []
    with torch.inference_mode(), no_gc():
        deadline = time.perf_counter() + _TWIN_BUDGET_S
        while not steps or (len(steps) < _TWIN_STEPS and time.perf_counter() < deadline):
            # Steps in a row, as in a decode loop: after other work the first one finds Python colder still.
            with _real_linears(pairs, calls):
                state = engine.prefill(ids, _TWIN_SLOTS)
                marks = [clock.mark()]
                for _ in range(_TWIN_RUN):
                    state = engine.decode(state) if query == 1 else engine.prefill(ids, _TWIN_SLOTS)
                    marks.append(clock.mark())
            steps += clock.seconds(marks)[1:]
            for _ in range(2):
                marks = [clock.mark()]
                for real, x in calls:
                    real(x)
                marks.append(clock.mark())
                for (real, x), (hollow, y) in zip(calls, bare, strict=True):
                    real(x)
                    hollow(y)
                marks.append(clock.mark())
                linears_s, both_s = clock.seconds(marks)
                linears.append(linears_s)
                with_bare.append(both_s)
    step, apart = timing_of(steps), timing_of(linears)
    calls_s = max(0.0, timing_of(with_bare).median_s - apart.median_s)
    half_width_s = math.hypot(step.half_width_s, apart.half_width_s)
    return Timing(step.median_s - apart.median_s + calls_s, half_width_s), calls_s


@contextlib.contextmanager
def _real_linears(
    pairs: Sequence[tuple[nn.Module, nn.Module]], calls: Sequence[tuple[nn.Module, torch.Tensor]]
) -> Iterator[None]:
    """Within, each hollow linear runs the real one on its own input, and answers in its own shape."""
    answers: dict[tuple[int, ...], torch.Tensor] = {}

    def run(real: nn.Module, x: torch.Tensor, out_features: int, hidden: torch.Tensor) -> torch.Tensor:
        real.forward(x)
        shape = (*hidden.shape[:-1], out_features)
        if shape not in answers:
            answers[shape] = torch.randn(shape, device=hidden.device, dtype=hidden.dtype)
        return answers[shape]

    for (hollow, _), (real, x) in zip(pairs, calls, strict=True):
        hollow.forward = partial(run, real, x, stored(hollow).out_features)
    try:
        yield
    finally:
        for hollow, _ in pairs:
            del hollow.forward


def _conversions_alone_s(twin: LoadedModel, clock: Clock, *, rows: int) -> float:
    """Seconds of the twin's own conversions between formats, which have next to nothing to convert."""
    linears = replayable_linears(walk(twin.module), linear_modules(twin.module))
    converting = conversions(linears, dict.fromkeys(linears.operators, rows), twin.request)
    times = replay_calls(converting, device=twin.request.device, budget_s=_TWIN_REPLAY_S, clock=clock)
    return sum(each.median_s * linears.operators[key].count for key, each in times.items())


def _cores_alone_s(twin: LoadedModel, clock: Clock, *, batch: int, query: int, context: int) -> float:
    """Seconds of the twin's own attention cores, replayed as the model's are: next to nothing but calls."""
    step = Step(batch, query, context)
    return sum(
        core.count * core_alone(core, step, twin.request, _TWIN_REPLAY_S, clock).median_s
        for core in replayable_cores(walk(twin.module))
    )
