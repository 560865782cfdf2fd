"""Imports point one way, diagnosis is pure, and reports need neither torch nor a GPU."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "profiler"

WORDS = {"errors", "units", "grid", "_version"}
# What each room may import beside the words; every module of the package lies in a room or is a word.
ALLOWED = {
    "machine": set(),
    "loading": {"machine"},
    "work": {"machine"},
    "roofs": {"machine"},
    "engines": {"machine"},
    "timing": {"engines", "machine"},
    "diagnosis": {"record"},
    "probes": {"diagnosis", "record", "timing", "roofs", "engines", "loading", "work", "machine"},
    "record": {"timing"},
    "report": {"record", "diagnosis", "machine"},
    "job": {
        "report", "record", "diagnosis", "probes", "timing", "roofs", "engines", "loading", "work", "machine",
    },
    "cli": {"job", "report", "record", "diagnosis", "roofs", "loading", "machine"},
}  # fmt: skip
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


def test_every_module_has_a_room() -> None:
    at_the_root = {path.stem for path in PACKAGE.glob("*.py")}
    assert at_the_root == WORDS | {"__init__"}
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(ALLOWED)


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_rooms_know_only_what_lies_below(room: str) -> None:
    for file in (PACKAGE / room).rglob("*.py"):
        known = {name.split(".")[1] for name in imports(file) if name.startswith("profiler.")}
        assert known <= ALLOWED[room] | WORDS | {room}, f"{file.name} imports {known - ALLOWED[room] - WORDS - {room}}"


def test_words_know_each_other_alone() -> None:
    for word in WORDS:
        known = {name.split(".")[1] for name in imports(PACKAGE / f"{word}.py") if name.startswith("profiler.")}
        assert known <= WORDS, f"{word} imports {known - WORDS}"


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
from profiler.record.run import read_run
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
