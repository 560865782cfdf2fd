"""Where the time of a script went: every second of it has one name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from profiler.why_slow.findings import CallFloor, SlowModule, Why
from profiler.why_slow.observations import LineTime, Observations, steady_s

_WAITING = "waiting for a core that other processes used"


@dataclass(frozen=True)
class TimePart:
    """A part of a script's time."""

    what: str
    seconds: float
    beyond_floor: bool = False
    """Whether it is part of warm calls, but not of their floor."""


def time_parts(why: Why) -> list[TimePart]:
    """The parts of the script's run time, which add up to it, the largest first.

    Waiting for other processes is spread over all parts in proportion to their time, and has a part of its own.
    """
    seen = why.seen
    # At most; 0 without a measured bandwidth of the link.
    link_s = sum(item.saves_s for item in why.findings if item.id == "offload" and item.is_bound)
    within, outside = list(_within_calls(seen, why.floor, link_s, why.modules)), list(_outside(seen))
    other_s = max(0.0, seen.wall_s - sum(part.seconds for part in (*within, *outside)))
    outside.append(TimePart("imports and the script's other code", other_s))
    waiting = seen.waited_s / seen.wall_s if seen.wall_s else 0.0
    waited_s = waiting * sum(part.seconds for part in outside)
    waited_s += sum(part.seconds for part in within if part.what == _WAITING)
    parts = [
        *(part for part in within if part.what != _WAITING),
        *(replace(part, seconds=(1 - waiting) * part.seconds) for part in outside),
        TimePart(_WAITING, waited_s, beyond_floor=True),
    ]
    return sorted((part for part in parts if part.seconds > 0), key=lambda part: -part.seconds)


def between_row(item: LineTime) -> str:
    """The name of the part of the script's own code between forwards of one line."""
    return f"the script's code between its forwards ({item.where})"


def _outside(seen: Observations) -> Iterator[TimePart]:
    yield TimePart("loading models", seen.loads_s)
    yield TimePart(f"tokenizers ({seen.text_where})", seen.text_s)
    for item in seen.between:
        yield TimePart(between_row(item), item.seconds)
    yield TimePart("recording these calls", seen.overhead_s)


def _within_calls(
    seen: Observations, floor: CallFloor | None, link_s: float, modules: Sequence[SlowModule]
) -> Iterator[TimePart]:
    """The time of all calls. Those of several threads overlap, so each part gets its share of the covered time."""
    total_s = sum(call.seconds for call in seen.calls)
    if not total_s:
        return
    scale = seen.calls_s / total_s
    yield TimePart("one-time costs of first calls", seen.calls_s - steady_s(seen.calls))
    done = [call for call in seen.calls if not call.failed]
    yield TimePart("calls that failed", scale * sum(call.seconds for call in seen.calls if call.failed))
    generates = [call for call in done if call.forward_s is not None]
    around_s = dict.fromkeys(("sampling", "callbacks", "own"), 0.0)
    names: dict[str, None] = {}
    for call in generates:
        callbacks_s = sum(call.callbacks_s.values())
        names |= dict.fromkeys(call.callbacks_s)
        around_s["sampling"] += call.sampling_s
        around_s["callbacks"] += callbacks_s
        around_s["own"] += max(0.0, call.seconds - (call.forward_s or 0.0) - call.sampling_s - callbacks_s)
    yield TimePart("sampling: temperature, top-k, top-p", scale * around_s["sampling"], beyond_floor=True)
    yield TimePart(f"your {' and '.join(names)}", scale * around_s["callbacks"], beyond_floor=True)
    yield TimePart(
        "generate's own work: choosing tokens, masks, checks for the end", scale * around_s["own"], beyond_floor=True
    )
    forwards_s = max(0.0, scale * (sum(call.steady_s for call in done) - sum(around_s.values())))
    yield from _forwards(forwards_s, seen, floor, link_s, modules)


def module_row(module: SlowModule) -> str:
    """The name of the part of a module's time beyond its roof."""
    return f"{module.name} beyond its roof ({module.place})"


# At most so many modules have a row, each with at least this share of what is beyond the floor.
_MOST_MODULES, _WORTH_A_MODULE = 3, 0.1
_OVER_THE_LINK = "weights over the link, at most"


def _forwards(
    seconds: float, seen: Observations, floor: CallFloor | None, link_s: float, modules: Sequence[SlowModule]
) -> Iterator[TimePart]:
    """The time of warm forward passes: its floor, and what is beyond that."""
    if floor is None:
        crossing_s = min(seconds, link_s)
        yield TimePart(_OVER_THE_LINK, crossing_s, beyond_floor=True)
        yield TimePart("the rest of forward passes" if crossing_s else "forward passes", seconds - crossing_s)
        return
    left_s = seconds
    waited_s = seen.waited_s * seen.calls_s / seen.wall_s if seen.wall_s else 0.0
    needless = "work that the tokens do not need: padding, prompts computed again"
    named = (
        ("kernels at the roofs of this machine: the least time", floor.seconds - (floor.dispatch_s or 0.0), False),
        ("dispatch of kernels by Python and torch, at least", floor.dispatch_s or 0.0, False),
        (needless, floor.needless_s, True),
        (_WAITING, waited_s, True),
        # Last, since it is a bound: a transfer may overlap with all of the above.
        (_OVER_THE_LINK, link_s, True),
    )
    for what, part_s, beyond in named:
        part_s = min(left_s, part_s)
        left_s -= part_s
        yield TimePart(what, part_s, beyond)
    rest_s = left_s
    shown = [module for module in modules[:_MOST_MODULES] if module.beyond_s >= _WORTH_A_MODULE * rest_s]
    for module in shown:
        part_s = min(left_s, module.beyond_s)
        left_s -= part_s
        yield TimePart(module_row(module), part_s, beyond_floor=True)
    kernels = "other kernels slower than the roofs" if shown else "kernels (modules unknown) slower than the roofs"
    yield TimePart(f"{kernels}, and dispatch beyond least", left_s, beyond_floor=True)
