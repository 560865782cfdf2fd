"""A step under torch's profiler compared with predictions: kernels by name, launches, their times in replays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from profiler.counting.attention import AttentionCore
from profiler.counting.operators import Linear
from profiler.counting.walk import called_modules, linear_key, linear_modules, walk
from profiler.device.machine import recorded
from profiler.engines.transformers import EagerEngine, GraphEngine, StaticEngine
from profiler.facts.operators import REST
from profiler.facts.run_facts import Facts
from profiler.grid.cells import PHASES, Cell, CellKey
from profiler.loading.config import load_config
from profiler.loading.prompts import Prompts
from profiler.loading.source import resolve
from profiler.measure.overhead import overhead_model_config

from .bench import Attempt, Bench, Check, NotRunError, cells_measured, facts_of, main_run, replayed_s, within

_MARK = "acceptance: "
_FUSED = {"cudnn": ("cudnn",), "flash": ("flash_fwd",), "memory-efficient": ("fmha", "AttentionKernel")}
"""Parts of kernels' names: cudnn_generated_fort_native_sdpa_..., pytorch_flash::flash_fwd_..., fmha_cutlassF_..."""
_SHARE = 0.05
_LEAST_KERNEL_S = 10e-6
"""The least share of the step and the least kernel time of a judged operator: shorter kernels are mostly gaps."""
_CELL = Cell(1, 512, 32)

_ATTENTION, _REPLAYS, _LAUNCHES = (
    "attention kernel", "kernels of the step / replayed", "operators that launch, overhead model = model"
)  # fmt: skip

Kernel = tuple[str, float]


def attempts(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("the main run", _main_cells, least_s=60.0, cuda=False)
    for phase in PHASES:
        for name, run in ((_ATTENTION, _attention_kernel), (_REPLAYS, _replays), (_LAUNCHES, _launches)):
            yield Attempt(f"{phase}: {name}", partial(run, phase=phase), least_s=20.0)
    yield Attempt("arithmetic of a prefill / traced matmuls", _arithmetic, least_s=20.0)
    yield Attempt("replays of the run / all layers in a graph", _all_layers, least_s=20.0)
    yield Attempt("attention of a static and a graph prefill", _kept_caches, least_s=20.0)


@dataclass(frozen=True)
class _Trace:
    kernels: list[Kernel]
    parts: Mapping[str, list[Kernel]]
    launching: int
    """Operators of torch that launch a kernel: cuBLAS and attention may launch one more for a large shape."""


@dataclass(frozen=True)
class _Model:
    """A model and the modules of its operators, as replays distinguish them."""

    module: Any
    names: Mapping[nn.Module, str]
    cores: Mapping[nn.Module, str]


def _with_names(module: Any) -> _Model:
    work, linears = walk(module), linear_modules(module)
    found = {op: linears.get(linear_key(op), []) for op in work.operators if isinstance(op, Linear)}
    found |= called_modules(module, work)
    names = {each: work.names[op] for op, several in found.items() for each in several}
    attending = [op for op in found if isinstance(op, AttentionCore)]
    return _Model(module, names, {each: names[each] for op in attending for each in found[op]})


def _main_model(bench: Bench) -> _Model:
    return _with_names(bench.load(bench.model))


def _overhead_model(bench: Bench) -> _Model:
    config = overhead_model_config(load_config(resolve(bench.model)))
    return _with_names(bench.load(bench.model, config=config))


def _main_cells(bench: Bench) -> Iterator[Check]:
    run = bench.once(main_run)
    yield cells_measured("every cell of the main run is measured", run, list(run.document.answer))


def _step(bench: Bench, model: _Model, phase: str, cell: Cell) -> Callable[[], object]:
    engine = EagerEngine(model.module, bench.machine)
    ids = Prompts(model.module.config.vocab_size).of(cell).to(bench.device)
    if phase == "prefill":
        return lambda: engine.prefill(ids, cell.slots)
    with torch.inference_mode():
        state = engine.prefill(ids, cell.slots)
    return lambda: engine.decode(state)


def _trace(bench: Bench, model: _Model, step: Callable[[], object]) -> _Trace:
    with torch.inference_mode():
        step()  # kernels are chosen and loaded at their first use
        bench.machine.clock.synchronize()
        with _marks(model), recorded(cuda=True) as profile:
            step()
            bench.machine.clock.synchronize()
    host = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CPU]
    kernels = [kernel for event in host for kernel in _own_kernels(event)]
    if not kernels:
        raise NotRunError("torch's profiler sees no kernel here (no CUPTI, or counters are not permitted)")
    parts: dict[str, list[Kernel]] = {}
    for event in host:
        if event.name.startswith(_MARK):
            parts.setdefault(event.name.removeprefix(_MARK), []).extend(_all_kernels(event))
    return _Trace(kernels, parts, sum(bool(_own_kernels(event)) for event in host))


def _traces(bench: Bench) -> dict[str, _Trace]:
    model = bench.once(_main_model)
    return {phase: _trace(bench, model, _step(bench, model, phase, _CELL)) for phase in PHASES}


def _own_kernels(event: Any) -> list[Kernel]:
    """Return the kernels that an event of the host launched itself; the span of a mark on the card is not a kernel."""
    return [(each.name, each.duration * 1e-6) for each in event.kernels if not each.name.startswith(_MARK)]


def _all_kernels(event: Any) -> Iterator[Kernel]:
    yield from _own_kernels(event)
    for child in event.cpu_children:
        yield from _all_kernels(child)


@contextmanager
def _marks(model: _Model) -> Iterator[None]:
    """Let torch's profiler see the operator of each kernel, within the context."""
    from transformers import AttentionInterface

    running: list[Any] = []
    plain = AttentionInterface.get_interface

    def enter(module: nn.Module, *_: Any) -> None:
        running.append(torch.profiler.record_function(_MARK + model.names[module]))
        running[-1].__enter__()

    def leave(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = plain(self, name, default)

        def attend(module: nn.Module, *args: Any, **options: Any) -> Any:
            enter(module)
            result = function(module, *args, **options)
            leave()
            return result

        return attend

    with ExitStack() as stack:
        for module in model.names.keys() - model.cores.keys():
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        AttentionInterface.get_interface = get_interface
        stack.callback(setattr, AttentionInterface, "get_interface", plain)
        yield


def _attention(model: _Model, trace: _Trace) -> list[str]:
    parts = (trace.parts.get(name, []) for name in set(model.cores.values()))
    return sorted({name[:100] for kernels in parts for name, _ in kernels})


def _attention_kernel(bench: Bench, phase: str) -> Iterator[Check]:
    path = bench.once(main_run).document.counting.paths[f"eager {phase}"]
    names = _attention(bench.once(_main_model), bench.once(_traces)[phase])
    seen = [backend for backend, words in _FUSED.items() if any(word in name for name in names for word in words)]
    found = "+".join(sorted(seen)) or "math"
    yield Check(f"{phase}: {_ATTENTION}", found == path.kernel, {"trace": found, "names": names}, path.kernel)


def _arithmetic(bench: Bench) -> Iterator[Check]:
    """What matmuls need at the compute ceiling is at most what they took, else the ceiling is too low for their
    clock."""
    run, model = bench.once(main_run), bench.once(_main_model)
    parts, attention = bench.once(_traces)["prefill"].parts, set(model.cores.values())
    matmuls_s = sum(seconds for name, kernels in parts.items() if name not in attention for _, seconds in kernels)
    cells = run.cells.set_index(["phase", "batch_size", "prompt_len"])
    needed_s = float(cells.loc[("prefill", _CELL.batch_size, _CELL.prompt_len), "compute_s"])
    if math.isnan(needed_s):
        raise NotRunError("the run's time ended before the traced prefill was measured")
    value = {"arithmetic_s": needed_s, "matmuls_s": matmuls_s}
    yield Check("prefill: arithmetic term / traced matmuls", needed_s < 1.03 * matmuls_s, value, "<= 1, within 3 %")


def _launches(bench: Bench, phase: str) -> Iterator[Check]:
    trace, overhead_model = bench.once(_traces)[phase], bench.once(_overhead_model)
    overhead_model_trace = _trace(bench, overhead_model, _step(bench, overhead_model, phase, Cell(1, 8, 24)))
    value = {
        "operators": {"model": trace.launching, "overhead_model": overhead_model_trace.launching},
        "kernels": {"model": len(trace.kernels), "overhead_model": len(overhead_model_trace.kernels)},
    }
    yield Check(f"{phase}: {_LAUNCHES}", trace.launching == overhead_model_trace.launching, value, "equal")


def _replays(bench: Bench, phase: str) -> Iterator[Check]:
    facts, trace = facts_of(bench.once(main_run)), bench.once(_traces)[phase]
    key = _key(facts, phase)
    counts = {item.operator: item.count for item in facts.operators[key]}
    total_s = sum(seconds for _, seconds in trace.kernels)
    in_step = {name: sum(seconds for _, seconds in kernels) for name, kernels in trace.parts.items()}
    in_step[REST] = total_s - sum(in_step.values())
    replays = {name: replay for name, replay in facts.replays.get(key, {}).items() if name in in_step}
    in_replays = {name: replay.whole.median_s * counts.get(name, 1) for name, replay in replays.items()}
    if not in_replays:
        raise NotRunError(f"the main run has no replays of its {phase}")
    shortest_s = {name: _LEAST_KERNEL_S * len(trace.parts.get(name, trace.kernels)) for name in in_replays}
    judged = [name for name in in_replays if in_step[name] > max(_SHARE * total_s, shortest_s[name])]
    ratios = {name: in_step[name] / in_replays[name] for name in in_replays}
    value = {"step_s": total_s, "judged": judged, "ratios": ratios, "in_step_s": in_step}
    even = all(abs(ratios[name] - 1) < 0.1 for name in judged)
    name, why = f"{phase}: {_REPLAYS}", "" if judged else "no operator has kernels long enough"
    yield Check(f"{name}, by operator", even if judged else None, value, "within 10 %", why)
    yield within(f"{name}, all", sum(in_step[each] for each in in_replays) / sum(in_replays.values()), 0.1)


def _key(facts: Facts, phase: str) -> CellKey:
    requested = phase, _CELL.batch_size, _CELL.prompt_len
    return next(key for key in facts.grid.keys if (key.phase, key.cell.batch_size, key.cell.prompt_len) == requested)


def _all_layers(bench: Bench) -> Iterator[Check]:
    """Compare linears of one row with the run's replays, here all layers in one graph."""
    model, facts = bench.once(_main_model), facts_of(bench.once(main_run))
    replays = facts.replays[_key(facts, "decode")]
    groups: dict[str, list[Any]] = {}
    for module, name in model.names.items():
        if name in replays and isinstance(module, nn.Linear):
            groups.setdefault(name, []).append(module)
    ratios: dict[str, float] = {}
    judged: list[str] = []
    for name, modules in groups.items():
        x = torch.randn(1, 1, modules[0].in_features, device=bench.device, dtype=bench.dtype)
        read_s = replayed_s(bench, [partial(each, x) for each in modules])
        ratios[name] = replays[name].whole.median_s / read_s
        judged += [name] if read_s > _LEAST_KERNEL_S else []
    even = all(abs(ratios[name] - 1) < 0.1 for name in judged)
    value, why = {"judged": judged, "ratios": ratios}, "" if judged else "no linear has kernels long enough"
    yield Check("replays of the run / all layers in a graph", even if judged else None, value, "within 10 %", why)


def _kept_caches(bench: Bench) -> Iterator[Check]:
    """Both engines reset a filled cache, so neither may need a mask if the other does not."""
    model, found = _with_names(bench.load(bench.small)), {}
    ids = Prompts(model.module.config.vocab_size).of(_CELL).to(bench.device)
    for kind in (StaticEngine, GraphEngine):
        engine = kind(model.module, bench.machine)
        with torch.inference_mode():
            engine.prepare(1, _CELL.slots)
        found[engine.name] = _attention(model, _trace(bench, model, partial(engine.prefill, ids, _CELL.slots)))
    same = found["static"] == found["graph"]
    yield Check("attention kernels of a static and a graph prefill", same, found, "equal")
