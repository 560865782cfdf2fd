"""Troubleshooting and FAQ: a test tries each row, and each command in them exists."""

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
HERE = "tests/docs/test_troubleshooting.py"
TRIED = {
    "`requires a different Python`": f"{HERE}::test_the_oldest_python",
    "pip replaces the image's torch": f"{HERE}::test_constraints_replace_torch",
    "`--quant` is refused with an install command": "tests/loading/test_missing_packages.py::"
    "test_a_run_in_a_format_without_its_library_is_refused_before_it_loads",
    "`roofscope: command not found`": "tests/checks/test_doctor.py::test_doctor_in_a_checkout_that_is_not_installed",
    "torch sees no GPU": "tests/checks/test_doctor.py::test_a_driver_older_than_torch",
    "the model spills to the host": "tests/simulated/test_memory.py::test_a_whole_model_spills_on_a_gpu_of_14_gib",
    "cells are marked `oom`": "tests/run/test_failures.py::test_an_allocator_that_has_no_memory_is_out_of_memory",
    "no power, clocks or temperature": "tests/device/test_nvml.py::test_no_driver_and_no_library",
    "the trace has no kernels": "tests/simulated/test_doctor.py::test_a_t4",
    "under WSL a run is suddenly slow": "tests/run/test_warnings.py::test_memory_may_spill_under_wsl",
    "a gated model is refused": f"{HERE}::test_a_model_that_the_hub_does_not_provide",
    "*is not in the local cache*": f"{HERE}::test_a_model_that_the_hub_does_not_provide",
    "custom code is refused": "tests/loading/test_hostile_models.py::test_custom_code_runs_if_it_is_trusted",
    "cells are *noisy*, intervals are wide": "tests/run/test_neighbours.py::"
    "test_a_busy_machine_is_the_first_thing_said_and_no_saving_is_named",
    "regimes are *inconclusive*": "tests/cli/test_look.py::"
    "test_a_busy_machine_is_named_instead_of_kernels_without_a_label",
    "*unexplained* is negative": "tests/judge/test_answer.py::"
    "test_parts_that_took_longer_than_the_step_are_named_as_such",
    "`gate` always ends with 3": "tests/comparison/test_gate.py::"
    "test_a_wide_interval_is_inconclusive_and_names_the_missing_budget",
    "the gate fails for an unchanged model": "tests/comparison/test_rerun.py::test_the_grid_is_measured_again",
    "a run ends with exit code 3": "tests/run/test_failures.py::"
    "test_a_batch_size_that_fails_leaves_a_run_with_the_others",
    "decode is slower than another tool says": "tests/place/test_placing.py::"
    "test_decode_steps_that_include_the_prefill_are_reported",
}
"""The test of each symptom of the page."""


def test_every_row_has_a_test() -> None:
    rows = re.findall(r"^\| (?!symptom|---)(.+?) \|", TROUBLE, re.MULTILINE)
    assert rows == list(TRIED)
    for place in TRIED.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), place


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
