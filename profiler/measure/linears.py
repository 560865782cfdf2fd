"""A model's linears: all of a decode step without the host, in every format that runs here; packed ones made dense."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from profiler.counting.walk import LinearKey, linear_key, linear_modules
from profiler.device.machine import recorded
from profiler.errors import tolerate_errors
from profiler.facts.ceilings import Ceilings
from profiler.facts.measurements import FormatLinears, LinearsTime
from profiler.loading.load import load
from profiler.loading.request import DTYPES, dtype_name
from profiler.measure.kernels import cold_bytes_of, replay_linears, replayable_linears
from profiler.measure.short_model import pattern_of, shortened
from profiler.measure.subject import Subject
from profiler.quant.registry import FORMATS, PLAIN, can_quantise, check_quant
from profiler.quant.storage import is_linear, stored
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


_MOST_BYTES = 2 << 30
"""Bytes of dense weights at most. Layers share weights beyond that, and no cache of a CPU or GPU holds so many."""
_SPREAD = 0.02
"""Standard deviation of their random values, small enough that no activation overflows."""


@dataclass(frozen=True)
class PackedLinear:
    """A linear of packed weights, and its place in a model."""

    parent: nn.Module
    name: str
    module: Any

    @property
    def shape(self) -> tuple[int, int, bool]:
        """(inputs, outputs, whether it has a bias)."""
        return self.module.in_features, self.module.out_features, getattr(self.module, "bias", None) is not None

    @property
    def format(self) -> str:
        """The format as `stored` names it, or the module's class."""
        try:
            name = stored(self.module).format
        except (ValueError, AttributeError):
            name = "packed"
        return type(self.module).__name__ if name == "packed" else name


def packed_linears(model: nn.Module) -> list[PackedLinear]:
    """The linears of a model whose weights are not a plain matrix of floats of 16 or more bits."""
    return [
        PackedLinear(parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_linear(child) and type(child).__name__ != "Conv1D" and not _is_dense(child)
    ]


def _is_dense(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if weight is None or type(weight) not in (torch.Tensor, nn.Parameter):
        return False
    wide = weight.is_floating_point() and weight.itemsize > 1
    return bool(wide and tuple(weight.shape) == (module.out_features, module.in_features))


def dense_copies(linears: Sequence[PackedLinear], dtype: torch.dtype, room_bytes: float) -> list[nn.Linear]:
    """A dense linear of random weights for each packed one; if `room_bytes` is short, those of a shape take turns."""
    whole_bytes = sum(ins * outs for ins, outs, _ in (each.shape for each in linears)) * dtype.itemsize
    share = min(1.0, min(room_bytes, _MOST_BYTES) / max(1, whole_bytes))
    made: dict[tuple[int, int, bool], list[nn.Linear]] = {}
    copies = []
    for number, each in enumerate(linears):
        of_shape = made.setdefault(each.shape, [])
        count = sum(other.shape == each.shape for other in linears)
        if len(of_shape) < math.ceil(share * count):
            tensors = (*each.module.parameters(recurse=False), *each.module.buffers(recurse=False))
            device = tensors[0].device if tensors else torch.device("cpu")
            ins, outs, bias = each.shape
            linear = nn.Linear(ins, outs, bias=bias, dtype=dtype, device="meta").to_empty(device=device)
            with torch.no_grad():
                for parameter in linear.parameters():
                    parameter.normal_(std=_SPREAD)
            of_shape.append(linear.requires_grad_(False))
            copies.append(of_shape[-1])
        else:
            copies.append(of_shape[number % len(of_shape)])
    return copies


@contextlib.contextmanager
def replaced(linears: Sequence[PackedLinear], copies: Sequence[nn.Linear]) -> Iterator[None]:
    """Context manager in which a model computes with `copies` in place of its packed linears."""
    try:
        for each, copy in zip(linears, copies, strict=True):
            setattr(each.parent, each.name, copy)
        yield
    finally:
        for each in linears:
            setattr(each.parent, each.name, each.module)
