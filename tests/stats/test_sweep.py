"""The sweep with a fake engine: order, budget, out-of-memory, and against a plain loop on the real model."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from machines import HOST

from profiler.engines.base import DecodeState
from profiler.engines.transformers import EagerEngine
from profiler.facts.visits import Gap, Visit, steady
from profiler.grid.cells import Cell
from profiler.grid.ranges import make_grid
from profiler.measure.sweep import Plan, sweep
from profiler.measure.visit import warm_up
from profiler.stats import timing_of


class FakeEngine:
    """Takes no time, and runs out of memory from a number of prompt tokens on."""

    name = "eager"
    cache = "dynamic"
    keeps_last_logits = True
    whole_calls = False
    kept_bytes = 0
    beside = ()

    def __init__(self, oom_from: int = 1 << 60, error: type[Exception] = torch.OutOfMemoryError) -> None:
        self.oom_from = oom_from
        self.error = error
        self.prompts: list[tuple[int, int]] = []

    def prepare(self, batch: int, slots: int) -> None:
        return None

    def announce(self, cell: Cell, steps: int | None) -> None:
        return None

    def fill(self, batch: int, context: int, slots: int) -> DecodeState:
        return DecodeState(None, torch.zeros(batch, 1, dtype=torch.long))

    def prefill(self, ids: torch.Tensor, slots: int) -> DecodeState:
        self.prompts.append((ids.shape[0], ids.shape[1]))
        if ids.numel() >= self.oom_from:
            raise self.error("CUDA out of memory")
        return DecodeState(None, ids[:, :1])

    def decode(self, state: DecodeState) -> DecodeState:
        return state


def run(engine: FakeEngine, budget_s: float = 5.0, fits=lambda cell: None, earlier=()) -> list[Visit | Gap]:  # type: ignore[no-untyped-def]
    grid = make_grid([4, 8, 16], [1, 2], 6)
    return list(
        sweep(
            {"eager": engine},
            Plan(grid, budget_s, half_width=10.0),
            machine=HOST,
            vocab_size=32,
            fits=fits,
            earlier=earlier,
        )
    )


def test_every_cell_is_visited_four_times_at_least_small_ones_first() -> None:
    outcomes = run(FakeEngine())
    first = [outcome.cell for outcome in outcomes if isinstance(outcome, Visit) and outcome.round == 0]
    assert first == [Cell(1, 4, 6), Cell(1, 8, 6), Cell(2, 4, 6), Cell(1, 16, 6), Cell(2, 8, 6), Cell(2, 16, 6)]
    assert sorted(outcome.cell for outcome in outcomes) == sorted(4 * first)


def test_engines_of_a_cell_are_visited_in_turn() -> None:
    """Right after one another in every round, the other way round in every second one."""
    grid = make_grid([4, 8], [1, 2], 6, engines=("eager", "static"))
    engines = {name: FakeEngine() for name in grid.engines}
    outcomes = list(sweep(engines, Plan(grid, 5.0, half_width=10.0), machine=HOST, vocab_size=32))
    pairs = list(zip(outcomes[::2], outcomes[1::2], strict=True))
    assert len(pairs) == 4 * 4
    for one, other in pairs:
        assert isinstance(one, Visit)
        assert isinstance(other, Visit)
        assert (one.round, replace(one.cell, engine="")) == (other.round, replace(other.cell, engine=""))
        assert one.cell.engine == ("static" if one.round % 2 else "eager")
        assert one.cell.engine != other.cell.engine


def test_a_second_visit_comes_before_any_third() -> None:
    """A sweep that was cut off in its second round begins with what has one visit."""
    outcomes = [outcome for outcome in run(FakeEngine()) if isinstance(outcome, Visit)]
    earlier = [*outcomes[:6], *outcomes[6:9]]
    once = {cell for cell, times in Counter(visit.cell for visit in earlier).items() if times == 1}
    again = run(FakeEngine(), earlier=earlier)
    assert {outcome.cell for outcome in again[: len(once)]} == once


def test_a_budget_too_short_for_a_second_round_goes_to_the_cheapest_cells() -> None:
    """A prefill takes a millisecond a token; what is left is half of what the first round took."""

    class Slow(FakeEngine):
        def prefill(self, ids: torch.Tensor, slots: int) -> DecodeState:
            time.sleep(0.001 * ids.numel())
            return super().prefill(ids, slots)

    start_s = time.perf_counter()
    tokens = {visit.cell: visit.cell.batch_size * visit.cell.prompt_len for visit in run(Slow(), budget_s=1e-9)}
    first_s = time.perf_counter() - start_s
    again = {visit.cell for visit in run(Slow(), budget_s=1.5 * first_s)[len(tokens) :]}
    assert 0 < len(again) < len(tokens)
    assert max(tokens[cell] for cell in again) <= min(tokens[cell] for cell in set(tokens) - again)


def test_prompts_are_as_long_as_asked() -> None:
    engine = FakeEngine()
    run(engine)
    assert set(engine.prompts) == {(b, p) for b in (1, 2) for p in (4, 8, 16)}


def test_the_first_round_always_ends_and_the_budget_stops_the_rest() -> None:
    outcomes = run(FakeEngine(), budget_s=1e-9)
    assert len(outcomes) == 6


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_out_of_memory_is_a_row_and_larger_cells_are_skipped(error: type[Exception]) -> None:
    outcomes = run(FakeEngine(oom_from=16, error=error))
    gaps = {outcome.cell: outcome.status for outcome in outcomes if isinstance(outcome, Gap)}
    assert gaps == {Cell(2, 8, 6): "oom", Cell(1, 16, 6): "oom", Cell(2, 16, 6): "skipped"}
    assert sum(isinstance(outcome, Visit) for outcome in outcomes) == 4 * 3


def test_a_failing_cell_does_not_end_the_sweep() -> None:
    class Broken(FakeEngine):
        def prefill(self, ids: torch.Tensor, slots: int) -> DecodeState:
            if ids.shape[1] == 8:
                raise RuntimeError("no kernel for this shape")
            return super().prefill(ids, slots)

    outcomes = run(Broken())
    failed = [outcome for outcome in outcomes if isinstance(outcome, Gap)]
    assert {outcome.cell for outcome in failed} == {Cell(1, 8, 6), Cell(2, 8, 6)}
    assert "no kernel" in failed[0].reason


def test_a_cell_that_cannot_fit_is_never_tried() -> None:
    engine = FakeEngine()
    outcomes = run(engine, fits=lambda cell: "needs 99 GB" if cell == Cell(2, 16, 6) else None)
    assert (2, 16) not in engine.prompts
    assert [o.reason for o in outcomes if isinstance(o, Gap)] == ["needs 99 GB"]


def test_the_first_decode_step_is_kept_apart() -> None:
    assert steady((9.0, 1.0, 1.1)) == (1.0, 1.1)


@pytest.mark.slow
@pytest.mark.timing
def test_times_agree_with_a_plain_loop(short_model: torch.nn.Module) -> None:
    """Our decode step and prefill against nothing but the model and perf_counter: within 3 %.

    Both are run in turn in this process, in either order, so that a drift of the machine falls on both alike; what the
    ratios of the rounds scatter is granted beside the 3 %, and a machine that scatters as much proves nothing.
    """
    model = short_model
    engine = EagerEngine(model, HOST)
    warm_up(engine, Cell(1, 128, 24), HOST, vocab_size=49152, budget_s=5.0)
    ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
    for number in range(10):
        loops = {"ours": lambda: our_loop(engine), "plain": lambda: plain_loop(model)}
        names = ("ours", "plain") if number % 2 else ("plain", "ours")
        found = {name: loops[name]() for name in names}
        for phase, ratio in ratios.items():
            ratio.append(found["ours"][phase] / found["plain"][phase])
        if number == 4 and any(timing_of(ratio).half_width_s > 0.09 for ratio in ratios.values()):
            break  # twice the rounds would not bring it below 3 %
    for phase, ratio in ratios.items():
        timing = timing_of(ratio)
        if timing.half_width_s > 0.03:
            pytest.skip(f"this machine is too noisy: the {phase} ratio is only known to {timing.half_width_s:.1%}")
        assert timing.median_s == pytest.approx(1.0, abs=0.03 + timing.half_width_s), (phase, ratio)


def our_loop(engine: EagerEngine) -> dict[str, float]:
    """Medians of one visit: a prefill of 128 tokens, and the steps behind it."""
    plan = Plan(make_grid([128], [1], 24), budget_s=1e-9)
    [visit] = list(sweep({"eager": engine}, plan, machine=HOST, vocab_size=49152))
    assert isinstance(visit, Visit)
    return {"prefill": statistics.median(visit.prefills_s), "decode": statistics.median(steady(visit.decode_s))}


def plain_loop(model: Any) -> dict[str, float]:
    """The same with the model alone."""
    ids = torch.randint(0, 49152, (1, 128), generator=torch.Generator().manual_seed(3))
    prefills, steps = [], []
    with torch.inference_mode():
        for _ in range(3):
            before = time.perf_counter()
            output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
            prefills.append(time.perf_counter() - before)
        for _ in range(23):
            token = output.logits[:, -1:].argmax(-1)
            before = time.perf_counter()
            output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
            output.logits[:, -1:].argmax(-1)
            steps.append(time.perf_counter() - before)
    return {"prefill": statistics.median(prefills), "decode": statistics.median(steps[1:])}
