"""Imports point one way, diagnosis is pure, and reports need neither torch nor a GPU."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "profiler"

# What a room may not know.
FORBIDDEN = {
    "work": {"hardware", "timing", "diagnosis", "report", "job", "cli"},
    "hardware": {"work", "timing", "diagnosis", "report", "job", "cli"},
    "timing": {"work", "hardware", "diagnosis", "report", "job", "cli"},
    "loading": {"work", "hardware", "timing", "diagnosis", "report", "job", "cli"},
    "diagnosis": {"work", "hardware", "timing", "loading", "catalog", "report", "job", "cli", "runstore"},
    "report": {"work", "loading", "catalog", "job", "cli"},
}
HEAVY = {"torch", "transformers", "accelerate", "bitsandbytes"}


def imports(file: Path) -> set[str]:
    """Everything a file imports anywhere, but for what only the type checker sees."""
    tree = ast.parse(file.read_text())
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("room", sorted(FORBIDDEN))
def test_rooms_know_only_what_lies_below(room: str) -> None:
    for file in (PACKAGE / room).rglob("*.py"):
        rooms = {name.split(".")[1] for name in imports(file) if name.startswith("profiler.")}
        assert not rooms & FORBIDDEN[room], f"{file.name} imports {rooms & FORBIDDEN[room]}"


@pytest.mark.parametrize("room", ["diagnosis", "report"])
def test_no_torch_in(room: str) -> None:
    for file in (PACKAGE / room).rglob("*.py"):
        assert not {name.split(".")[0] for name in imports(file)} & HEAVY, file.name


def test_no_environment_variable_is_read_but_for_the_cache_folder() -> None:
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        assert "os.environ" not in text or 'os.environ.get("XDG_CACHE_HOME")' in text, file.name


REPORT = """
import sys
for name in ("torch", "transformers", "accelerate", "bitsandbytes", "pynvml"):
    sys.modules[name] = None
from pathlib import Path
from profiler.report.page import write_reports
from profiler.report.console import screen
from profiler.report.terminal import print_run
from profiler.runstore import read_run
run = read_run(Path(sys.argv[1]))
(run.folder / "roofline.png").unlink()
write_reports(run)
print_run(run, screen())
"""


def test_reports_render_without_torch(tiny_folder: Path, tmp_path: Path) -> None:
    import profiler

    run = profiler.profile(
        str(tiny_folder), prompt_lens=[8], batch_sizes=[1], new_tokens=8, budget_s=1, out=tmp_path / "run"
    )
    done = subprocess.run(
        [sys.executable, "-c", REPORT, str(run.folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert (run.folder / "roofline.png").stat().st_size > 10_000
    assert "Decode at batch 1 is" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
