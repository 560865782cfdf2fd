"""What slower code costs at most: the time in the modules that run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from profiler.fallbacks import Fallback, cure_of, quotes_of
from profiler.why_slow.findings import Finding
from profiler.why_slow.repeat_call import CallGroup, WeightedRun, repeat

# New tokens that stand for a longer `generate`.
_FEW_TOKENS = 4


def fallback_findings(
    fallbacks: Sequence[Fallback], groups: Sequence[CallGroup], steady_s: float, affordable: Callable[[float], bool]
) -> tuple[list[Finding], list[str]]:
    """(findings, lines about fallbacks without a bound).

    A finding's seconds are at most those of the modules that run the slower code, without their linears. A call is
    repeated for that, if `affordable` of its seconds is true.
    """
    findings: list[Finding] = []
    without_bound: dict[str, list[Fallback]] = {}
    for module in dict.fromkeys(each.module for each in fallbacks):
        here = [each for each in fallbacks if each.module == module]
        seconds = {group.calls[0].where: s for group in groups if (s := _slow_s(group, module, affordable)) is not None}
        on_gpu = any(not group.middle[0].settings.on_cpu for group in groups)
        if not seconds:
            without_bound.setdefault(cure_of(here, on_gpu=on_gpu), []).extend(here)
            continue
        saves_s = sum(seconds.values())
        findings.append(
            Finding(
                id="fallback",
                saves_s=saves_s,
                share=saves_s / steady_s,
                where=max(seconds, key=lambda where: seconds[where]),
                evidence=f"{module} runs slower code: {quotes_of(here)}",
                change=cure_of(here, on_gpu=on_gpu),
                basis=f"at most: the time in {module} without its linears, in a repeated call",
            )
        )
    lines = [f"{change}: its seconds are unknown ({quotes_of(here)})" for change, here in without_bound.items()]
    return findings, lines


def _slow_s(group: CallGroup, module: str, affordable: Callable[[float], bool]) -> float | None:
    """Seconds of the group's calls in modules of this class, without their linears; None if they cannot be measured."""
    call, noted = group.middle
    slow = list(_outermost(group.model, module)) if module else []
    if not slow or noted.arguments is None:
        return None
    run = repeat(noted, call, group.model)
    parts: tuple[WeightedRun, ...] = (WeightedRun(1.0, run),)
    if not affordable(call.steady_s):
        parts = run.shortened(_FEW_TOKENS)
        if not parts or not affordable(2 * call.steady_prompt_s):
            return None
    spans: list[tuple[float, list[Any]]] = []
    clock = noted.clock
    share = 1.0

    def watch(each: Any, sign: float) -> Iterator[Any]:
        open_marks: list[Any] = []
        yield each.register_forward_pre_hook(lambda *_: open_marks.append(clock.mark()))
        yield each.register_forward_hook(lambda *_: spans.append((sign * share, [open_marks.pop(), clock.mark()])))

    linears = [inner for each in slow for inner in each.modules() if _is_linear(inner) and inner is not each]
    hooks = [hook for each in slow for hook in watch(each, 1.0)] + [
        hook for each in linears for hook in watch(each, -1.0)
    ]
    whole_s = 0.0
    try:
        for part in parts:
            share, start = part.weight, clock.mark()
            part.run()
            end = clock.mark()
            clock.synchronize()
            whole_s += part.weight * clock.seconds([start, end])[0]
    except Exception:  # a call that cannot be repeated gives no bound
        return None
    finally:
        for hook in hooks:
            hook.remove()
    inside_s = sum(weight * clock.seconds(marks)[0] for weight, marks in spans)
    return group.seconds * min(1.0, max(0.0, inside_s / whole_s)) if spans and whole_s > 0 else None


def _outermost(model: Any, name: str) -> Iterator[Any]:
    """The modules of this class that are in no other one of it."""
    inner = set()
    for each in model.modules():
        if type(each).__name__.endswith(name) and each not in inner:
            inner |= set(each.modules())
            yield each


def _is_linear(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return "Linear" in type(module).__name__ and getattr(weight, "dim", lambda: 0)() == 2
