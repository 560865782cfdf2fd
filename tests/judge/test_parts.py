"""What a cell's facts say of its time: what lies inside a replayed call, and what beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_facts import CELL, KEY, facts

from profiler.facts.measurements import Replay, Replays
from profiler.facts.merged import MergedFacts
from profiler.facts.operators import REST, Cause, OperatorWork
from profiler.facts.visits import Visit
from profiler.grid.cells import CellKey
from profiler.judge.breakdown import TERMS, TimeBreakdown
from profiler.judge.demand import breakdown_of, held_up


def terms(parts: TimeBreakdown) -> float:
    return sum(float(getattr(parts, name)) for name in TERMS)


def test_a_replayed_core_has_paid_for_its_attention_matrix() -> None:
    """A T4's math attention: 0.2 s of arithmetic whose call takes 1.1 s, and whose matrix alone would take 0.992 s."""
    core = OperatorWork(
        "core", "attention", 1, "float16", 20e12 * 0.2, 0, 1e6, 0, {}, {Cause.ATTENTION_MATRIX: 240e9 * 0.992}
    )
    of_t4 = {"flops_per_s": 20e12, "bytes_per_s": 240e9}
    parts, causes = breakdown_of(facts([core], {"core": Replay("core", (1.1,) * 9)}, **of_t4), KEY, 1.15)
    assert (parts.compute_s, parts.kernel_s) == (pytest.approx(0.2), pytest.approx(0.9))
    assert parts.avoidable_s == 0
    assert parts.unexplained_s == pytest.approx(0.05)
    assert causes[Cause.ATTENTION_MATRIX] == pytest.approx(0.9), "no more than the call loses"
    unseen, causes = breakdown_of(facts([core], **of_t4), KEY, 1.25)
    assert unseen.avoidable_s == pytest.approx(0.992) == causes[Cause.ATTENTION_MATRIX]


def test_a_copied_cache_lies_beside_the_replayed_core() -> None:
    core = OperatorWork("core", "attention", 1, "float16", 0, 0, 1e9, 5e9, {}, {Cause.CACHE_COPIES: 2e9})
    parts, _ = breakdown_of(
        facts([core], {"core": Replay("core", (1e-3,) * 9)}, flops_per_s=1e14, bytes_per_s=1e12), KEY, 5e-3
    )
    assert (parts.kv_s, parts.kernel_s) == (pytest.approx(1e-3), pytest.approx(0, abs=1e-9))
    assert parts.avoidable_s == pytest.approx(2e-3)
    assert terms(parts) == pytest.approx(5e-3)


def test_arithmetic_that_nobody_needs_takes_time_too() -> None:
    """DeepSeek-V2-Lite at 32 x 4096 expands its latents again: 27 layers x 2 x 512 x 4096 x 131,072 FLOPs, 21 ms at
    700 TFLOP/s."""
    flops = 27 * 2 * 512 * 4096 * 32 * 4096
    expand = OperatorWork("kv_b_proj", "attention_proj", 27, "float16", 0, 1e6, 0, 0, {Cause.LATENT_EXPANDED: flops})
    parts, causes = breakdown_of(facts([expand], flops_per_s=700e12, bytes_per_s=3e12), KEY, 76e-3)
    assert parts.avoidable_s == pytest.approx(21.2e-3, rel=0.01)
    assert causes[Cause.LATENT_EXPANDED] == parts.avoidable_s


def test_small_kernels_are_a_loss_beyond_their_traffic_and_no_more_than_they_take() -> None:
    """1,100 norms and adds at 2 us each take 2.2 ms, though their traffic needs 0.5; where a cache serves it, less."""
    norm = OperatorWork("norm", "norm", 64, "float16", 0, 0, 0, 0.5e9)
    of_card = {"flops_per_s": 1e14, "bytes_per_s": 1e12}
    many, _ = breakdown_of(facts([norm], {REST: Replay(REST, (2.2e-3,) * 9)}, **of_card), KEY, 2.5e-3)
    assert (many.avoidable_s, many.kernel_s) == (pytest.approx(0.5e-3), pytest.approx(1.7e-3))
    cached, causes = breakdown_of(facts([norm], {REST: Replay(REST, (0.2e-3,) * 9)}, **of_card), KEY, 2.5e-3)
    assert (cached.avoidable_s, cached.kernel_s) == (pytest.approx(0.2e-3), 0)
    assert causes[Cause.OPERANDS] == pytest.approx(0.2e-3)


def test_page_faults_are_taken_off_small_kernels_once() -> None:
    """Norms of 0.5 ms of traffic take 2.2 ms alone, in a step of 1,000 faults at 0.5 us. Where the replay's own
    are off the 2.2 ms already, the step's are not taken off as well."""
    norm = OperatorWork("norm", "norm", 64, "float16", 0, 0, 0, 0.5e9)

    def parts_of(rest: Replay) -> TimeBreakdown:
        made = facts([norm], {REST: rest}, flops_per_s=1e14, bytes_per_s=1e12)
        faulting = replace(made, ceilings=replace(made.ceilings, page_fault_s=0.5e-6))
        return breakdown_of(faulting, KEY, 3e-3, faults=1000)[0]

    alone = Replay(REST, (2.2e-3,) * 9)
    told, untold = parts_of(replace(alone, without_faults=True)), parts_of(alone)
    assert (told.avoidable_s, told.kernel_s) == (pytest.approx(1.0e-3), pytest.approx(1.7e-3))
    assert (untold.avoidable_s, untold.kernel_s) == (pytest.approx(1.0e-3), pytest.approx(1.2e-3))


@pytest.mark.parametrize(("latency_ms", "dispatch_ms"), [(9, 5), (6, 2), (5, 1), (10, 5)])
def test_of_a_step_that_waits_for_its_device_what_the_device_does_not_take_is_dispatch(
    latency_ms: float, dispatch_ms: float
) -> None:
    """LLM.int8() waits in every linear: of 5 ms of host as much hides behind 4 ms of device as the step is shorter than
    9. Of any other format all of it hides that can; nor is it known where what else the device does was not timed."""
    linear = OperatorWork("up", "mlp", 1, "float16", 0, 4e9, 0, 0)
    both = {"flops_per_s": 1e14, "bytes_per_s": 1e12, "host_s": 5e-3}
    timed = {"up": Replay("up", (4e-3,) * 9), REST: Replay(REST, (0.0,) * 9)}
    waits, _ = breakdown_of(facts([linear], timed, **both, waits=True), KEY, latency_ms * 1e-3)
    for given in ({"replays": timed}, {"waits": True}):
        ahead, _ = breakdown_of(facts([linear], **given, **both), KEY, latency_ms * 1e-3)
        assert ahead.dispatch_s == pytest.approx(1e-3)
    assert waits.dispatch_s == pytest.approx(dispatch_ms * 1e-3)
    assert waits.unexplained_s == pytest.approx((latency_ms - 4 - dispatch_ms) * 1e-3)
    assert waits.floor_s == ahead.floor_s == pytest.approx(5e-3)


@pytest.mark.parametrize(("replayed_s", "is_held_up"), [(0.9e-3, False), (1.05e-3, False), (1.2e-3, True)])
def test_a_part_cannot_take_longer_than_the_whole(replayed_s: float, is_held_up: bool) -> None:
    """A step of 1 ms whose only operator takes so long alone."""
    operator = OperatorWork("op", "mlp", 1, "float16", 10, 1, 0, 0, {}, {})
    made = facts([operator], {"op": Replay("op", (replayed_s,) * 9)}, flops_per_s=1e6, bytes_per_s=1e9)
    visit = Visit(CELL, 0, 1.0, (1e-3,) * 7, 1.0, (), None, 0.0)
    timed = replace(made, visits={CELL: [visit]}, operators={KEY: [operator], CellKey("prefill", CELL): []})
    assert held_up(timed) == ([CELL] if is_held_up else [])


def test_of_two_replays_the_one_that_was_held_up_less_stands() -> None:
    gathered = MergedFacts()
    for seconds in (2e-3, 1e-3, 3e-3):
        gathered.add(Replays((KEY,), (Replay("op", (seconds,) * 3), Replay(f"seen {seconds}", (1.0,)))))
    assert gathered.replays[KEY]["op"].whole.median_s == 1e-3
    assert len(gathered.replays[KEY]) == 4, "what only one of them saw is kept"
