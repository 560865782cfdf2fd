"""Troubleshooting and FAQ: each command and option in them exists, and their facts are those of the package."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .reference import command_names, pages

ROOT = Path(__file__).parents[2]
TROUBLE = (ROOT / "docs/troubleshooting.md").read_text()
FAQ = (ROOT / "docs/faq.md").read_text()


@pytest.mark.parametrize("page", [TROUBLE, FAQ], ids=["troubleshooting", "faq"])
def test_its_commands_and_options_exist(page: str) -> None:
    """The options of `pip`, `hf` and `python` are not checked."""
    codes = [code for code in re.findall(r"`([^`\n]+)`", page) if not re.match(r"pip |hf |python |-c ", code)]
    options = {option for code in codes for option in re.findall(r"--[a-z-]+", code)} - {"--system-site-packages"}
    known = set(re.findall(r"`(--[a-z-]+)`", pages()["commands.md"]))
    assert options
    assert options <= known
    named = {match[1] for code in codes if (match := re.match(r"(?:roofscope )?([a-z-]+) [A-Z]{4}", code))}
    assert named <= set(command_names())


def test_the_oldest_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=")
    assert f"use Python {oldest} or later" in TROUBLE
    assert any(item == f"Programming Language :: Python :: {oldest}" for item in project["classifiers"])


def test_constraints_replace_torch() -> None:
    """They name one torch, while the package works with older ones; without them, an image's torch remains."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = next(item.removeprefix("torch>=") for item in project["dependencies"] if item.startswith("torch>="))
    assert f"torch is older than {oldest}" in TROUBLE
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_a_model_that_the_hub_does_not_provide(roofscope: Callable[..., Any]) -> None:
    outcome = roofscope("count", "nobody/no-model")
    assert outcome.code == 2
    assert "is not in the local cache" in outcome.err
    assert "`hf auth login` for a gated model, or give a local folder or a preset" in outcome.err
    assert "`hf auth login`" in TROUBLE
