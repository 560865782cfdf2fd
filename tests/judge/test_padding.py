"""What padding takes of a step, by arithmetic: a quarter of the work is a quarter of its kernel's time."""

from __future__ import annotations

import pytest
from made_facts import KEY, facts

from profiler.facts.measurements import Replay
from profiler.facts.operators import Cause, OperatorWork
from profiler.judge.breakdown import TERMS
from profiler.judge.demand import breakdown_of


def work(flops: int, padded: int) -> OperatorWork:
    """A product of so many FLOPs, and as many more on padding; it moves a byte."""
    return OperatorWork("op", "mlp", 1, "float16", flops, 1, 0, 0, {Cause.PADDING: padded} if padded else {})


@pytest.mark.parametrize(
    ("replayed_s", "latency_s", "padding_s"),
    [
        # At the roof, 10 FLOP/s: 3 s for the prompts, 1 s for padding.
        (None, 5.0, 1.0),
        # Its kernel reaches half of the roof: so it does on padding.
        (8.0, 10.0, 2.0),
        # Alone it took longer than the whole step: padding takes no more than its quarter of that.
        (30.0, 10.0, 2.5),
    ],
)
def test_padding_is_a_term_of_its_own(replayed_s: float | None, latency_s: float, padding_s: float) -> None:
    replays = {} if replayed_s is None else {"op": Replay("op", (replayed_s,))}
    made = facts([work(30, 10)], replays, flops_per_s=10.0, bytes_per_s=1e9)
    parts, by_cause = breakdown_of(made, KEY, latency_s)
    assert parts.padding_s == pytest.approx(padding_s)
    assert by_cause[Cause.PADDING] == pytest.approx(padding_s)
    assert parts.compute_s == pytest.approx(3.0)
    assert sum(getattr(parts, term) for term in TERMS) == pytest.approx(latency_s)
    if replayed_s is not None:
        assert parts.kernel_s == pytest.approx(replayed_s - 3.0 - padding_s)


def test_a_batch_without_padding_has_none() -> None:
    parts, by_cause = breakdown_of(facts([work(30, 0)], flops_per_s=10.0, bytes_per_s=1e9), KEY, 5.0)
    assert parts.padding_s == 0
    assert Cause.PADDING not in by_cause
