"""Time of each operator group within a step, by module hooks, and what of it is unexplained."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from profiler.counting.floor import floor_s
from profiler.facts.measurements import BETWEEN_MODULES, Hooked
from profiler.facts.run_facts import Facts
from profiler.grid.cells import CellKey
from profiler.judge.cells import Keyed, columns_of

_DISTURBED_CARD = 1.1
"""Hooked over plain step, from which the hooks' hundreds of marks set the pace of a card's host."""
_DISTURBED_CPU = 1.5
"""The limit on a CPU, which may merely have drifted by a tenth or two."""

_UNHOOKED = ("other", "embedding")
"""Groups of operators that no known module stands for."""


@dataclass(frozen=True)
class GroupTime(Keyed):
    """One group of operators within a hooked step."""

    group: str
    time_s: float
    share: float
    flops: float
    bytes: float
    roof_s: float
    step_s: float
    """The whole step under hooks."""


def group_times(facts: Facts, hooked: Hooked) -> list[GroupTime]:
    """Seconds, FLOPs and bytes of each group of a hooked step, the longest first.

    What the hooks themselves add is the difference to the time that was measured without them, which the reader is
    shown (`step_s` beside the cell's own).
    """
    key = hooked.key
    times = {group: statistics.median(seconds) for group, seconds in hooked.groups.items()}
    step_s = sum(times.values())
    found = []
    for group, seconds in sorted(times.items(), key=lambda item: -item[1]):
        operators = [item for item in facts.operators[key] if item.group == group]
        found.append(
            GroupTime(
                **columns_of(key),
                group=group,
                time_s=seconds,
                share=seconds / step_s,
                flops=float(sum(item.flops for item in operators)),
                bytes=float(sum(item.model_bytes for item in operators)),
                roof_s=sum(_roof_s(facts, item.flops, item.model_bytes, item.dtype) for item in operators),
                step_s=step_s,
            )
        )
    return found


def unexplained_by_group(facts: Facts, key: CellKey, plain_s: float) -> dict[str, float]:
    """Seconds of a cell's step that nothing explains, by group, the largest first; empty where it was not hooked.

    Empty as well where hooks made the step of `plain_s` seconds longer: no group's time is its own then. Else a group's
    time under hooks, less its operators' own (replayed, or at their roof with their traffic), and less its share of
    dispatch by the number of its operators.
    """
    if key not in facts.hooked:
        return {}
    times = group_times(facts, facts.hooked[key])
    disturbed = _DISTURBED_CARD if facts.device.overlaps_dispatch else _DISTURBED_CPU
    if times[0].step_s > disturbed * plain_s:
        return {}
    replays = facts.replays.get(key, {})
    explained: dict[str, float] = {}
    calls: dict[str, int] = {}
    for item in facts.operators[key]:
        group = BETWEEN_MODULES if item.group in _UNHOOKED else item.group
        if item.operator in replays:
            own_s = replays[item.operator].whole.times(item.count).median_s
        else:
            traffic = float(item.activation_bytes + sum(item.avoidable_bytes.values()))
            own_s = _roof_s(facts, item.flops, item.model_bytes, item.dtype)
            own_s += traffic / facts.ceilings.memory_bytes_per_s
        explained[group] = explained.get(group, 0.0) + own_s
        calls[group] = calls.get(group, 0) + item.count
    dispatch = facts.dispatch.get((key.cell.engine, key.phase, key.cell.batch_size))
    host_s = dispatch.step_s if dispatch and (dispatch.waits or not facts.device.overlaps_dispatch) else 0.0
    excess = {
        item.group: item.time_s
        - explained.get(item.group, 0.0)
        - host_s * calls.get(item.group, 0) / sum(calls.values())
        for item in times
    }
    return dict(sorted(excess.items(), key=lambda item: -item[1]))


def _roof_s(facts: Facts, flops: float, nbytes: float, dtype: str) -> float:
    return floor_s(
        float(flops), float(nbytes), facts.ceilings.compute_flops_per_s(dtype), facts.ceilings.memory_bytes_per_s
    )
