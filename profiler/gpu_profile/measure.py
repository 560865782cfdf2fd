"""Measure a GPU profile in about a minute and write it: products, attention and dispatch over standard shapes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from profiler import __version__, effort
from profiler.counting.attention import AttentionCore
from profiler.counting.operators import Linear
from profiler.counting.walk import called_modules, walk
from profiler.device.device import software
from profiler.device.machine import Machine
from profiler.device.telemetry import Watch
from profiler.engines.transformers import EagerEngine
from profiler.errors import DeviceError, ModelError, RequestError
from profiler.facts.dispatch import dispatch_of
from profiler.facts.roofs import Ceilings
from profiler.facts.step import ExecutionPath
from profiler.facts.telemetry import busy_share
from profiler.gpu_profile.kernels import fitted_on
from profiler.gpu_profile.profile import (
    PROFILE_SCHEMA,
    AttentionPoint,
    DispatchPoint,
    GpuProfile,
    ProductPoint,
    SmallPoint,
    fastest_points,
    least_of,
    profile_json,
)
from profiler.grid.cells import DEFAULT_ENGINE, PHASES, Cell, CellKey
from profiler.json_document import view
from profiler.loading.config import load_config
from profiler.loading.device_map import planned_weight_bytes
from profiler.loading.load import load
from profiler.loading.meta_model import build_on_meta, quiet_libraries
from profiler.loading.request import DTYPES, LoadedModel, ModelRequest, dtype_name
from profiler.loading.source import resolve
from profiler.measure.captured_calls import answered
from profiler.measure.dispatch import measure_dispatch
from profiler.measure.replay import replay_calls
from profiler.options import listed, one_of
from profiler.predict.kernel_times import from_memory_s
from profiler.predict.operator_arrays import StepArrays, operator_arrays
from profiler.quant.registry import FORMATS, Quant, can_quantise
from profiler.quant.storage import is_linear, model_storage_bytes, stored
from profiler.stats import timing_of
from profiler.store.writer import replace_file

_WIDTHS = ((1024, 128), (576, 576), (576, 1536), (1536, 576), (1024, 4096), (2048, 2048), (576, 49152))
_TRANSPOSED_WIDTHS = ((576, 576), (576, 1536), (1536, 576), (1024, 4096))
"""Weights stored as inputs by outputs, as in GPT-2: another kernel if there are few rows."""
_WIDE = ((4096, 4096), (4096, 14336), (14336, 4096))
"""(in, out): above keys and values of few heads, and small models; here, on GPUs only, some billion parameters."""
_HEADS = ((9, 3, 64), (16, 4, 128))
_BATCHES = (1, 8)
STANDARD_MODEL = "smollm2-135m"
_MOST_CALL_S = 0.1
"""Products that would take longer are left out: the roof describes larger ones."""
SMALL_TOKENS = (4, 16, 64, 256, 1024, 4096)
_MOST_PASS_S = 0.05
_SHARES = {"products": 0.5, "transposed": 0.2, "attention": 0.3}
_VISITS = 2
"""Measurements of each kernel, with all others in between: a disturbance of seconds affects only one of them."""
_FORMAT_S = 1.5
"""Seconds for the products of one format in one visit."""
_MOST_FORMAT_CALL_S = 0.02
"""If some rows take longer, more rows are left out: no roof describes a library's slow path."""
PROFILE_BUDGET_S = 24.0
_MOST_PASSES = 3
# If other processes were busy for more than this share of a pass, another pass follows.
_MOST_BUSY_SHARE = 0.25


def profiled_dtypes(dtypes: str, out: Path) -> list[str]:
    """Return the dtypes of a profile from a comma-separated list.

    Raises RequestError for an unknown dtype, or if `out` cannot be written.
    """
    names = listed(dtypes)
    for name in names:
        one_of(name, "--out-dtypes", DTYPES)
    if not names:
        raise RequestError(f"--out-dtypes {dtypes!r} names no dtype; use {', '.join(DTYPES)}.")
    if not out.parent.is_dir():
        raise RequestError(f"--out {out}: the folder {out.parent} does not exist; create it first.")
    if out.is_dir():
        raise RequestError(f"--out {out} is a folder; give a file, such as {out / 'card.json'}.")
    return names


def write_profile(machine: Machine, ceilings: Ceilings, names: Sequence[str], out: Path) -> list[str]:
    """Measure the profile of a machine in some dtypes, given its roofs, and write it; return warnings.

    If other processes were busy, it is measured again, and each kernel's shortest time counts. Raises RunError, and
    DeviceError if no roof of memory or of arithmetic could be measured.
    """
    if not ceilings.judges:
        why = next(iter(ceilings.missing.values()))
        raise DeviceError(f"--out {out}: a profile needs this device's roofs, which could not be measured ({why}).")
    passes: list[GpuProfile] = []
    busy = 1.0
    while busy > _MOST_BUSY_SHARE and len(passes) < _MOST_PASSES:
        with quiet_libraries(), Watch(machine.source) as watch:
            profile = measure_profile(machine, ceilings, names, PROFILE_BUDGET_S, installed_formats())
            smalls = tuple(point for name in names for point in _small_points(machine, profile, name))
        passes.append(replace(profile, smalls=smalls))
        busy = busy_share(watch.readings)
    replace_file(out, profile_json(least_of(passes)))
    if busy <= _MOST_BUSY_SHARE:
        return []
    return [f"other processes were busy in all {len(passes)} passes of the profile: stop them and measure it again."]


def installed_formats() -> tuple[Quant, ...]:
    """Return the packed weight formats whose library is installed."""
    return tuple(item.name for item in FORMATS.values() if item.is_profiled and can_quantise(item.name))


def measure_profile(
    machine: Machine, ceilings: Ceilings, dtypes: Sequence[str], budget_s: float, formats: Sequence[Quant] = ()
) -> GpuProfile:
    """Return the profile of a machine, given its measured roofs; `budget_s` is for the kernels of all dtypes.

    Those of `formats` that do not run here in a dtype are left out.
    """
    products: list[ProductPoint] = []
    attentions: list[AttentionPoint] = []
    dispatches: list[DispatchPoint] = []
    each_s = budget_s / (len(dtypes) * _VISITS)
    for dtype in [*dtypes] * _VISITS:
        products += _products(machine, ceilings, dtype, "dense", _SHARES["products"] * each_s)
        products += _products(machine, ceilings, dtype, "transposed", _SHARES["transposed"] * each_s)
        for quant in formats:
            products += _packed(machine, ceilings, dtype, quant)
        attentions += _attentions(machine, dtype, _SHARES["attention"] * each_s)
    for dtype in dtypes:
        dispatches += _dispatches(machine, dtype)
    info = machine.info
    return view(
        GpuProfile,
        info,
        schema_version=PROFILE_SCHEMA,
        roofscope=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        software=software(),
        ceilings=ceilings,
        products=fastest_points(products),
        attentions=fastest_points(attentions),
        dispatches=tuple(dispatches),
        smalls=(),
        datasheet=info.datasheet.gpu if info.datasheet else None,
    )


def _products(
    machine: Machine, ceilings: Ceilings, dtype: str, layout: Literal["dense", "transposed"], budget_s: float
) -> Iterator[ProductPoint]:
    """Products over rows and widths, rotating through so many weights that no cache holds them."""
    kind = DTYPES[dtype]
    shared_widths, product = (_WIDTHS, F.linear) if layout == "dense" else (_TRANSPOSED_WIDTHS, _transposed)
    widths = (*shared_widths, *_WIDE) if machine.is_cuda else shared_widths
    flops_per_s = ceilings.compute_flops_per_s(dtype)
    shapes = [
        (rows, ins, outs)
        for ins, outs in widths
        for rows in effort.STANDARD.profile_rows
        if 2.0 * rows * ins * outs / flops_per_s < _MOST_CALL_S
    ]
    for ins, outs in widths:
        width_rows = [rows for rows, *sizes in shapes if tuple(sizes) == (ins, outs)]
        nbytes = ins * outs * kind.itemsize
        layers = max(2, math.ceil(ceilings.past_caches_bytes / nbytes))
        shape = (outs, ins) if layout == "dense" else (ins, outs)
        first = torch.randn(*shape, device=machine.device, dtype=kind)
        weights = [first, *(first.clone() for _ in range(layers - 1))]
        bias = None if layout == "dense" else torch.zeros(outs, device=machine.device, dtype=kind)
        for rows in width_rows:
            # A pass goes through all weights once. Long products have so many rows that memory matters little, and a
            # few weights are enough.
            pass_s = 2.0 * rows * ins * outs / flops_per_s
            most = max(2, int(_MOST_PASS_S / pass_s))
            x = torch.randn(1, rows, ins, device=machine.device, dtype=kind)
            median_s = _median_s(
                machine, [partial(product, x, weight, bias) for weight in weights[:most]], budget_s / len(shapes)
            )
            yield ProductPoint(dtype, layout, rows, ins, outs, float(nbytes), median_s)


def _transposed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What transformers' Conv1D calls."""
    return torch.addmm(bias, x.view(-1, x.shape[-1]), weight)


def _packed(machine: Machine, ceilings: Ceilings, dtype: str, quant: Quant) -> Iterator[ProductPoint]:
    """Products with packed weights over rows; none if the format does not run here. They run through the layers of the
    standard model, and of as many copies as no cache holds."""
    try:
        loaded = load_standard(machine, dtype, quant)
    except (RequestError, ModelError):
        return
    layers: dict[tuple[str, str, int, int], list[nn.Module]] = {}
    nbytes: dict[tuple[str, str, int, int], int] = {}
    stack = loaded.module.model.layers
    copies = math.ceil(ceilings.past_caches_bytes / model_storage_bytes(stack))
    for layer_stack in (stack, *(copy.deepcopy(stack) for _ in range(copies - 1))):
        for module in filter(is_linear, layer_stack.modules()):
            weight = stored(module)
            shape = (dtype_name(weight.compute_dtype), weight.format, weight.in_features, weight.out_features)
            layers.setdefault(shape, []).append(module)
            nbytes[shape] = weight.weight_bytes
    for rows in effort.STANDARD.profile_rows:
        inputs = {ins: torch.randn(1, rows, ins, device=machine.device, dtype=DTYPES[dtype]) for _, _, ins, _ in layers}
        calls = {shape: [partial(layer, inputs[shape[2]]) for layer in modules] for shape, modules in layers.items()}
        samples = replay_calls(calls, machine, budget_s=_FORMAT_S / len(effort.STANDARD.profile_rows))
        medians_s = {shape: timing_of(times).median_s for shape, times in samples.items()}
        for (kind, format_, ins, outs), seconds in medians_s.items():
            yield ProductPoint(kind, format_, rows, ins, outs, float(nbytes[kind, format_, ins, outs]), seconds)
        if max(medians_s.values(), default=0.0) > _MOST_FORMAT_CALL_S:
            return


def _attentions(machine: Machine, dtype: str, budget_s: float) -> Iterator[AttentionPoint]:
    kind = DTYPES[dtype]
    for heads, kv_heads, dim in _HEADS:
        for batch, query, keys in effort.STANDARD.profile_attentions:
            q = torch.randn(batch, heads, query, dim, device=machine.device, dtype=kind)
            k, v = (torch.randn(batch, kv_heads, keys, dim, device=machine.device, dtype=kind) for _ in range(2))

            def call(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> object:
                return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)

            seconds = _median_s(machine, [call] * 4, budget_s / (len(effort.STANDARD.profile_attentions) * len(_HEADS)))
            yield AttentionPoint(dtype, batch, query, keys, heads, kv_heads, dim, seconds)


def _median_s(machine: Machine, calls: Sequence[Callable[[], object]], budget_s: float) -> float:
    """Median seconds of one of `calls`."""
    samples = replay_calls({"it": calls}, machine, budget_s=budget_s)
    return timing_of(samples["it"]).median_s


def replay_small_kernels(machine: Machine, dtype: str) -> dict[int, float]:
    """Return the seconds of a layer's small kernels in a prefill of the standard model, by its number of tokens.

    The prefill runs without its products and attention; the same prefill of one token, which is dispatch, is
    subtracted. Empty where the device captures: there a graph's least time describes them.
    """
    if machine.captures:
        return {}
    loaded = load_standard(machine, dtype)
    engine = EagerEngine(loaded.module, machine)
    calls = {
        tokens: [partial(engine.prefill, torch.zeros(1, tokens, dtype=torch.long, device=machine.device), tokens)]
        for tokens in (1, *SMALL_TOKENS)
    }
    with answered(loaded.module, called_modules(loaded.module, walk(loaded.module))):
        seconds = {
            tokens: timing_of(times).median_s
            for tokens, times in replay_calls(calls, machine, budget_s=effort.STANDARD.profile_small_s).items()
        }
    layers = loaded.config.num_hidden_layers
    return {tokens: max(0.0, seconds[tokens] - seconds[1]) / layers for tokens in SMALL_TOKENS}


def load_standard(machine: Machine, dtype: str, quant: Quant = "none") -> LoadedModel:
    """Return the standard model with random weights. Raises RequestError if a GPU has no room for it."""
    source = resolve(STANDARD_MODEL)
    try:
        return load(ModelRequest(source, machine.device, DTYPES[dtype], quant, weights="random"), load_config(source))
    except torch.OutOfMemoryError as error:
        raise RequestError("the GPU has no room for the standard model, which measures its dispatch.") from error


def _dispatches(machine: Machine, dtype: str) -> Iterator[DispatchPoint]:
    """Dispatch time per layer of the standard model, on a CPU among the model's own weights."""
    loaded = load_standard(machine, dtype)
    layers = loaded.config.num_hidden_layers
    for samples in measure_dispatch(
        loaded, loaded.config, machine, _BATCHES, [DEFAULT_ENGINE], effort.STANDARD.profile_twin_s
    ):
        dispatch = dispatch_of(samples)
        yield DispatchPoint(
            dtype, samples.phase, samples.batch_size, dispatch.step_s / layers, dispatch.in_kernels_s / layers
        )


def _small_points(machine: Machine, profile: GpuProfile, dtype: str) -> list[SmallPoint]:
    """Times of a layer's small kernels in prefills of the standard model, and the time of their memory traffic.

    Prefills of few tokens, whose small kernels may not show next to dispatch, are left out.
    """
    small_s = {tokens: seconds for tokens, seconds in replay_small_kernels(machine, dtype).items() if seconds > 0}
    if not small_s:
        return []
    config = load_config(resolve(STANDARD_MODEL))
    module = build_on_meta(config, DTYPES[dtype])
    steps = StepArrays.of(
        [CellKey("prefill", Cell(batch_size=1, prompt_len=tokens, new_tokens=1)) for tokens in small_s]
    )
    paths = dict.fromkeys(PHASES, ExecutionPath())
    needed = operator_arrays(walk(module), steps, paths, planned_weight_bytes(module))
    device = fitted_on(profile, dtype, config.num_hidden_layers).device
    traffic_s = from_memory_s(needed, device, lambda column: isinstance(column.source, Linear | AttentionCore))
    return [
        SmallPoint(dtype, float(each_s) / config.num_hidden_layers, small_s[int(tokens)])
        for tokens, each_s in zip(steps.tokens, traffic_s, strict=True)
    ]
