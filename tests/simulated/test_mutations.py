"""The tests can fail: two of the planted faults of `mutations` fail their scenarios."""

from __future__ import annotations

import pytest

from .mutations import MUTATIONS, noticed
from .native import why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.mark.parametrize("name", ["capture on the first card", "read before synchronising"])
def test_a_planted_fault_is_detected(name: str) -> None:
    [mutation] = [mutation for mutation in MUTATIONS if mutation.name == name]
    assert noticed(mutation) is not None
