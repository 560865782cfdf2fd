"""Costs without a trial: time in modules and in slower code, weights over links, cuDNN's plans, loads that convert."""

from __future__ import annotations

import contextlib
import inspect
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from profiler.counting.attention import AttentionCore
from profiler.counting.memory_need import memory_need, path_on
from profiler.counting.operators import Experts, ModelWork
from profiler.counting.walk import called_modules, collapse_numbers, walk
from profiler.data.free_memory import idle_room_bytes
from profiler.device.clock import Clock, first_and_second_s, now_s
from profiler.device.device import compute_capability
from profiler.device.machine import Machine, machine_for
from profiler.device.memory import total_bytes
from profiler.errors import RequestError, first_line
from profiler.facts.step import Attention, ExecutionPath, Step
from profiler.fallbacks import Fallback, cure_of, quotes_of
from profiler.loading.device_map import DeviceMap, offloaded_bytes
from profiler.patching import patched, switched
from profiler.quant.storage import is_linear
from profiler.roofs.bandwidth import measure_links
from profiler.units import duration, scaled
from profiler.why_slow.findings import Finding, SlowModule, Untried
from profiler.why_slow.floor import Subject
from profiler.why_slow.model_changes import has_room_for_all
from profiler.why_slow.observations import Call, Observations
from profiler.why_slow.plain_models import is_plain
from profiler.why_slow.repeat_call import CallGroup, Run
from profiler.why_slow.watched_calls import device_map_of, gpus_in_turn, is_spread

# New tokens that stand for a longer `generate`.
_FEW_TOKENS = 4


@dataclass
class _Visit:
    name: str
    weight: float
    marks: list[Any]
    children: list[_Visit] = field(default_factory=list)
    flops: float = 0.0
    nbytes: float = 0.0


@dataclass(frozen=True)
class ModuleTimes:
    """Seconds of a group's calls in each module without its children, by the module's name, and their ceilings."""

    group: CallGroup
    own_s: Mapping[str, float]
    ceiling_s: Mapping[str, float]
    """Empty without ceilings."""
    calls: Mapping[str, float]
    """Calls of the module in one of the group's calls."""
    noise_s: float = 0.0
    """How much of the seconds the repetition took longer than the script's own call."""

    def ceiling_within(self, prefixes: tuple[str, ...]) -> float:
        """Roofline seconds of the modules whose names begin with one of these."""
        return sum(seconds for name, seconds in self.ceiling_s.items() if f"{name}.".startswith(prefixes))

    def slowest(self) -> list[SlowModule]:
        """The modules with the most time beyond ceilings and noise: of one class together, torch's own by place."""
        modules = dict(self.group.model.named_modules())
        by_kind: dict[tuple[type, str], list[str]] = {}
        for name in sorted(self.own_s, key=lambda name: -self.own_s[name]):
            kind = type(modules[name])
            place = collapse_numbers(name) if kind.__module__.startswith("torch.nn") else ""
            by_kind.setdefault((kind, place), []).append(name)
        forwards, where = max(1, self.group.middle[0].forwards), self.group.calls[0].where
        found = []
        for (kind, _), names in by_kind.items():
            beyond_s = sum(self.own_s[name] - self.ceiling_s.get(name, 0.0) for name in names)
            calls = sum(self.calls[name] for name in names) / forwards
            if beyond_s > self.noise_s:
                found.append(
                    SlowModule(kind.__name__, collapse_numbers(names[0]), _line_of(kind), beyond_s, calls, where)
                )
        return sorted(found, key=lambda module: -module.beyond_s)


def _line_of(kind: type) -> str:
    """The line of a class's `forward`, as `modeling_llama.py:88`."""
    with contextlib.suppress(OSError, TypeError):  # made at run time
        forward = inspect.unwrap(vars(kind).get("forward", kind))
        return f"{Path(str(inspect.getsourcefile(forward))).name}:{inspect.getsourcelines(forward)[1]}"
    return ""


def module_times(
    group: CallGroup, affordable: Callable[[float], bool], subject: Subject | None = None
) -> ModuleTimes | None:
    """The times of the modules in a repetition of the group's middle call; None if it has no time or fails.

    A call of which `affordable` is false is shortened. The ceiling of a linear or a convolution is its arithmetic or
    its weights, that of attention is its two matmuls or its keys and values; the work of `subject` knows the experts of
    a token.
    """
    call, noted = group.middle
    if not (parts := _affordable_parts(group.repeated(), call, affordable)):
        return None
    called = called_modules(group.model, subject.work) if subject and not is_plain(group.model) else {}
    experts = {id(module): operator for operator, modules in called.items()
               if isinstance(operator, Experts) for module in modules}  # fmt: skip
    try:
        visits, whole_s = _visits(group.model, parts, noted.clock, experts)
    except Exception:  # a call that cannot be repeated has no known modules
        return None
    own_s, ceiling_s, calls = (defaultdict[str, float](float) for _ in range(3))
    group_s = group.seconds - sum(each.left_out_s for each in group.calls)
    scale = group_s / whole_s if whole_s > 0 else 0.0
    noise_s = max(0.0, group_s - scale * (call.steady_s - call.left_out_s))
    under, clock = subject.under if subject else None, noted.clock
    peak = under.peak(call.settings.dtype, call.settings.dtype) if under else 1.0
    for visit in visits:
        seconds = clock.seconds(visit.marks)[0] - sum(clock.seconds(child.marks)[0] for child in visit.children)
        own_s[visit.name] += scale * visit.weight * seconds
        calls[visit.name] += visit.weight
        if under:
            least_s = max(visit.flops / peak, visit.nbytes / under.bytes_per_s)
            ceiling_s[visit.name] += len(group.calls) * visit.weight * least_s
    return ModuleTimes(group, own_s, ceiling_s, calls, noise_s)


def _affordable_parts(run: Run, call: Call, affordable: Callable[[float], bool]) -> Sequence[Run]:
    """The whole call, its prompt and a few tokens, or its prompt; empty if not even that is affordable."""
    if affordable(call.steady_s):
        return (run,)
    for tokens in (_FEW_TOKENS, 1):
        parts = run.shortened(tokens) if call.new_tokens > tokens else ()
        if parts and affordable(sum(part.about_s for part in parts)):
            return parts
    return ()


def _visits(
    model: nn.Module, parts: Sequence[Run], clock: Clock, experts: Mapping[int, Experts]
) -> tuple[list[_Visit], float]:
    """Each visit of a module while the parts run, with its work, and the seconds of all parts.

    A part that counts negatively is the first forward of the last part. It is not run again: that forward counts less.
    """
    *others, last = [part for part in parts if part.weight > 0]
    repeated = sum(part.weight for part in parts if part.weight < 0)
    visits, stack = list[_Visit](), list[_Visit]()
    whole_s, sdpa = 0.0, nn.functional.scaled_dot_product_attention

    def enter(name: str) -> None:
        visit = _Visit(name, part.weight + (less if len(marks) == 1 else 0.0), [clock.mark()])
        if stack:
            stack[-1].children.append(visit)
        visits.append(visit)
        stack.append(visit)

    def leave(module: nn.Module, args: Any, found: Any) -> None:
        mark, visit = clock.mark(), stack.pop()
        visit.marks.append(mark)
        if not visit.name and len(marks) == 1:
            marks.append(mark)
        _add_work(visit, module, experts.get(id(module)), args, found)

    def attention(query: Any, key: Any, value: Any, *args: Any, **named: Any) -> Any:
        if stack:  # its work belongs to the module that calls it
            pairs = query.shape[:-1].numel() * key.shape[-2] / (2 if named.get("is_causal") else 1)
            stack[-1].flops += 2.0 * pairs * (query.shape[-1] + value.shape[-1])
            stack[-1].nbytes += key.nbytes + value.nbytes
        return sdpa(query, key, value, *args, **named)

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(lambda *_, name=name: enter(name)).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        hooks.enter_context(patched(nn.functional, scaled_dot_product_attention=attention))
        for part, less in [*((part, 0.0) for part in others), (last, repeated)]:
            marks = [clock.mark()]
            part()
            marks.append(clock.mark())
            clock.synchronize()
            first_s, *further_s = clock.seconds(marks)
            whole_s += (part.weight + less) * first_s + part.weight * sum(further_s)
    return visits, whole_s


def _add_work(visit: _Visit, module: Any, experts: Experts | None, args: Any, found: Any) -> None:
    """Add two FLOPs per weight and output of a linear [outputs, inputs] or a convolution, and its weights."""
    weight = getattr(module, "weight", None)
    differs = isinstance(module, nn.Embedding | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    if experts is not None and args:
        tokens = args[0].numel() // args[0].shape[-1]
        need = experts.work(Step(1, tokens, 0), ExecutionPath())
        visit.flops += float(need.model_flops) / experts.count
        visit.nbytes += float(need.weight_bytes) / experts.count
    elif isinstance(weight, torch.Tensor) and weight.dim() > 1 and not differs:
        outputs = getattr(module, "out_features", None) or getattr(module, "nf", None) or weight.shape[0]
        inputs = getattr(module, "in_features", None) or weight.numel() // outputs
        visit.flops += 2.0 * inputs * (found.numel() if isinstance(found, torch.Tensor) else 0)
        visit.nbytes += sum(each.nbytes for each in module.parameters(recurse=False))


def fallback_findings(
    fallbacks: Sequence[Fallback],
    groups: Sequence[CallGroup],
    times_of: Callable[[CallGroup], ModuleTimes | None],
    untried: Untried,
) -> Iterator[Finding]:
    """What slower code costs at most: the time in its modules without their linears; `untried` gets what is unknown."""
    on_gpu = any(not group.settings.on_cpu for group in groups)
    for module in dict.fromkeys(each.module for each in fallbacks):
        here = [each for each in fallbacks if each.module == module]
        change, quotes = cure_of(here, on_gpu=on_gpu), quotes_of(here)
        seconds = {group.calls[0].where: s for group in groups if (s := _slow_s(group, module, times_of)) is not None}
        if seconds:
            yield Finding(
                "fallback", sum(seconds.values()), max(seconds, key=lambda where: seconds[where]),
                f"{module} runs slower code: {quotes}", change,
                "at most", f"the time in {module} without its linears, in a repeated call",
            )  # fmt: skip
        else:
            untried.add(change, f"its seconds are unknown ({quotes})")


def _slow_s(group: CallGroup, module: str, times_of: Callable[[CallGroup], ModuleTimes | None]) -> float | None:
    """Seconds of the group's calls in modules of this class, without their linears; None if they cannot be measured."""
    modules = dict(group.model.named_modules())
    slow = tuple(f"{name}." for name, each in modules.items() if module and type(each).__name__.endswith(module))
    if not slow or (times := times_of(group)) is None:
        return None
    inside = [name for name, each in modules.items()
              if f"{name}." in slow or (name.startswith(slow) and not is_linear(each))]  # fmt: skip
    return min(group.seconds, max(0.0, sum(times.own_s.get(name, 0.0) for name in inside)))


# Seconds to measure one link.
_LINK_S = 1.0


def placement_findings(groups: Sequence[CallGroup], untried: Untried) -> Iterator[Finding]:
    """What placement costs calls at most, where no trial can show it; `untried` gets what cannot be measured."""
    for group in [each for each in groups if not is_plain(each.model) and is_spread(each.model)]:
        try:
            yield from _over_the_link(group)
        except Exception as error:  # a user's model may fail in any way, and the answer is useful without a bound
            untried.add(f"offload ({group.loaded_at})", first_line(error))
        if (count := gpus_in_turn(group.model)) > 1:
            yield Finding(
                "gpus-in-turn", (1 - 1 / count) * group.seconds, group.loaded_at, group.settings.placement,
                f"pass distributed_config=DistributedConfig(tp_size={count}) to from_pretrained, and start with"
                f" torchrun --nproc-per-node {count}: each GPU then computes a part of every layer",
                "at most", f"1 - 1/{count} of the calls, if {count} GPUs shared every layer and sent nothing",
            )  # fmt: skip


def _over_the_link(group: CallGroup) -> Iterator[Finding]:
    """The time in which offloaded weights cross their link, by its measured bandwidth, unless a trial shows it."""
    model, weight_bytes = group.model, group.model.get_memory_footprint(return_buffers=False)
    machine = machine_for(model.device)
    if has_room_for_all(model) or not (crossing := offloaded_bytes(model, DeviceMap(device_map_of(model), None))):
        return
    links, missing = measure_links(tuple(crossing), machine, _LINK_S)
    if missing:
        raise RequestError("; ".join(missing.values()))
    step_s = sum(nbytes / links[name].per_s for name, nbytes in crossing.items())
    forwards = sum(call.forwards for call in group.calls)
    rates = " and ".join(f"{scaled(links[name].per_s, 'B/s')} from the {name}" for name in crossing)
    yield Finding(
        "offload", min(group.seconds, forwards * step_s), group.loaded_at,
        f"{scaled(sum(crossing.values()), 'B')} of {scaled(weight_bytes, 'B')} of weights cross a link in"
        f" each of {forwards} forwards, {duration(step_s)} at {rates}",
        what_fits(walk(model), weight_bytes, group.call, machine),
        "at most", "the bytes that cross the link, at its measured bandwidth",
    )  # fmt: skip


def what_fits(work: ModelWork, weight_bytes: int, call: Call, machine: Machine) -> str:
    """What to do if weights are not on the device that computes, by the rule for free memory of `count --gpu`."""
    device = machine.device
    free_bytes = idle_room_bytes(device.type, total_bytes(device))
    attention: Attention = "eager" if call.settings.attention == "eager" else "sdpa"
    path = path_on(work, attention, fuses_grouped_heads=not machine.is_cuda or compute_capability(device) >= (8, 0))
    path = replace(path, gathers_experts=machine.is_cuda)
    step = Step(call.batch_size, max(1, call.prompt_len + call.context_len), 0)
    needs = float(memory_need(work, weight_bytes, step, max(1, call.new_tokens), path).safe_bytes)
    other = f"load it in {'8 or 4 bits, or on a GPU with more memory' if machine.is_cuda else 'fewer bits'}"
    change = other if needs > free_bytes else f'device_map={{"": "{device}"}}'
    return f"{change}: all of it needs {scaled(needs, 'B')}, and this device has {scaled(free_bytes, 'B')} free"


# New lengths at which attention is measured; the first one loads the kernel.
_LENGTHS = 4


def plan_findings(groups: Sequence[CallGroup], untried: Untried) -> Iterator[Finding]:
    """The plans that cuDNN builds for the KV lengths of `generate`; `untried` gets those that cannot be measured.

    cuDNN builds one for each exact shape (PyTorch, aten/src/ATen/native/cudnn/MHA.cpp), which torch 2.11 and later
    prefer on Hopper and Blackwell. Its time is measured at lengths that the script did not use, with cuDNN and without.
    """
    by_model = defaultdict[int, list[CallGroup]](list)
    for group in groups:
        if group.calls[0].grows_a_cache and group.calls[0].settings.attention == "sdpa":
            by_model[id(group.model)].append(group)
    for own in by_model.values():
        calls = [call for group in own for call in group.calls]
        # The first new token comes from the prompt's forward.
        shapes = {(call.batch_size, call.context_len + call.prompt_len + number)
                  for call in calls for number in range(1, call.new_tokens)}  # fmt: skip
        if not shapes:
            continue
        try:
            plan_s = _plan_s(own[0].model, shapes, masked=any(call.padding for call in calls))
            yield Finding(
                "attention-plans", min(len(shapes) * plan_s, sum(call.seconds for call in calls)),
                max(own, key=lambda group: group.seconds).calls[0].where,
                f"{len(shapes)} KV lengths are new to the process, and cuDNN builds an attention plan for each,"
                f" {duration(plan_s)}",
                "call torch.backends.cuda.enable_cudnn_sdp(False) first: the other kernels need no plan;"
                ' cache_implementation="static" has one length',
                "measured", "attention at new KV lengths, with cuDNN and without, times their number", once=True,
            )  # fmt: skip
        except Exception as error:  # a user's model may fail in any way, and the answer is useful without this
            untried.add(f"attention-plans ({own[0].loaded_at})", first_line(error))


def _plan_s(model: Any, shapes: set[tuple[int, int]], *, masked: bool) -> float:
    """Seconds that the first attention at a KV length takes longer with cuDNN, at these (batch sizes, KV lengths)."""
    machine = machine_for(model.device)
    core = next(item for item in walk(model).operators if isinstance(item, AttentionCore))
    batch = statistics.mode(batch for batch, _ in shapes)
    beyond = max(length for _, length in shapes) + 1
    attention = partial(_attention, core, model, batch, masked)
    with torch.inference_mode():
        first_s, second_s = first_and_second_s(machine.clock, attention, range(beyond, beyond + _LENGTHS))
        with switched(torch.backends.cuda.enable_cudnn_sdp, False, torch.backends.cuda.cudnn_sdp_enabled()):
            others = first_and_second_s(machine.clock, attention, range(beyond + _LENGTHS, beyond + 2 * _LENGTHS))
    return max(0.0, (first_s - second_s) - (others[0] - others[1]))


def _attention(core: AttentionCore, model: Any, batch: int, masked: bool, length: int) -> Callable[[], object]:
    """A decode step's attention of one layer at a KV length, as transformers calls it."""
    kv_heads = core.query_heads if masked else core.kv_heads
    of_model = {"device": model.device, "dtype": model.dtype}
    query = torch.zeros(batch, core.query_heads, 1, core.qk_dim, **of_model)
    key = torch.zeros(batch, kv_heads, length, core.qk_dim, **of_model)
    value = torch.zeros(batch, kv_heads, length, core.v_dim, **of_model)
    mask = torch.ones(batch, 1, 1, length, device=model.device, dtype=torch.bool) if masked else None
    grouped = kv_heads < core.query_heads
    return partial(F.scaled_dot_product_attention, query, key, value, attn_mask=mask, enable_gqa=grouped)


# A part of the weights of at most so many bytes is written and read.
_MOST_BYTES = 512 << 20


def conversion_findings(seen: Observations, models: Sequence[Any]) -> Iterator[Finding]:
    """Time of the first load of each model whose weights are converted; later ones are reloads.

    `models` are those of the loads, or None. The time to read as many bytes is subtracted; without a model the finding
    is a bound.
    """
    known: set[str] = set()
    for load, model in zip(seen.loads, models, strict=True):
        if load.conversion and load.source not in known:
            known.add(load.source)
            read_s = None if model is None else read_weights_s(model)
            yield Finding(
                "slow-load", max(0.0, load.seconds - (read_s or 0.0)), load.where,
                f"{load.conversion} at every start", load.instead,
                *(("at most", "the time of this load") if read_s is None
                  else ("measured", "the load, less the time to write its weights to a file and read them")),
            )  # fmt: skip


def read_weights_s(model: Any) -> float | None:
    """Seconds to write as many bytes as a model's weights have to a file, and to read them; None if that fails.

    Of more than 512 MiB, a part is written and read, and represents all.
    """
    weights = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    whole: int = sum(tensor.nbytes for tensor in weights)
    part = min(whole, _MOST_BYTES)
    try:
        with tempfile.TemporaryDirectory() as folder:
            file, start_s = Path(folder) / "weights", now_s()
            file.write_bytes(bytes(part))
            file.read_bytes()
            return (now_s() - start_s) * whole / max(1, part)
    except OSError:  # a full disk
        return None
