"""What questions.sh asks in a new process each: the pasted lines, a traced prefill, the linears of all formats."""

import statistics
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from profiler.counting.walk import walk
from profiler.device.clock import time_apart, waited_s
from profiler.device.machine import recorded
from profiler.device.telemetry import Watch
from profiler.loading.config import load_config
from profiler.loading.load import load
from profiler.loading.request import ModelRequest, dtype_name
from profiler.loading.source import resolve
from profiler.measure.linears import time_formats
from profiler.measure.subject import Subject
from profiler.roofs.measure import measure
from profiler.run.options import Options
from profiler.run.validate import prepare

from .bench import Attempt, Bench, Check

_TOKENS = {True: 64, False: 4}
_PREFILL = {True: (8, 512), False: (2, 16)}
_REPEATS = {True: 15, False: 2}
_LINEARS_S = {True: 25.0, False: 3.0}
"""Each on a card and on a CPU, where the model is tiny."""


def lines(bench: Bench, quant: str = "none") -> Iterator[Attempt]:
    yield Attempt(f"generate with the lines to paste, {quant}", partial(_lines, quant=quant), cuda=False)


def prefill(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("a traced prefill", _prefill, cuda=False)


def linears(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("all linears of a step", _linears, cuda=False)


def _lines(bench: Bench, quant: str) -> Iterator[Check]:
    """`generate` as it is, without cuDNN's attention, and with a static cache: what each line does in a new process."""
    model, tokens = bench.load(bench.model, quant=quant), _TOKENS[bench.cuda]

    def timed(length: int, **more: Any) -> tuple[float, list[int]]:
        ids, found = torch.arange(3, 3 + length, device=bench.device)[None], list[Any]()
        given = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, **more}
        seconds = waited_s(lambda: found.append(model.generate(ids, **given)), bench.machine.clock.synchronize)
        return seconds, found[0][0, length:].tolist()

    wrote: list[list[int]] = []
    for name, more in (("as it is", {}), ("cuDNN off", {}), ("static", {"cache_implementation": "static"})):
        torch.backends.cuda.enable_cudnn_sdp(name != "cuDNN off")
        (first_s, ids), (known_s, _), (new_s, _) = timed(16, **more), timed(16, **more), timed(16 + tokens, **more)
        wrote.append(ids)
        value = {
            "first_call_s": first_s,
            "ms_per_token_at_known_lengths": 1e3 * known_s / tokens,
            "ms_per_token_at_new_lengths": 1e3 * new_s / tokens,
            "tokens_as_before": sum(one == other for one, other in zip(ids, wrote[0], strict=True)),
        }
        yield Check(f"generate, {name}, {quant}", None, value, why="only measured")


def _prefill(bench: Bench) -> Iterator[Check]:
    """Matmuls, attention and small kernels of a prefill by its trace, and its clock: eager, and with compiled code."""
    model, shape = bench.load(bench.model), _PREFILL[bench.cuda]
    ids = torch.zeros(*shape, dtype=torch.long, device=bench.device)
    numels = [each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear)]
    flops = 2.0 * ids.numel() * (sum(numels) - model.get_output_embeddings().weight.numel())
    for name in ("eager", "compiled"):
        backend = "inductor" if bench.cuda else "eager"
        call = model if name == "eager" else torch.compile(model, backend=backend)

        def step(call: Any = call) -> object:
            with torch.inference_mode():
                return call(input_ids=ids, use_cache=True, logits_to_keep=1)

        first_s = waited_s(step, bench.machine.clock.synchronize)
        with Watch(bench.machine.source, interval_s=0.1) as watch:
            _, *seconds = time_apart(step, bench.machine.clock, 1 + _REPEATS[bench.cuda])
        times_s = _kernel_times(bench, step)
        matmuls_s = sum(second for key, second in times_s.items() if "mm" in key or key.endswith("linear"))
        attention_s = sum(second for key, second in times_s.items() if "attention" in key)
        clocks = sorted(reading.clock_hz for reading in watch.readings if reading.clock_hz)
        value = {
            "first_call_s": first_s,
            "prefill_s": statistics.median(seconds),
            "matmuls_s": matmuls_s,
            "flops_per_s": flops / matmuls_s if matmuls_s else None,
            "attention_s": attention_s,
            "small_kernels_s": sum(times_s.values()) - matmuls_s - attention_s,
            "clock_hz": [clocks[0], statistics.median(clocks), clocks[-1]] if clocks else None,
        }
        yield Check(f"prefill {shape[0]} x {shape[1]}, {name}", None, value, why="only measured")


def _kernel_times(bench: Bench, step: Any) -> dict[str, float]:
    """Seconds of kernels by the operator that launched them; on a CPU, of the operators themselves."""
    with recorded(cuda=bench.cuda) as profile:
        step()
        bench.machine.clock.synchronize()
    name = "self_device_time_total" if bench.cuda else "self_cpu_time_total"
    host = [each for each in profile.key_averages() if each.device_type == torch.autograd.DeviceType.CPU]
    return {each.key: 1e-6 * getattr(each, name) for each in host if getattr(each, name)}


def _linears(bench: Bench) -> Iterator[Check]:
    source = resolve(bench.model)
    config = load_config(source)
    loaded = load(ModelRequest(source, bench.device, bench.dtype), config)
    prepared = prepare(Options(model=bench.model, weights="random", device=str(bench.device)))
    subject = Subject(bench.machine, loaded, walk(loaded.module), {}, {}, prepared.grid, prepared.prompts)
    ceilings = measure(bench.machine, [], model_dtype=dtype_name(bench.dtype), budget_s=_LINEARS_S[bench.cuda] / 4)
    found = time_formats(subject, config, ceilings, 0.5 * bench.machine.available_bytes(), _LINEARS_S[bench.cuda])
    for item in found.times:
        graphs = item.graph == bench.cuda
        yield Check(f"linears: {item.format}, {item.rows} rows", graphs, asdict(item.time), "a graph on a card")
