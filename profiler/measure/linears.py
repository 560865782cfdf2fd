"""All linears of a decode step without the host, in every format that runs here: as CUDA graphs, or timed on a CPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import nn

from profiler.counting.walk import linear_key, linear_modules
from profiler.device.clock import now_s
from profiler.device.machine import Machine, recorded
from profiler.errors import tolerate_errors
from profiler.facts.measurements import BatchTimes, FormatLinears, LinearsTime
from profiler.loading.load import load
from profiler.loading.request import dtype_name
from profiler.measure.dense_twins import PackedLinear, is_dense, packed_linears
from profiler.measure.kernels import cold_bytes_of, replayable_linears
from profiler.measure.replay import replay_linears
from profiler.measure.subject import Subject
from profiler.measure.trials import pattern_of, shortened
from profiler.quant.registry import FORMATS, PLAIN, can_quantise, check_quant
from profiler.quant.storage import stored
from profiler.stats import Timing, timing_of

_ROWS = (1, 8, 64)
"""Sequences of a decode step at which linears are timed."""
_LAYERS, _MOST_PACKED = 4, 32
"""Layers that stand for a model, at least two periods of its pattern, and linears that stand for a script's."""
_LOADING_SHARE = 0.5
_PRODUCT = re.compile("mm|gem|linear|dequant")
_LEFT_OUT = ("int8", "fp4")
"""LLM.int8() looks for outliers in every call, for which the host waits. fp4 has nf4's kernels."""


def time_formats(subject: Subject, config: Any, room_bytes: float, budget_s: float) -> FormatLinears | None:
    """Time the linears of the model and those of other formats at each of _ROWS, in about `budget_s`.

    Other formats are loaded with random weights, in few layers. The last of them are left out if time or `room_bytes`
    are short, as are larger numbers of rows, and formats that do not load. None for a model whose layers do not repeat.
    """
    machine, request, model = subject.machine, subject.request, subject.loaded.module
    if (pattern := pattern_of(model, config.get_text_config())) is None:
        return None
    start_s, layers = machine.now_s(), pattern.long(_LAYERS)
    operators = replayable_linears(subject.work, linear_modules(model))
    whole = {linear_key(op): modules for op, modules in operators.items()}
    few = {key: modules[: -(-len(modules) * layers // pattern.layers)] for key, modules in whole.items()}
    # Those in 16 bits, and half as much for embeddings and for what a library packs from.
    each_bytes = 3 * sum(len(modules) * ins * outs for (_, ins, outs), modules in few.items())
    own = " and ".join(dict.fromkeys(each.format for each in packed_linears(model))) or dtype_name(request.dtype)
    half = request.dtype if request.dtype.itemsize == 2 else getattr(torch, machine.info.sixteen_bit_dtype)
    formats = {own: (request.dtype, few)}
    capability = float(machine.info.compute_capability) if machine.is_cuda else 0.0
    for item in sorted(FORMATS.values(), key=lambda item: (item.package != "", item.bits)):  # 16 bits first
        name = item.name if item.package else dtype_name(half)
        # A CPU multiplies fp8 very slowly.
        has_kernels = item.least_capability <= capability or (item.is_tried and not machine.is_cuda)
        is_new = name not in formats and item.name not in _LEFT_OUT and can_quantise(item.name)
        late = machine.now_s() > start_s + _LOADING_SHARE * budget_s
        if has_kernels and is_new and not late and len(formats) * each_bytes <= room_bytes:
            with tolerate_errors():
                check_quant(item.name, PLAIN, half, request.device)
                short = replace(request, weights="random", dtype=half, quant=item.name, quant_options=PLAIN)
                made = linear_modules(load(short, shortened(config, layers)).module)
                formats[name] = half, {key: made[key] for key in whole}
    counts, found = {key: len(modules) for key, modules in whole.items()}, []
    each_s = (start_s + budget_s - machine.now_s()) / (len(_ROWS) * len(formats))
    for rows, name in product(_ROWS, formats):
        dtype, linears = formats[name]
        if machine.now_s() < start_s + budget_s:
            time = _step_time(linears, counts, rows, dtype, machine, cold_bytes_of(subject), each_s)
            kernel = kernel_of([modules[0] for modules in linears.values()], dtype, rows, machine.device)
            found += [LinearsTime(name, rows, time, kernel, machine.captures)] if time else []
    return FormatLinears(tuple(found)) if found else None


def times_by_batch(
    linears: Sequence[PackedLinear], twins: Sequence[nn.Linear], machine: Machine, until_s: float
) -> list[BatchTimes]:
    """The seconds of a script's first packed linears and of dense ones at each of _ROWS, until `until_s`."""
    sides = [[each.module] for each in linears[:_MOST_PACKED]], [[twin] for twin in twins[:_MOST_PACKED]]
    counts, dtype, cold_bytes = [1] * _MOST_PACKED, twins[0].weight.dtype, 2 * machine.info.last_level_cache_bytes
    times = []
    for rows in _ROWS:
        packed, dense = (
            _step_time(dict(enumerate(side)), counts, rows, dtype, machine, cold_bytes, 0.0) for side in sides
        )
        if packed and dense and now_s() < until_s:
            times.append(BatchTimes(rows, packed.median_s, dense.median_s))
    return times


def _step_time(
    linears: Any, counts: Any, rows: int, dtype: torch.dtype, machine: Machine, cold_bytes: int, budget_s: float
) -> Timing | None:
    """The time of the linears in a decode step with `counts` of each, whose weights come from memory.

    On CUDA they are replayed as graphs: one by one, a slow host's launches would be compared, which took 12.2 ms of nf4
    next to 7.8 ms of dense Mistral-7B on an H200, where whole steps as graphs take 6.8 and 7.4. None if they wait for
    the device.
    """
    seconds = replay_linears(
        linears, dict.fromkeys(linears, rows), machine, dtype=dtype, budget_s=budget_s, cold_bytes=cold_bytes,
        between_bytes=0 if machine.captures else cold_bytes,
    )  # fmt: skip
    parts = [timing_of(samples).times(counts[key]) for key, samples in seconds.items()]
    if len(parts) < len(linears):
        return None
    return Timing(sum(part.median_s for part in parts), sum(part.half_width_s for part in parts))


def kernel_of(modules: Sequence[Any], dtype: torch.dtype, rows: int, device: torch.device) -> str:
    """The product or conversion of the largest packed linear that takes the host longest: `bitsandbytes::gemv_4bit`."""
    largest = max(modules, key=lambda module: (not is_dense(module), stored(module).weight_bytes))
    x = torch.randn(rows, 1, stored(largest).in_features, dtype=dtype, device=device)
    with torch.inference_mode(), recorded(cuda=False) as seen:
        largest(x)
    events = [event for event in seen.key_averages() if _PRODUCT.search(event.key)]
    return str(max(events, key=lambda event: event.self_cpu_time_total).key) if events else ""
