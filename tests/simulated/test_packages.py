"""A card has the same figures with and without the packages that only some formats need."""

from __future__ import annotations

from pathlib import Path

import pytest
from hidden import hide

from .native import why_not
from .scenario import Scenario, said
from .truth import H100, RTX_4090, T4, Truth

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

OPTIONAL = ("bitsandbytes", "compressed-tensors", "gguf", "torchao")


@pytest.mark.parametrize("truth", [H100, T4, RTX_4090], ids=lambda truth: truth.name)
def test_cells_are_the_same_without_optional_packages(truth: Truth, tmp_path: Path) -> None:
    """Files are equal byte for byte, since the simulated clock has no noise."""
    scenario = Scenario("mistral-7b-v0.3", 1, engine="eager,static", prompt_lens=[32, 64], batch_sizes=[1, 2])
    with_all, _ = said(scenario, [truth], tmp_path / "with")
    with pytest.MonkeyPatch.context() as patch:
        for package in OPTIONAL:
            hide(patch, package)
        without, _ = said(scenario, [truth], tmp_path / "without")
    assert len(without.measured) == 16
    assert (without.folder / "cells.csv").read_text() == (with_all.folder / "cells.csv").read_text()
