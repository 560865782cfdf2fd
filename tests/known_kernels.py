"""Hand-made results of a self-test."""

from __future__ import annotations

from profiler.checks.known_kernels import Label
from profiler.checks.selftest import SelftestResult
from profiler.facts.dispatch import Dispatch
from profiler.judge.breakdown import Demand, StepRoofs, break_down
from profiler.judge.regimes import Evidence, Regime, Verdict


def checked(name: str, expected: Regime, regime: Regime) -> SelftestResult:
    """The result for a 1 ms kernel, 90 % of it bytes at 10 GB/s: its regime is `expected`, its verdict `regime`."""
    demand = Demand(name, "other", 1.0, 9e6, 0.0, 1e12)
    return SelftestResult(
        name=name,
        expected=Label(expected),
        label=Label(regime),
        rounds={regime: 7, "mixed": 1},
        verdict=Verdict(regime, "high", (Evidence("memory share", 0.9, ">= 0.6", "memory-bound", 1.0),), ()),
        split=break_down(1e-3, [demand], 0.0, StepRoofs(1e10, Dispatch(2e-5, 0.0), overlaps=False)),
        memory_bytes_per_s=(9e9, 1.1e10),
        compute_flops_per_s=(1e12, 1.2e12),
    )
