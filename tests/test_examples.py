"""The examples use commands and options that exist. The keys of their tools were checked against the tools' schemas."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

import pytest
import typer
import yaml

from profiler.cli.app import app
from profiler.loading.source import presets

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("name", ["skypilot.yaml", "dstack.yml"])
def test_an_example_asks_what_this_program_takes(name: str, roofscope: Callable[..., Any]) -> None:
    """What it does with its folders fails only for want of them."""
    text = (EXAMPLES / name).read_text()
    content = yaml.safe_load(text)
    if name == "skypilot.yaml":
        environment, lines = content["envs"], content["run"].splitlines()
    else:
        environment, lines = dict(item.split("=", 1) for item in content["env"]), content["commands"]
    assert environment["MODEL"] in presets()
    calls = [shlex.split(Template(line).substitute(environment)) for line in lines if line.startswith("roofscope ")]
    assert [words[1] for words in calls] == ["doctor", "run"]
    group = typer.main.get_command(app)
    for _, command, *arguments in calls:
        group.get_command(None, command).make_context(command, list(arguments))  # type: ignore[attr-defined]
    afterwards = re.findall(r"^#   roofscope (.*)$", text, re.MULTILINE)
    assert {line.split()[0] for line in afterwards} == {"compare", "plot", "report"}
    for line in afterwards:
        outcome = roofscope(*shlex.split(line, comments=True))
        assert (outcome.code, "runs/grid-" in outcome.err) == (2, True), outcome.err


SKILL = (EXAMPLES / "skill/SKILL.md").read_text()


def test_the_skill_has_a_name_and_a_description_and_fits_a_page() -> None:
    """The open format: https://agentskills.io/specification (a name of at most 64, a description of at most 1024)."""
    _, front, body = SKILL.split("---\n", 2)
    about = yaml.safe_load(front)
    assert set(about) == {"name", "description"}
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", about["name"])
    assert 20 < len(about["description"]) <= 1024
    assert len(body.splitlines()) <= 70


KEYS = {
    "count": ("model_flops", "bytes", "gpus.floor_s"),
    "place": ("rows.floor_s", "rows.attained", "rows.note"),
    "judge": (
        "answer", "warnings", "remarks", "cells.latency_s", "cells.regime", "cells.confidence", "cells.status",
        "advised", "not_tried.how", "not_tried.preparing_s", "evidence.changes.change", "evidence.changes.basis",
    ),
    "compare": ("comparable", "cells.change", "cells.low", "cells.high", "cells.verdict"),
    "forecast": ("error", "cells.latency_s", "cells.low_s", "cells.high_s", "cells.basis"),
}  # fmt: skip


def keys(document: object, path: str) -> bool:
    """Whether a document has a key in objects and lists of them, such as `cells.status`."""
    if isinstance(document, list):
        return bool(document) and any(keys(item, path) for item in document)
    first, _, rest = path.partition(".")
    return isinstance(document, dict) and first in document and (not rest or keys(document[first], rest))


@pytest.mark.parametrize("command", re.findall(r"^\$ roofscope (.*)$", SKILL, re.MULTILINE))
def test_the_skills_commands_run_and_have_the_keys_that_it_names(
    command: str, roofscope: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *arguments = shlex.split(command)
    for folder in {Path(word).parent for word in arguments if "/" in word}:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.html", "*.png"))
    monkeypatch.chdir(tmp_path)
    document = json.loads(roofscope(name, *arguments).out)
    assert [path for path in KEYS[name] if not keys(document, path)] == []
    assert [path for path in KEYS[name] if f"{path.rpartition('.')[2]}`" not in SKILL] == []


@pytest.mark.slow
def test_why_names_the_two_lines_that_readme_changes(tmp_path: Path) -> None:
    """In a process of its own: the script builds a model of 135 M parameters."""
    command = [sys.executable, "-m", "profiler", "why", "--out", str(tmp_path / "why"), str(EXAMPLES / "answers.py")]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    findings = json.loads((tmp_path / "why/why.json").read_text())["findings"]
    assert {finding["id"] for finding in findings[:2]} == {"cache-off", "padding"}
    readme, script = (file.read_text() for file in (ROOT / "README.md", EXAMPLES / "answers.py"))
    assert all(f"-{line}\n" in readme and line in script for line in ("LENGTH = 128", "        use_cache=False,"))
