"""Help texts that list alternatives without importing them name all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

from profiler.comparison import page  # noqa: F401 - it adds its picture
from profiler.data.links import published_links
from profiler.engines.registry import engine_names
from profiler.report.columns import EXPORTERS
from profiler.report.plots import COMPARISONS, PLOTS


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("run", engine_names()),
        ("forecast", published_links()),
        ("export", EXPORTERS),
        ("plot", [*PLOTS, *COMPARISONS]),
    ],
)
def test_a_help_names_every_alternative(roofscope: Any, command: str, names: Iterable[str]) -> None:
    words = set(re.findall(r"[\w-]+", roofscope(command, "--help").out))
    assert set(names) <= words
