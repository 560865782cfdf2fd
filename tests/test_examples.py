"""The examples use commands and options that exist. The keys of their tools were checked against the tools' schemas."""

from __future__ import annotations

import shlex
from pathlib import Path
from string import Template

import pytest
import typer
import yaml

from profiler.cli.app import app
from profiler.loading.source import preset_names

EXAMPLES = Path(__file__).parents[1] / "examples"


def commands(name: str) -> tuple[dict[str, str], list[str]]:
    """(the example's environment variables, the commands that it runs)."""
    content = yaml.safe_load((EXAMPLES / name).read_text())
    if name == "skypilot.yaml":
        return content["envs"], content["run"].splitlines()
    return dict(item.split("=", 1) for item in content["env"]), content["commands"]


@pytest.mark.parametrize("name", ["skypilot.yaml", "dstack.yml"])
def test_an_example_asks_what_this_program_takes(name: str) -> None:
    environment, lines = commands(name)
    assert environment["MODEL"] in preset_names()
    calls = [shlex.split(Template(line).substitute(environment)) for line in lines if line.startswith("roofscope ")]
    assert [words[1] for words in calls] == ["doctor", "run"]
    group = typer.main.get_command(app)
    for _, command, *arguments in calls:
        group.get_command(None, command).make_context(command, list(arguments))  # type: ignore[attr-defined]
