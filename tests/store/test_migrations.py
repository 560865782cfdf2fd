"""Facts of older runs, migrated to the current schema."""

from __future__ import annotations

import pytest

from profiler.store.samples import fact_of

OLDER = {
    "kind": "dispatch",
    "engine": "eager",
    "phase": "decode",
    "batch_size": 1,
    "alone_s": [6e-3] * 8,
    "cores": [],
    "conversions": [],
}


def test_a_slow_minute_is_not_taken_for_dispatch() -> None:
    """12 ms on top of linears of 38 ms, with 2 ms for the bare calls; in one turn another process doubles all times."""
    dispatch = fact_of(
        {
            **OLDER,
            "among_s": [*[100e-3] * 3, *[50e-3] * 12],
            "linears_s": [76e-3, 38e-3, 38e-3, 38e-3, 38e-3],
            "with_bare_s": [80e-3, 40e-3, 40e-3, 40e-3, 40e-3],
        }
    )
    assert dispatch.among_s == pytest.approx([26e-3, *[14e-3] * 4])  # type: ignore[union-attr]
    assert dispatch.bare_s == pytest.approx([2e-3])  # type: ignore[union-attr]


def test_linears_that_were_timed_once_give_no_dispatch() -> None:
    """A measured 7B model in 4 bits has linears of 0.8 s, timed once, and steps of 1.07 s in a slow minute.

    In other minutes its steps took 0.35 s, and those of its hollow twin 25 ms.
    """
    dispatch = fact_of({**OLDER, "among_s": [1.074, 1.038, 1.120], "linears_s": [0.795], "with_bare_s": [0.879]})
    assert dispatch.among_s == ()  # type: ignore[union-attr]


def test_a_twin_without_linears_stays_unchanged() -> None:
    dispatch = fact_of({**OLDER, "among_s": [], "linears_s": [], "with_bare_s": []})
    assert (dispatch.among_s, dispatch.bare_s) == ((), ())  # type: ignore[union-attr]
