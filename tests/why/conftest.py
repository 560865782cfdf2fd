"""Each test of `why` begins as a script does: with nothing compiled."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    """Another test of this process may have compiled code, whose logits `why` does not watch."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
        dynamo.utils.counters.clear()
        dynamo.utils.clear_compilation_metrics()
