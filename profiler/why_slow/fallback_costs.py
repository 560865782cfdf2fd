"""What slower code costs at most: the time in the modules that run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from profiler.fallbacks import Fallback, cure_of, quotes_of
from profiler.why_slow.findings import Finding, new_finding
from profiler.why_slow.module_times import ModuleTimes
from profiler.why_slow.repeat_call import CallGroup


def fallback_findings(
    fallbacks: Sequence[Fallback],
    groups: Sequence[CallGroup],
    times_of: Callable[[CallGroup], ModuleTimes | None],
) -> tuple[list[Finding], list[str]]:
    """(findings, lines about fallbacks without a bound).

    A finding's seconds are at most those of the modules that run the slower code, without their linears.
    """
    findings: list[Finding] = []
    without_bound: dict[str, list[Fallback]] = {}
    for module in dict.fromkeys(each.module for each in fallbacks):
        here = [each for each in fallbacks if each.module == module]
        seconds = {group.calls[0].where: s for group in groups if (s := _slow_s(group, module, times_of)) is not None}
        on_gpu = any(not group.middle[0].settings.on_cpu for group in groups)
        if not seconds:
            without_bound.setdefault(cure_of(here, on_gpu=on_gpu), []).extend(here)
            continue
        saves_s = sum(seconds.values())
        findings.append(
            new_finding(
                identity="fallback",
                saves_s=saves_s,
                where=max(seconds, key=lambda where: seconds[where]),
                evidence=f"{module} runs slower code: {quotes_of(here)}",
                change=cure_of(here, on_gpu=on_gpu),
                basis=f"at most: the time in {module} without its linears, in a repeated call",
            )
        )
    lines = [f"{change}: its seconds are unknown ({quotes_of(here)})" for change, here in without_bound.items()]
    return findings, lines


def _slow_s(group: CallGroup, module: str, times_of: Callable[[CallGroup], ModuleTimes | None]) -> float | None:
    """Seconds of the group's calls in modules of this class, without their linears; None if they cannot be measured."""
    slow = dict(_outermost(group.model, module)) if module else {}
    times = times_of(group) if slow else None
    if times is None:
        return None
    inside = [
        times.own_s.get(".".join(filter(None, (outer, name))), 0.0)
        for outer, each in slow.items()
        for name, inner in each.named_modules()
        if inner is each or not _is_linear(inner)
    ]
    return min(group.seconds, max(0.0, sum(inside)))


def _outermost(model: Any, kind: str) -> Iterator[tuple[str, Any]]:
    """The modules of this class that are in no other one of it, by their names."""
    inner = set()
    for name, each in model.named_modules():
        if type(each).__name__.endswith(kind) and each not in inner:
            inner |= set(each.modules())
            yield name, each


def _is_linear(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return "Linear" in type(module).__name__ and getattr(weight, "dim", lambda: 0)() == 2
