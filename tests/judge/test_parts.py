"""The breakdown of a cell's time from its facts: work in and out of replayed calls, padding, hooked groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_facts import CELL, KEY, facts, terms

from profiler.facts.fact import MergedFacts
from profiler.facts.measurements import HookedStep, Replay, Replays
from profiler.facts.operators import REST, Cause, OperatorWork
from profiler.facts.visits import Visit
from profiler.grid.cells import CellKey
from profiler.judge.breakdown import TimeBreakdown
from profiler.judge.demand import breakdown_of, cells_of_disturbed_dispatch, cells_of_disturbed_parts
from profiler.judge.module_times import unexplained_by_group


def test_a_replayed_core_includes_its_attention_matrix() -> None:
    """Math attention on a T4 needs 0.2 s of arithmetic; its call takes 1.1 s and its matrix 0.992 s."""
    core = OperatorWork(
        "core", "attention", 1, "float16", 20e12 * 0.2, 0, 1e6, 0, {}, {Cause.ATTENTION_MATRIX: 240e9 * 0.992}
    )
    of_t4 = {"flops_per_s": 20e12, "bytes_per_s": 240e9}
    parts, causes = breakdown_of(facts([core], {"core": Replay("core", (1.1,) * 9)}, **of_t4), KEY, 1.15)
    assert (parts.compute_s, parts.kernel_s) == (pytest.approx(0.2), pytest.approx(0.9))
    assert parts.avoidable_s == 0
    assert parts.unexplained_s == pytest.approx(0.05)
    assert causes[Cause.ATTENTION_MATRIX] == pytest.approx(0.9), "at most the loss of the call"
    unreplayed, causes = breakdown_of(facts([core], **of_t4), KEY, 1.25)
    assert unreplayed.avoidable_s == pytest.approx(0.992) == causes[Cause.ATTENTION_MATRIX]


def test_a_replayed_core_excludes_the_copy_of_its_cache() -> None:
    core = OperatorWork("core", "attention", 1, "float16", 0, 0, 1e9, 5e9, {}, {Cause.CACHE_COPIES: 2e9})
    parts, _ = breakdown_of(
        facts([core], {"core": Replay("core", (1e-3,) * 9)}, flops_per_s=1e14, bytes_per_s=1e12), KEY, 5e-3
    )
    assert (parts.kv_s, parts.kernel_s) == (pytest.approx(1e-3), pytest.approx(0, abs=1e-9))
    assert parts.avoidable_s == pytest.approx(2e-3)
    assert terms(parts) == pytest.approx(5e-3)


def test_avoidable_arithmetic_takes_time() -> None:
    """DeepSeek-V2-Lite at 32 x 4096 expands its latents at every step, which takes 21 ms at 700 TFLOP/s.

    The work is 27 layers x 2 x 512 x 4096 x 131,072 FLOPs.
    """
    flops = 27 * 2 * 512 * 4096 * 32 * 4096
    expand = OperatorWork("kv_b_proj", "attention_proj", 27, "float16", 0, 1e6, 0, 0, {Cause.LATENT_EXPANDED: flops})
    parts, causes = breakdown_of(facts([expand], flops_per_s=700e12, bytes_per_s=3e12), KEY, 76e-3)
    assert parts.avoidable_s == pytest.approx(21.2e-3, rel=0.01)
    assert causes[Cause.LATENT_EXPANDED] == parts.avoidable_s


def test_small_kernels_are_a_loss_beyond_their_traffic_and_no_more_than_they_take() -> None:
    """1,100 norms and adds of 2 us each take 2.2 ms, and their traffic 0.5 ms, or less from a cache."""
    norm = OperatorWork("norm", "norm", 64, "float16", 0, 0, 0, 0.5e9)
    of_card = {"flops_per_s": 1e14, "bytes_per_s": 1e12}
    many, _ = breakdown_of(facts([norm], {REST: Replay(REST, (2.2e-3,) * 9)}, **of_card), KEY, 2.5e-3)
    assert (many.avoidable_s, many.kernel_s) == (pytest.approx(0.5e-3), pytest.approx(1.7e-3))
    cached, causes = breakdown_of(facts([norm], {REST: Replay(REST, (0.2e-3,) * 9)}, **of_card), KEY, 2.5e-3)
    assert (cached.avoidable_s, cached.kernel_s) == (pytest.approx(0.2e-3), 0)
    assert causes[Cause.OPERANDS] == pytest.approx(0.2e-3)


def test_page_faults_are_taken_off_small_kernels_once() -> None:
    """If a replay already excludes its page faults, those of the step are not subtracted too.

    Norms with 0.5 ms of traffic take 2.2 ms in isolation, and the step has 1,000 faults of 0.5 us.
    """
    norm = OperatorWork("norm", "norm", 64, "float16", 0, 0, 0, 0.5e9)

    def parts_of(rest: Replay) -> TimeBreakdown:
        made = facts([norm], {REST: rest}, flops_per_s=1e14, bytes_per_s=1e12)
        faulting = replace(made, ceilings=replace(made.ceilings, page_fault_s=0.5e-6))
        return breakdown_of(faulting, KEY, 3e-3, faults=1000)[0]

    replay = Replay(REST, (2.2e-3,) * 9)
    excluded, included = parts_of(replace(replay, without_faults=True)), parts_of(replay)
    assert (excluded.avoidable_s, excluded.kernel_s) == (pytest.approx(1.0e-3), pytest.approx(1.7e-3))
    assert (included.avoidable_s, included.kernel_s) == (pytest.approx(1.0e-3), pytest.approx(1.2e-3))


@pytest.mark.parametrize(("latency_ms", "dispatch_ms"), [(9, 5), (6, 2), (5, 1), (10, 5)])
def test_dispatch_of_a_host_that_waits_is_the_rest_of_the_step(latency_ms: float, dispatch_ms: float) -> None:
    """LLM.int8() waits in every linear, so 4 ms of device time may hide only a part of 5 ms of host time.

    The hidden part is the difference between 9 ms and the step. With another format, the device hides all that it can.
    The same is assumed if the small kernels were not replayed.
    """
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
    """A step of 1 ms whose only operator takes `replayed_s` in isolation."""
    operator = OperatorWork("op", "mlp", 1, "float16", 10, 1, 0, 0, {}, {})
    made = facts([operator], {"op": Replay("op", (replayed_s,) * 9)}, flops_per_s=1e6, bytes_per_s=1e9)
    visit = Visit(CELL, 0, 1.0, (1e-3,) * 7, 1.0, (), None, 0.0)
    timed = replace(made, visits={CELL: [visit]}, operators={KEY: [operator], CellKey("prefill", CELL): []})
    assert cells_of_disturbed_parts(timed) == ([CELL] if is_held_up else [])
    assert cells_of_disturbed_dispatch(timed) == []


def test_the_fastest_of_several_replays_is_used() -> None:
    merged = MergedFacts()
    for seconds in (2e-3, 1e-3, 3e-3):
        merged.add(Replays((KEY,), (Replay("op", (seconds,) * 3), Replay(f"only in {seconds}", (1.0,)))))
    assert merged.replays[KEY]["op"].whole.median_s == 1e-3
    assert len(merged.replays[KEY]) == 4, "an operator of only one replay is included"


def work(flops: int, padded: int) -> OperatorWork:
    """Return a product of `flops`, plus `padded` on padding, that moves one byte."""
    return OperatorWork("op", "mlp", 1, "float16", flops, 1, 0, 0, {Cause.PADDING: padded} if padded else {})


@pytest.mark.parametrize(
    ("replayed_s", "latency_s", "padding_s"),
    [
        # At the roof, 10 FLOP/s: 3 s for the prompts, 1 s for padding.
        (None, 5.0, 1.0),
        # Its kernel reaches half of the roof, also on padding.
        (8.0, 10.0, 2.0),
        # In isolation it took longer than the step: padding takes at most a quarter of the step.
        (30.0, 10.0, 2.5),
    ],
)
def test_padding_is_a_separate_term(replayed_s: float | None, latency_s: float, padding_s: float) -> None:
    replays = {} if replayed_s is None else {"op": Replay("op", (replayed_s,))}
    made = facts([work(30, 10)], replays, flops_per_s=10.0, bytes_per_s=1e9)
    parts, by_cause = breakdown_of(made, KEY, latency_s)
    assert parts.padding_s == pytest.approx(padding_s)
    assert by_cause[Cause.PADDING] == pytest.approx(padding_s)
    assert parts.compute_s == pytest.approx(3.0)
    assert terms(parts) == pytest.approx(latency_s)
    if replayed_s is not None:
        assert parts.kernel_s == pytest.approx(replayed_s - 3.0 - padding_s)


@pytest.mark.parametrize(("kind", "plain_s", "disturbed_s"), [("cuda", 3.7e-3, 3.6e-3), ("cpu", 2.7e-3, 2.6e-3)])
def test_a_step_slowed_by_hooks_gives_no_times_by_group(kind: str, plain_s: float, disturbed_s: float) -> None:
    """An operator of 1 ms at the roof takes 3 of 4 ms with hooks: 2 ms are unexplained, unless hooks slowed the step.

    The limit is a tenth on a GPU, where hooks slow the host, and half on a CPU, whose speed may drift by a tenth.
    """
    linear = OperatorWork("up", "mlp", 1, "float16", 0.0, 1e9, 0.0, 0.0)
    hooked = HookedStep(KEY, {"mlp": (3e-3, 3e-3), "between modules": (1e-3, 1e-3)})
    made = replace(facts([linear], flops_per_s=1e15, bytes_per_s=1e12, kind=kind), hooked={KEY: hooked})
    assert unexplained_by_group(made, KEY, plain_s)["mlp"] == pytest.approx(2e-3)
    assert unexplained_by_group(made, KEY, disturbed_s) == {}
