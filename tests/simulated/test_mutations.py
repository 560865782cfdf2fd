"""Ten faults planted into the profiler, each with the scenario that must fail: with a fault it would prove nothing."""

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from profiler.device import memory
from profiler.device.clock import CudaClock
from profiler.engines.transformers import EagerEngine
from profiler.grid.cells import Cell
from profiler.judge import demand as parts
from profiler.measure import kernels, sweep
from profiler.measure.subject import Subject

from . import test_memory as memories
from . import test_scenarios as scenarios

pytestmark = pytest.mark.slow

Planted = contextlib.AbstractContextManager[Any]

fast_host = partial(scenarios.test_the_verdict_follows_the_host, "eager", "fast")
static_cache = partial(scenarios.test_the_verdict_follows_the_host, "static", "fast")
full_card = partial(memories.test_what_fits_by_the_rule_runs_and_what_does_not_is_refused, *memories.FUSED)


def doubled_replay() -> Planted:
    """The time of a replayed kernel enters the breakdown twice."""
    right = parts.step_demand

    def twice(*args: Any) -> Any:
        demand = right(*args)
        return replace(demand, replayed_s=None if demand.replayed_s is None else 2 * demand.replayed_s)

    return mock.patch.object(parts, "step_demand", twice)


def _ceilings(**changes: object) -> Planted:
    right = parts.ceilings_of
    return mock.patch.object(parts, "ceilings_of", lambda *args: replace(right(*args), **changes))


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
    """All captures go to the stream of the first card that was used, as in torch without a stream."""
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
    stack.enter_context(mock.patch.object(Subject, "lack_of_memory", return_value=None))
    stack.enter_context(mock.patch.object(EagerEngine, "prefill", prefill))
    return stack


_SLOTS = property(lambda cell: cell.depth + cell.new_tokens + (16 << 10))
"""Slots for more tokens than a cell needs."""
MUTATIONS = {
    "double-count a replay": (doubled_replay, fast_host),
    "forget the link": (partial(_ceilings, fetch_s=0.0), scenarios.test_a_small_card_spills_to_the_host),
    "time the warm-up": (timed_warm_up, fast_host),
    "capture on the first card": (
        first_capture_stream, scenarios.test_two_cards_one_after_the_other_in_one_process,
    ),
    "read before synchronising": (partial(mock.patch.object, CudaClock, "synchronize"), fast_host),
    "hidden overhead as overhead": (partial(_ceilings, overlaps=False), fast_host),
    "wrong slots": (partial(mock.patch.object, Cell, "slots", _SLOTS), static_cache),
    "reserved as used": (
        partial(mock.patch.object, memory, "unused_bytes", return_value=0),
        memories.test_a_batch_test_ends_where_memory_does,
    ),
    "L2-warm replays": (
        partial(mock.patch.object, kernels, "cold_bytes_of", return_value=0),
        scenarios.test_a_small_model_on_a_large_cache,
    ),
    "a swallowed OOM": (swallowed_oom, full_card),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_fault_is_detected(name: str, tmp_path: Path) -> None:
    plant, scenario = MUTATIONS[name]
    with plant(), pytest.raises(AssertionError):  # a fault that cannot be planted any more raises another error
        scenario(tmp_path)
