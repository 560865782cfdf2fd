"""Ten faults planted into the profiler, each with the scenario that must fail: python -m tests.simulated.mutations

Arguments select faults by name. Tests that pass with these faults would prove nothing.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from profiler.device import memory
from profiler.device.clock import CudaClock
from profiler.engines.transformers import EagerEngine
from profiler.grid.cells import Cell
from profiler.judge import demand as parts
from profiler.measure import kernels, sweep
from profiler.measure.subject import Subject

from . import test_hosts as hosts
from . import test_memory as memories
from . import test_scenarios as scenarios
from .scenario import apart

Planted = contextlib.AbstractContextManager[Any]
Scenario = Callable[[Path], None]


@dataclass(frozen=True)
class Mutation:
    """One fault and the scenario that must detect it."""

    name: str
    plant: Callable[[], Planted]
    scenario: Scenario


fast_host = partial(hosts.test_the_verdict_follows_the_host, "eager", "fast")
static_cache = partial(hosts.test_the_verdict_follows_the_host, "static", "fast")
full_card = partial(memories.test_what_fits_by_the_rule_runs_and_what_does_not_is_refused, *memories.FUSED)


def doubled_replay() -> Planted:
    """The time of a replayed kernel enters the breakdown twice."""
    right = parts.step_demand

    def twice(*args: Any) -> Any:
        demand = right(*args)
        return replace(demand, replayed_s=None if demand.replayed_s is None else 2 * demand.replayed_s)

    return mock.patch.object(parts, "step_demand", twice)


def _roofs(**changes: object) -> Planted:
    right = parts.roofs_of
    return mock.patch.object(parts, "roofs_of", lambda *args: replace(right(*args), **changes))


def timed_warm_up() -> Planted:
    """A first prefill runs between the marks of the timed one."""
    right = sweep.run_loop

    class Cold:
        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def prefill(self, *args: Any) -> Any:
            self._engine.prefill(*args)
            return self._engine.prefill(*args)

    return mock.patch.object(sweep, "run_loop", lambda engine, *args, **more: right(Cold(engine), *args, **more))


def first_capture_stream() -> Planted:
    """All captures go to the stream of the first requested card, as in torch without a stream."""
    streams: list[Any] = []

    def first(device: Any) -> Any:
        if not streams:
            streams.append(torch.cuda.Stream(device))
        return streams[0]

    return mock.patch("profiler.device.machine.side_stream", mock.Mock(side_effect=first, cache_clear=streams.clear))


def swallowed_oom() -> Planted:
    """A cell that is predicted not to fit is tried, and a prefill that runs out of memory continues with one
    sequence."""
    right = EagerEngine.prefill

    def prefill(self: Any, ids: Any, slots: int) -> Any:
        with contextlib.suppress(torch.OutOfMemoryError):
            return right(self, ids, slots)
        return right(self, ids[:1], slots)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(Subject, "no_room", return_value=None))
    stack.enter_context(mock.patch.object(EagerEngine, "prefill", prefill))
    return stack


_SLOTS = property(lambda cell: cell.depth + cell.new_tokens + (16 << 10))
"""Room for more tokens than a cell needs."""
MUTATIONS = (
    Mutation("double-count a replay", doubled_replay, fast_host),
    Mutation("forget the link", partial(_roofs, fetch_s=0.0), scenarios.test_a_small_card_spills_to_the_host),
    Mutation("time the warm-up", timed_warm_up, fast_host),
    Mutation(
        "capture on the first card", first_capture_stream, scenarios.test_two_cards_one_after_the_other_in_one_process
    ),
    Mutation("read before synchronising", partial(mock.patch.object, CudaClock, "synchronize"), fast_host),
    Mutation("hidden dispatch as overhead", partial(_roofs, overlaps=False), fast_host),
    Mutation("wrong slots", partial(mock.patch.object, Cell, "slots", _SLOTS), static_cache),
    Mutation(
        "reserved as used", partial(mock.patch.object, memory, "unused_bytes", return_value=0),
        memories.test_a_batch_test_ends_where_memory_does,
    ),
    Mutation(
        "L2-warm replays", partial(mock.patch.object, kernels, "cold_bytes_of", return_value=0),
        scenarios.test_a_small_model_on_a_large_cache,
    ),
    Mutation("a swallowed OOM", swallowed_oom, full_card),
)  # fmt: skip


def noticed(mutation: Mutation) -> str | None:
    """Return how the scenario fails with the fault; None if it passes."""
    with apart() as folder, mutation.plant():
        try:
            mutation.scenario(folder)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__} at `{where.line}`"
    return None


def main() -> int:
    chosen = [mutation for mutation in MUTATIONS if mutation.name in sys.argv[1:] or len(sys.argv) == 1]
    green = 0
    for mutation in chosen:
        began_s = time.perf_counter()
        how = noticed(mutation)
        green += how is None
        colour = "GREEN" if how is None else "red"
        print(f"{colour:5}  {mutation.name} ({time.perf_counter() - began_s:.0f} s): {how}", flush=True)
    print(f"{len(chosen) - green} of {len(chosen)} faults were noticed")
    return 1 if green else 0


if __name__ == "__main__":
    sys.exit(main())
