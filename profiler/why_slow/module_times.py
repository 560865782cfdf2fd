"""Which modules of a model take the time of a call: one repetition with hooks, and each module's own ceiling."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from profiler.counting.operators import Experts
from profiler.counting.walk import called_modules, collapse_numbers
from profiler.device.clock import Clock
from profiler.facts.step import ExecutionPath, Step
from profiler.fallbacks import Fallback, cure_of, quotes_of
from profiler.patching import patched
from profiler.quant.storage import is_linear
from profiler.why_slow.findings import Finding, SlowModule, Untried
from profiler.why_slow.floor import Subject
from profiler.why_slow.observations import Call
from profiler.why_slow.plain_models import is_plain
from profiler.why_slow.repeat_call import CallGroup, Run

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
