"""Time of each operator group within a step, by module hooks, and its unexplained part."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from profiler.facts.measurements import BETWEEN_MODULES, HookedStep
from profiler.facts.run_facts import Facts
from profiler.grid.cells import CellKey, KeyedRecord
from profiler.judge.demand import overhead_at, step_demand

_DISTURBED_GPU = 1.1
"""Hooked over plain step on a GPU, from which the hundreds of marks of the hooks limit the host."""
_DISTURBED_CPU = 1.5
"""The same limit on a CPU, whose speed may drift by a tenth or two."""


@dataclass(frozen=True)
class GroupTime(KeyedRecord):
    """One group of operators within a hooked step."""

    group: str
    time_s: float
    share: float
    flops: float
    bytes: float
    ceiling_s: float
    step_s: float
    """The whole step with hooks."""


def group_times(facts: Facts, hooked: HookedStep) -> Iterator[GroupTime]:
    """Seconds, FLOPs and bytes of each group of a hooked step, the longest first.

    Times include the overhead of the hooks, which is the difference between `step_s` and the cell's own time.
    """
    key, memory = hooked.key, facts.ceilings.memory_bytes_per_s
    times = {group: statistics.median(seconds) for group, seconds in hooked.groups.items()}
    step_s = sum(times.values())
    for group, seconds in sorted(times.items(), key=lambda item: -item[1]):
        operators = [item for item in facts.operators[key] if item.group == group]
        yield GroupTime(
            **key.columns,
            group=group,
            time_s=seconds,
            share=seconds / step_s,
            flops=float(sum(item.flops for item in operators)),
            bytes=float(sum(item.model_bytes for item in operators)),
            ceiling_s=sum(step_demand(facts, item, None).ceiling_s(memory) for item in operators),
            step_s=step_s,
        )


def unexplained_by_group(facts: Facts, key: CellKey, plain_s: float) -> dict[str, float]:
    """Unexplained seconds of a cell's step by group, the largest first; empty if the step was not hooked.

    A group's part is its time with hooks, minus the time of its operators (replayed, or at their ceiling plus traffic),
    minus its share of overhead by number of operators. It is empty too if hooks slowed the step of `plain_s` seconds,
    because then no group's time is its own.
    """
    if key not in facts.hooked:
        return {}
    times = list(group_times(facts, facts.hooked[key]))
    disturbed = _DISTURBED_GPU if facts.device.hides_overhead else _DISTURBED_CPU
    if times[0].step_s > disturbed * plain_s:
        return {}
    replays, memory = facts.replays.get(key, {}), facts.ceilings.memory_bytes_per_s
    explained, calls = defaultdict[str, float](float), Counter[str]()
    for item in facts.operators[key]:
        group = BETWEEN_MODULES if item.group in ("other", "embedding") else item.group  # those have no hooked module
        own_s = step_demand(facts, item, replays.get(item.operator)).alone_s(memory)
        if item.operator not in replays:
            own_s += float(item.activation_bytes + sum(item.redundant_bytes.values())) / memory
        explained[group] += own_s
        calls[group] += item.count
    overhead = overhead_at(facts, key)
    host_s = overhead.step_s if overhead and (overhead.waits or not facts.device.hides_overhead) else 0.0
    rest = [
        (each.group, each.time_s - explained[each.group] - host_s * calls[each.group] / calls.total()) for each in times
    ]
    return dict(sorted(rest, key=lambda item: -item[1]))
