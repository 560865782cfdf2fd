"""Hand-made results of a self-test."""

from __future__ import annotations

from profiler.checks.selftest import SelftestRow
from profiler.facts.dispatch import Dispatch
from profiler.judge.breakdown import Demand, StepRoofs, break_down
from profiler.judge.regimes import Evidence, Regime


def checked(name: str, expected: Regime, regime: Regime) -> SelftestRow:
    """The result for a 1 ms kernel, 90 % of it bytes at 10 GB/s: its regime is `expected`, its verdict `regime`."""
    demand = Demand(name, "other", 1.0, 9e6, 0.0, 1e12)
    return SelftestRow(
        name=name, expected=expected, expected_cause="", regime=regime, cause="", confidence="high",
        right=regime == expected, wrong=regime not in (expected, "inconclusive"), rounds={regime: 7, "mixed": 1},
        latency_s=1e-3, split=break_down(1e-3, [demand], 0.0, StepRoofs(1e10, Dispatch(2e-5, 0.0), overlaps=False)),
        memory_bytes_per_s=(9e9, 1.1e10), compute_flops_per_s=(1e12, 1.2e12),
        signals=(Evidence("memory share", 0.9, ">= 0.6", "memory-bound", 1.0),),
    )  # fmt: skip
