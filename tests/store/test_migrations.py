"""Facts of older runs, read as this version would have measured them."""

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
    """12 ms beside linears of 38, and 2 of their own calls; a neighbour makes all of it twice as slow in one turn."""
    found = fact_of(
        {
            **OLDER,
            "among_s": [*[100e-3] * 3, *[50e-3] * 12],
            "linears_s": [76e-3, 38e-3, 38e-3, 38e-3, 38e-3],
            "with_bare_s": [80e-3, 40e-3, 40e-3, 40e-3, 40e-3],
        }
    )
    assert found.among_s == pytest.approx([26e-3, *[14e-3] * 4])  # type: ignore[union-attr]
    assert found.bare_s == pytest.approx([2e-3])  # type: ignore[union-attr]


def test_linears_that_were_seen_once_tell_no_dispatch() -> None:
    """A 7B model in 4 bits, as measured: 0.8 s of linears, seen once, beside steps of 1.07 s in a bad minute. Its steps
    took 0.35 s, and the twin's own 25 ms."""
    found = fact_of({**OLDER, "among_s": [1.074, 1.038, 1.120], "linears_s": [0.795], "with_bare_s": [0.879]})
    assert found.among_s == ()  # type: ignore[union-attr]


def test_a_twin_that_stepped_alone_is_left_as_it_is() -> None:
    found = fact_of({**OLDER, "among_s": [], "linears_s": [], "with_bare_s": []})
    assert (found.among_s, found.bare_s) == ((), ())  # type: ignore[union-attr]
