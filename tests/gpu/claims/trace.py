"""A step under torch's profiler next to what was predicted of it: kernels by name, launches, their times alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from profiler.diagnosis.facts import REST
from profiler.engines.transformers import EagerEngine, GraphEngine, StaticEngine
from profiler.grid import PHASES, Cell, CellKey
from profiler.loading.catalog import resolve
from profiler.loading.config import load_config
from profiler.loading.load import load
from profiler.loading.request import ModelRequest
from profiler.machine.kineto import recorded
from profiler.probes.hollow import hollow_config
from profiler.timing.visit import seeded_prompts
from profiler.work.attention import AttentionCore
from profiler.work.operators import Linear
from profiler.work.walk import called_modules, linear_key, linear_modules, walk

from .bench import Attempt, Bench, Check, NotRunError, facts_of, flushes, main_run, replayed_s, within

_MARK = "acceptance: "
_FUSED = {"cudnn": ("cudnn",), "flash": ("flash_fwd",), "memory-efficient": ("fmha", "AttentionKernel")}
"""Parts of kernels' names: cudnn_generated_fort_native_sdpa_..., pytorch_flash::flash_fwd_..., fmha_cutlassF_..."""
_SHARE = 0.05
_LEAST_KERNEL_S = 10e-6
"""Operators are judged that take this share of a step, with kernels this long: shorter ones are gaps in large part."""
_CELL = Cell(1, 512, 32)


def attempts(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("the main run", _main, least_s=60.0, cuda=False)
    for phase in PHASES:
        yield Attempt(f"{phase}: kernels", partial(_kernels, phase=phase), least_s=20.0)
    yield Attempt("replays behind two kinds of flush", _flushes, least_s=20.0)
    yield Attempt("attention of a static and a graph prefill", _kept_caches, least_s=20.0)


@dataclass(frozen=True)
class _Kernel:
    name: str
    seconds: float


@dataclass(frozen=True)
class _Traced:
    kernels: tuple[_Kernel, ...]
    parts: Mapping[str, tuple[_Kernel, ...]]
    """By operator."""
    launching: int
    """Operators of torch that launch something: cuBLAS and attention may launch one kernel more for a large shape."""


@dataclass(frozen=True)
class _Model:
    """A model and the names of the modules whose kernels are told apart."""

    module: Any
    hooked: Mapping[nn.Module, str]
    cores: Mapping[nn.Module, str]


def _named(module: Any) -> _Model:
    work = walk(module)
    linears, names = linear_modules(module), work.names
    found = {
        op: linears[linear_key(op)] for op in work.operators if isinstance(op, Linear) and linear_key(op) in linears
    }
    called = called_modules(module, work)
    found |= {op: several for op, several in called.items() if not isinstance(op, AttentionCore)}
    cores = {op: several for op, several in called.items() if isinstance(op, AttentionCore)}
    hooked, attending = ({each: names[op] for op, several in ops.items() for each in several} for ops in (found, cores))
    return _Model(module, hooked, attending)


def _main_model(bench: Bench) -> _Model:
    return _named(bench.load(bench.model))


def _small_model(bench: Bench) -> _Model:
    return _named(bench.load(bench.small))


def _twin(bench: Bench) -> _Model:
    source = resolve(bench.model)
    request = ModelRequest(source, bench.device, bench.dtype)
    return _named(load(request, hollow_config(load_config(source))).module)


def _main(bench: Bench) -> Iterator[Check]:
    run = bench.once(main_run)
    ended = bool((run.cells["status"] == "ok").all())
    yield Check("every cell of the main run ends", ended, list(run.document.answer), "ok")


def _step(bench: Bench, model: _Model, phase: str, cell: Cell) -> Callable[[], object]:
    engine = EagerEngine(model.module, bench.machine)
    ids = seeded_prompts(cell, model.module.config.vocab_size).to(bench.device)
    if phase == "prefill":
        return lambda: engine.prefill(ids, cell.slots)
    with torch.inference_mode():
        state = engine.prefill(ids, cell.slots)
    return lambda: engine.decode(state)


def _traced(bench: Bench, model: _Model, step: Callable[[], object]) -> _Traced:
    with torch.inference_mode():
        step()  # kernels are chosen and loaded as they are first used
        bench.machine.clock.synchronize()
        with _marked(model), recorded(cuda=True) as profile:
            step()
            bench.machine.clock.synchronize()
    host: list[Any] = []
    kernels: list[_Kernel] = []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CPU:
            host.append(event)
        elif not (event.is_user_annotation or event.name.startswith(_MARK)):
            kernels.append(_Kernel(event.name, (event.time_range.end - event.time_range.start) * 1e-6))
    if not kernels:
        raise NotRunError("torch's profiler sees no kernel here (no CUPTI, or counters are not permitted)")
    parts: dict[str, tuple[_Kernel, ...]] = {}
    for event in host:
        if event.name.startswith(_MARK):
            name = event.name.removeprefix(_MARK)
            parts[name] = (*parts.get(name, ()), *_below(event))
    return _Traced(tuple(kernels), parts, sum(bool(_own(event)) for event in host))


def _own(event: Any) -> list[_Kernel]:
    """Kernels that an event of the host launched itself; a mark's own span on the card is none."""
    return [_Kernel(each.name, each.duration * 1e-6) for each in event.kernels if not each.name.startswith(_MARK)]


def _below(event: Any) -> Iterator[_Kernel]:
    yield from _own(event)
    for child in event.cpu_children:
        yield from _below(child)


@contextmanager
def _marked(model: _Model) -> Iterator[None]:
    """Within, torch's profiler sees which operator a kernel belongs to, as replays tell them apart."""
    from transformers import AttentionInterface

    running: list[Any] = []

    def enter(module: nn.Module, *_: Any) -> None:
        running.append(torch.profiler.record_function(_MARK + model.hooked[module]))
        running[-1].__enter__()

    def leave(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    plain = AttentionInterface.get_interface

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = plain(self, name, default)

        def attend(module: nn.Module, *args: Any, **options: Any) -> Any:
            with torch.profiler.record_function(_MARK + model.cores.get(module, "other attention")):
                return function(module, *args, **options)

        return attend

    with ExitStack() as stack:
        for module in model.hooked:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        AttentionInterface.get_interface = get_interface
        stack.callback(setattr, AttentionInterface, "get_interface", plain)
        yield


def _backend(kernels: Sequence[_Kernel]) -> str:
    found = [name for name, words in _FUSED.items() if any(word in kernel.name for kernel in kernels for word in words)]
    return "+".join(sorted(found)) or "math"


def _attention(model: _Model, traced: _Traced) -> list[_Kernel]:
    return [kernel for name in {*model.cores.values()} for kernel in traced.parts.get(name, ())]


def _kernels(bench: Bench, phase: str) -> Iterator[Check]:
    model, run = bench.once(_main_model), bench.once(main_run)
    traced = _traced(bench, model, _step(bench, model, phase, _CELL))
    path = run.document.counting.paths[f"eager {phase}"]
    attention = _attention(model, traced)
    found = _backend(attention)
    names = sorted({kernel.name[:100] for kernel in attention})
    yield Check(f"{phase}: attention kernel", found == path.kernel, {"traced": found, "names": names}, path.kernel)
    yield from _replays(bench, phase, traced)
    twin = bench.once(_twin)
    alone = _traced(bench, twin, _step(bench, twin, phase, Cell(1, 8, 24)))
    value = {
        "model": traced.launching,
        "twin": alone.launching,
        "kernels": {"model": len(traced.kernels), "twin": len(alone.kernels)},
    }
    same = traced.launching == alone.launching
    yield Check(f"{phase}: operators that launch, twin = model", same, value, "equal")


def _replays(bench: Bench, phase: str, traced: _Traced) -> Iterator[Check]:
    """Kernels in the step next to the same ones alone, as the run replayed them."""
    facts = facts_of(bench.once(main_run))
    key = next(key for key in facts.grid.keys if _is_traced(key, phase))
    counts = {item.operator: item.count for item in facts.operators[key]}
    total_s = sum(kernel.seconds for kernel in traced.kernels)
    in_step = {name: sum(kernel.seconds for kernel in kernels) for name, kernels in traced.parts.items()}
    in_step[REST] = total_s - sum(in_step.values())
    lengths = {name: in_step[name] / max(1, len(kernels)) for name, kernels in traced.parts.items()}
    alone = {
        name: replay.whole.median_s * counts.get(name, 1)
        for name, replay in facts.replays.get(key, {}).items()
        if name in in_step
    }
    if not alone:
        raise NotRunError(f"the main run has no replays of its {phase}")
    ratios = {name: in_step[name] / alone[name] for name in alone}
    judged = [name for name in alone if in_step[name] > _SHARE * total_s and lengths.get(name, 0.0) > _LEAST_KERNEL_S]
    value = {"step_s": total_s, "judged": judged, "ratios": ratios, "traced_s": in_step}
    even = all(abs(ratios[name] - 1) < 0.1 for name in judged)
    yield Check(f"{phase}: traced / replayed kernels, by operator", even if judged else None, value, "within 10 %",
                "" if judged else "no operator has kernels long enough")  # fmt: skip
    yield within(
        f"{phase}: traced / replayed kernels, all", sum(in_step[name] for name in alone) / sum(alone.values()), 0.1
    )


def _is_traced(key: CellKey, phase: str) -> bool:
    return key.phase == phase and (key.cell.batch_size, key.cell.prompt_len) == (_CELL.batch_size, _CELL.prompt_len)


def _flushes(bench: Bench) -> Iterator[Check]:
    """Linears of one row behind a buffer that was read, and behind one that was written, next to the run's replays."""
    model, facts = bench.once(_main_model), facts_of(bench.once(main_run))
    key = next(key for key in facts.grid.keys if _is_traced(key, "decode"))
    groups: dict[str, list[Any]] = {}
    for module, name in model.hooked.items():
        groups.setdefault(name, []).append(module)
    read, write = flushes(bench)
    ratios: dict[str, float] = {}
    written: dict[str, float] = {}
    for name, modules in groups.items():
        if (replay := facts.replays[key].get(name)) is None or not hasattr(modules[0], "in_features"):
            continue
        x = torch.randn(1, 1, modules[0].in_features, device=bench.device, dtype=bench.dtype)
        calls = [partial(module, x) for module in modules]
        read_s, write_s = (replayed_s(bench, calls, flush) for flush in (read, write))
        ratios[name], written[name] = replay.whole.median_s / read_s, write_s / read_s
    even = all(abs(ratio - 1) < 0.1 for ratio in ratios.values())
    value = {"run / read flush": ratios, "write flush / read flush": written}
    yield Check("replays of the run / behind a read flush", even, value, "within 10 %")


def _kept_caches(bench: Bench) -> Iterator[Check]:
    """A cache that was filled before is masked by its length, or not, whoever keeps it."""
    model, found = bench.once(_small_model), {}
    ids = seeded_prompts(_CELL, model.module.config.vocab_size).to(bench.device)
    for kind in (StaticEngine, GraphEngine):
        engine = kind(model.module, bench.machine)
        with torch.inference_mode():
            engine.prepare(1, _CELL.slots)
        traced = _traced(bench, model, lambda engine=engine: engine.prefill(ids, _CELL.slots))
        found[engine.name] = sorted({kernel.name[:100] for kernel in _attention(model, traced)})
    same = found["static"] == found["graph"]
    yield Check("attention kernels of a static and a graph prefill", same, found, "equal")
