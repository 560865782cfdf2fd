"""Memory traffic by the GPU's own counters, next to the bytes that the operators of a decode step move."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from profiler.facts.run_facts import Facts
from profiler.facts.telemetry import HardwareCounters
from profiler.grid.cells import CellKey

TRAFFIC_TOLERANCE = 0.25
"""Share by which counters and counts may differ: counters lag by up to 0.1 s, in loops of at least 0.5 s."""

_LEAST_IN_USE = 0.05
"""Share of the bandwidth from which counters are trusted. An H200's read 23 and 44 % too much at 4 %."""


@dataclass(frozen=True)
class CountedTraffic:
    """The counters of a cell's decode loops, and bytes/s by them and by the counts."""

    counters: HardwareCounters
    bytes_per_s: float
    """By the counters."""
    least_bytes_per_s: float
    """Weights and cache, which come from memory at every step."""
    executed_bytes_per_s: float
    """All operands of all operators; some of them may stay in the L2."""

    @property
    def differs(self) -> bool:
        """Whether the counters contradict the counts; little traffic is not known well enough."""
        if self.counters.dram < _LEAST_IN_USE:
            return False
        least, most = 1 - TRAFFIC_TOLERANCE, 1 + TRAFFIC_TOLERANCE
        return not least * self.least_bytes_per_s <= self.bytes_per_s <= most * self.executed_bytes_per_s


def counted_traffic(facts: Facts, key: CellKey) -> CountedTraffic | None:
    """Return the traffic of a cell's decode loops by both.

    None without counters, without a datasheet's bandwidth, if another process is on the GPU, or if a cache serves the
    step: then its bytes do not come from memory.
    """
    operators, peak = facts.operators.get(key, ()), facts.device.datasheet_bytes_per_s
    counted = [visit for visit in facts.visits.get(key.cell, ()) if visit.decode_counters and visit.loop_s]
    if key.phase != "decode" or not counted or peak is None or any(each.other_processes for each in facts.readings):
        return None
    least_bytes = float(sum(item.model_bytes for item in operators))
    if facts.ceilings.cache_resident(least_bytes):
        return None
    counters = [visit.decode_counters for visit in counted if visit.decode_counters]
    middle = HardwareCounters(
        *(statistics.median(getattr(each, name) for each in counters) for name in ("sm", "tensor", "dram"))
    )
    steps_per_s = statistics.median(len(visit.decode_s) / (visit.loop_s or 1.0) for visit in counted)
    executed_bytes = float(sum(item.executed_bytes for item in operators))
    return CountedTraffic(middle, middle.dram * peak, steps_per_s * least_bytes, steps_per_s * executed_bytes)
