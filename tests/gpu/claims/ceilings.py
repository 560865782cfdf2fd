"""Ceilings compared with the datasheet, a second measurement and a graph of the same work; known kernels; the clock."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from profiler.device.clock import now_s
from profiler.device.telemetry import Watch
from profiler.effort import Effort
from profiler.facts.ceilings import GEMV, READ, Ceiling, Ceilings
from profiler.loading.request import DTYPES, dtype_name
from profiler.roofs.bandwidth import measure_read
from profiler.roofs.gemm import measurable_dtypes, measure_gemm, square_matmul, square_size
from profiler.roofs.measure import measure
from profiler.roofs.sampler import random_data, sample

from .bench import Attempt, Bench, Check, NotRunError, within
from .kernels import judged_kernels

_APART = 0.03
_HEATING_S = 3.0
_HEATING_SIDE = 16384
_READINGS_S = 0.05
_GEMV_SIDE = 4096


def attempts(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("streams", _stream_ceiling, least_s=30.0, cuda=False)
    for dtype in measurable_dtypes(bench.device):
        yield Attempt(f"{dtype} matmul", partial(_matmul_ceiling, dtype=dtype), cuda=False)
    for name in (READ, "GEMV", "GEMM"):
        yield Attempt(f"{name} in a graph", partial(_in_a_graph, name=name))
    yield Attempt("known kernels", _known_kernels, least_s=40.0, cuda=False)


def first_ceilings(bench: Bench) -> Ceilings:
    """Return the ceilings, after some seconds of matmuls: a cold card would be faster the first time."""
    if bench.cuda:
        _load(bench, _HEATING_S)
    dtype = dtype_name(bench.dtype) if bench.cuda else "float32"
    dtypes = measurable_dtypes(bench.device)
    budget_s = (len(dtypes) + 5) * _stage_s(bench)
    return measure(bench.machine, dtypes, model_dtype=dtype, budget_s=budget_s)


def _stage_s(bench: Bench) -> float:
    return Effort().ceiling_s if bench.cuda else 0.1


def _load(bench: Bench, seconds: float) -> None:
    x = torch.randn(_HEATING_SIDE, _HEATING_SIDE, device=bench.device, dtype=torch.float16)
    end_s = now_s() + seconds
    while now_s() < end_s:
        x @ x
        bench.machine.clock.synchronize()


def _stream_ceiling(bench: Bench) -> Iterator[Check]:
    first = bench.once(first_ceilings)
    again = partial(measure_read, bench.machine, first.stream_bytes, _stage_s(bench))
    yield _twice(bench, "stream", first.memory[READ], again)
    sheet = bench.machine.info.datasheet
    if sheet is None:
        yield Check("stream / datasheet", None, why="this device is not in the table of datasheets")
    else:
        share = first.memory_bytes_per_s / sheet.bandwidth_bytes_per_s
        yield Check("stream / datasheet", 0.6 < share < 1.02, share, "0.6 .. 1.02")


def _matmul_ceiling(bench: Bench, dtype: str) -> Iterator[Check]:
    first = bench.once(first_ceilings).compute.get(dtype)
    if first is None:
        raise NotRunError(f"this card and torch have no {dtype} matmul")
    again = partial(measure_gemm, bench.machine, dtype, _stage_s(bench))
    yield _twice(bench, f"{dtype} matmul", first, again)
    sheet = bench.machine.info.datasheet
    if sheet is None:
        return
    if peak := sheet.peak_flops_per_s(dtype):
        # Peaks are stated at the rated clock, above which cards boost.
        share = first.per_s / peak / max(1.0, (first.clock_hz or 0.0) / sheet.rated_clock_hz)
        yield Check(f"{dtype} matmul / datasheet", 0.3 < share < 1.02, share, "0.3 .. 1.02")
    if sheet.sustained_flops_per_s and sheet.sustained_dtype == dtype:
        share = first.per_s / sheet.sustained_flops_per_s
        yield Check(f"{dtype} matmul / a healthy card's", share > 0.9, share, "> 0.9")


def _twice(bench: Bench, name: str, first: Ceiling, again: Callable[[], Ceiling]) -> Check:
    """Compare two measurements of a ceiling, raw or at one clock.

    Readings of the clock are few, and a card at its power cap changes its clock between them.
    """
    source = bench.machine.source
    start_hz = source.read().clock_hz
    with Watch(source, interval_s=_READINGS_S) as watch:
        second = again()
    end_hz = source.read().clock_hz
    seen = [reading.clock_hz for reading in watch.readings if reading.clock_hz]
    middle_hz = statistics.median(seen) if seen else None
    now_hz = middle_hz or end_hz
    raw = second.per_s / first.per_s
    level = raw * first.clock_hz / now_hz if first.clock_hz and now_hz else raw
    value = {
        "raw": raw,
        "at one clock": level,
        "per_s": first.per_s,
        "first_clock_hz": first.clock_hz,
        "clocks": {"start": start_hz, "middle": middle_hz, "end": end_hz},
    }
    apart = min(abs(raw - 1), abs(level - 1))
    return bench.on_a_card(f"{name} measured twice", apart < _APART, value, "one of both < 3 % apart")


def _in_a_graph(bench: Bench, name: str) -> Iterator[Check]:
    """Compare with the same work in a graph, without the host: a lower ceiling includes its launches.

    Both are sampled for the same time: a card at its power limit is faster in the first milliseconds.
    """
    ceilings, machine, dtype = bench.once(first_ceilings), bench.machine, dtype_name(bench.dtype)
    if name == READ:
        ceiling, data = ceilings.memory[READ], random_data(ceilings.stream_bytes, bench.device)
        work, call = float(data.nbytes), data.sum
    elif name == "GEMV":
        shape = {"device": bench.device, "dtype": DTYPES[dtype]}
        count = max(3, ceilings.stream_bytes // (_GEMV_SIDE**2 * DTYPES[dtype].itemsize))
        weights = [torch.randn(_GEMV_SIDE, _GEMV_SIDE, **shape) for _ in range(count)]
        row = torch.randn(1, _GEMV_SIDE, **shape)
        ceiling, work = ceilings.memory[f"{GEMV} {dtype}"], float(sum(weight.nbytes for weight in weights))

        def call() -> Any:
            for weight in weights:
                F.linear(row, weight)
    else:
        ceiling = ceilings.compute[dtype]
        work = 2.0 * square_size(ceiling) ** 3
        call, _ = square_matmul(bench.device, dtype, square_size(ceiling))
    with torch.inference_mode():
        with machine.on_side_stream():
            call()
        graph_s, eager_s = (
            statistics.median(sample(run, machine, _stage_s(bench))) for run in (machine.capture(call), call)
        )
    ratio = ceiling.per_s * graph_s / work
    value = {
        "ceiling / graph": ratio,
        "eager / graph": eager_s / graph_s,
        "graph_s": graph_s,
        "clock_hz": ceiling.clock_hz,
    }
    yield within(f"{name}: ceiling / the same in a graph", ratio, 0.05, value)


def _known_kernels(bench: Bench) -> Iterator[Check]:
    found = judged_kernels(bench.machine, bench.once(first_ceilings), 3.0 if bench.cuda else 0.3)
    for number, item in enumerate(found):
        expected = item.kernel.label
        value = {"label": item.label, "rounds": dict(item.rounds)}
        yield bench.on_a_card(f"known kernel: {item.kernel.name}", item.label == expected, value, expected)
        if bench.left_s < 10 or (not bench.cuda and number == 2):
            return
