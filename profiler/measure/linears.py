"""All linears of a decode step without the host, in every format that runs here: as CUDA graphs, or timed on a CPU."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from profiler.counting.walk import LinearKey, linear_key, linear_modules
from profiler.device.machine import recorded
from profiler.errors import tolerate_errors
from profiler.facts.ceilings import Ceilings
from profiler.facts.measurements import FormatLinears, LinearsTime
from profiler.loading.load import load
from profiler.loading.request import DTYPES, dtype_name
from profiler.measure.dense_copies import packed_linears
from profiler.measure.kernels import cold_bytes_of, replay_linears, replayable_linears
from profiler.measure.short_model import pattern_of, shortened
from profiler.measure.subject import Subject
from profiler.quant.registry import FORMATS, PLAIN, can_quantise, check_quant
from profiler.quant.storage import stored
from profiler.stats import Timing, timing_of

_ROWS, _LAYERS = (1, 8, 64), 4
"""Sequences of a decode step at which linears are timed, and layers that stand for all (at least two periods)."""
_MATMUL = re.compile("mm|gem|linear|dequant")
_LEFT_OUT = ("int8", "fp4")
"""LLM.int8() looks for outliers in every call, for which the host waits. fp4 has nf4's kernels."""
Linears = Mapping[LinearKey, Sequence[Any]]


def time_formats(
    subject: Subject, config: Any, ceilings: Ceilings, room_bytes: float, budget_s: float
) -> FormatLinears:
    """Time all linears of a decode step in each format at each of _ROWS, in about `budget_s`, few rows first.

    On CUDA they are replayed as graphs: one by one, a slow host's launches would be compared, which took 12.2 ms of nf4
    next to 7.8 ms of dense Mistral-7B on an H200, where whole steps as graphs take 6.8 and 7.4.
    """
    machine, end_s, found = subject.machine, subject.machine.now_s() + budget_s, []
    linears = replayable_linears(subject.work, subject.loaded.module)
    whole = {linear_key(op): modules for op, modules in linears.items()}
    formats = _few_of_each(subject, config, whole, room_bytes, end_s - budget_s / 2)
    each_s = (end_s - machine.now_s()) / (len(_ROWS) * max(1, len(formats)))
    cold_bytes = cold_bytes_of(subject, ceilings)
    for rows, (name, (dtype, few)) in product(_ROWS, formats.items()):
        if machine.now_s() < end_s:
            seconds = replay_linears(
                few, dict.fromkeys(few, rows), machine, dtype=dtype, budget_s=each_s, cold_bytes=cold_bytes,
                between_bytes=0 if machine.captures else cold_bytes,
            )  # fmt: skip
            parts = [timing_of(samples).times(len(whole[key])) for key, samples in seconds.items()]
            if len(parts) == len(few):  # else some wait for the device
                time = Timing(sum(part.median_s for part in parts), sum(part.half_width_s for part in parts))
                kernel = kernel_of([modules[0] for modules in few.values()], dtype, rows, machine.device)
                found.append(LinearsTime(name, rows, time, kernel, machine.captures))
    return FormatLinears(tuple(found))


def _few_of_each(
    subject: Subject, config: Any, whole: Linears, room_bytes: float, until_s: float
) -> Mapping[str, tuple[torch.dtype, Linears]]:
    """Linears of a few layers, and the dtype of their inputs, by format: the run's own, 16 bits, then the fewest bits.

    Others than the run's own have random weights. The last of them are left out if time or `room_bytes` are short, as
    are those that do not load. Empty for a model whose layers do not repeat.
    """
    machine, request, model = subject.machine, subject.request, subject.loaded.module
    if (pattern := pattern_of(model, config.get_text_config())) is None:
        return {}
    layers = pattern.long(_LAYERS)
    few = {key: modules[: -(-len(modules) * layers // pattern.layers)] for key, modules in whole.items()}
    # Those in 16 bits, and half as much for embeddings and for what a library packs from.
    each_bytes = 3 * sum(len(modules) * ins * outs for (_, ins, outs), modules in few.items())
    own = " and ".join(dict.fromkeys(each.format for each in packed_linears(model))) or dtype_name(request.dtype)
    half = request.dtype if request.dtype.itemsize == 2 else getattr(torch, machine.info.sixteen_bit_dtype)
    formats: dict[str, tuple[torch.dtype, Linears]] = {own: (request.dtype, few)}
    capability = float(machine.info.compute_capability) if machine.is_cuda else 0.0
    for item in sorted(FORMATS.values(), key=lambda item: (item.package != "", item.bits)):
        name = item.name if item.package else dtype_name(half)
        # A CPU multiplies fp8 very slowly.
        has_kernels = item.least_capability <= capability or (item.is_tried and not machine.is_cuda)
        is_new = name not in formats and item.name not in _LEFT_OUT and can_quantise(item.name)
        if has_kernels and is_new and machine.now_s() < until_s and len(formats) * each_bytes <= room_bytes:
            with tolerate_errors():
                check_quant(item.name, half, request.device)
                short = replace(request, weights="random", dtype=half, quant=item.name, quant_options=PLAIN)
                made = linear_modules(load(short, shortened(config, layers)).module)
                formats[name] = half, {key: made[key] for key in whole}
    return formats


def kernel_of(modules: Sequence[Any], dtype: torch.dtype, rows: int, device: torch.device) -> str:
    """The slowest kernel of the largest packed linear, its library's own before torch's: `bitsandbytes::gemv_4bit`."""
    largest = max(modules, key=lambda module: (stored(module).format not in DTYPES, stored(module).weight_bytes))
    x = torch.randn(rows, 1, stored(largest).in_features, dtype=dtype, device=device)
    with torch.inference_mode(), recorded(cuda=False) as seen:
        largest(x)
    seconds = {event.key: event.self_cpu_time_total for event in seen.key_averages() if _MATMUL.search(event.key)}
    return max(seconds, key=lambda name: (not name.startswith("aten::"), seconds[name]), default="")
