"""The ceilings of a default run next to those of ten times its seconds: how far apart they are, and where time goes.

    python tests/benchmarks/ceilings.py [SECONDS [DEVICE]]

SECONDS are those of a default run, 7 if not given. DEVICE is by default the one that `run` takes. It needs a machine
without other work. The two measurements of ten times the seconds show how much the machine itself drifts.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

from profiler.device.device import resolve_device
from profiler.device.machine import machine_for
from profiler.facts.ceilings import Ceilings
from profiler.roofs import measure as measuring

TIMES = 10
LIMITS = {"memory": 0.03, "compute": 0.05}
"""Of the memory and the compute ceiling that a run is judged by."""
PARTS = ("measure_streams", "measure_page_fault_s", "measure_gemv", "measure_gemm", "measure_host_pace")


def figures(found: Ceilings, dtype: str) -> dict[str, float]:
    """Return all that was measured, by name; `memory` and `compute` are the ceilings of a model of this dtype."""
    host = {} if found.host is None else {"host step, s": found.host.step_s}
    ends = {"memory": found.only([dtype], dtype).memory_bytes_per_s, "compute": found.compute_flops_per_s(dtype)}
    rates = {name: ceiling.per_s for name, ceiling in {**found.memory, **found.compute}.items()}
    return {
        **ends,
        **rates,
        **host,
        "page fault, s": found.page_fault_s,
        **{f"{k} launch": v for k, v in found.launch.items()},
    }


def timed(measure: Callable[[], Ceilings]) -> tuple[Ceilings, dict[str, float]]:
    """Return the ceilings, and the seconds of each part and of all."""
    spent: Counter[str] = Counter()

    def part(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            label = f"{name} {arguments[1]}" if name in ("measure_gemm", "measure_gemv") else name
            spent[label] += time.perf_counter() - start_s

    with mock.patch.multiple(measuring, **{name: partial(part, name, getattr(measuring, name)) for name in PARTS}):
        found = part("all", measure)
    return found, dict(spent)


def main() -> int:
    """Print the table; return 1 if a ceiling is further off than its limit and than the machine drifts."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 7.0
    machine = machine_for(resolve_device(sys.argv[2] if len(sys.argv) > 2 else "auto"))
    dtype = machine.info.sixteen_bit_dtype if machine.is_cuda else "float32"
    dtypes = sorted({"float32", machine.info.sixteen_bit_dtype})
    found: dict[str, Mapping[str, float]] = {}
    for name, times in (("ten-fold", TIMES), ("default", 1), ("again", 1), ("ten-fold again", TIMES)):
        ceilings, spent = timed(
            partial(measuring.measure, machine, dtypes, model_dtype=dtype, budget_s=times * seconds)
        )
        found[name] = figures(ceilings, dtype)
        parts = ", ".join(f"{part} {value:.2f}" for part, value in spent.items())
        print(f"{name}, {times * seconds:g} s: {parts}; missing: {dict(ceilings.missing)}", flush=True)
    print(f"\n{'':24}{'ten-fold':>12}{'default':>12}{'off by':>10}{'again':>10}{'drift':>10}")
    is_off = False
    for name, long in found["ten-fold"].items():
        first, second, end = (found[which].get(name, float("nan")) for which in ("default", "again", "ten-fold again"))
        middle, drift = (long + end) / 2, abs(end / long - 1)
        offs = [value / middle - 1 for value in (first, second)]
        print(f"{name:24}{middle:12.4g}{first:12.4g}{offs[0]:10.1%}{offs[1]:10.1%}{drift:10.1%}")
        is_off |= max(map(abs, offs)) > max(LIMITS.get(name, float("inf")), drift)
    return int(is_off)


if __name__ == "__main__":
    sys.exit(main())
