"""The corpus of real scripts is whole, and `why` names the causes of its quick ones."""

from __future__ import annotations

import ast
import math

import pytest
from real.corpus import Script, scripts

SCRIPTS = {script.name: script for script in scripts()}


def test_every_script_has_an_expectation() -> None:
    files = (SCRIPTS["chat"].path.parent).glob("*.py")
    assert sorted(file.stem for file in files) == sorted(SCRIPTS)
    assert len(SCRIPTS) == 30


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_the_expectation_names_its_source_and_its_cures_fit(script: Script) -> None:
    assert script.source.startswith("https://")
    for cure in script.cures:
        ast.parse(script.cured(cure))
    savings = [cure.saves_s for cure in script.cures if not math.isnan(cure.saves_s)]
    assert savings == sorted(savings, reverse=True)
    assert all(saving > 0.1 for saving in savings), "too little to be a cause"
