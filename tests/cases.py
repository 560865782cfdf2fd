"""The cases of a parametrised test, most of which are slow."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases, each a value or a tuple of values; all but the quick ones are marked slow."""
    values = {case: case if isinstance(case, tuple) else (case,) for case in cases}
    assert set(quick) <= values.keys(), "a quick case that is none"
    return [case if case in quick else pytest.param(*each, marks=pytest.mark.slow) for case, each in values.items()]
