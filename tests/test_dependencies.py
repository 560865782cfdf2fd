"""What pyproject.toml declares is what the product imports; commands that draw nothing load no plotting library."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = "runs/reference/smollm2-135m-zen4"
IMPORTED_AS = {"nvidia-ml-py": "pynvml"}
"""The module of a package that has another name."""
NOT_IMPORTED = {"pyarrow": "pandas needs it for Parquet"}
"""Declared packages that the product does not import, with the reason."""
BUILT_ON = {"torch", "transformers", "accelerate", "bitsandbytes", "nvidia-ml-py", "pandas", "seaborn"}
"""The packages on which roofscope is to be built."""
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[><=!~\[ ]", text)[0] for text in requirements}


REQUIRED = _names(_PROJECT["dependencies"])
OPTIONAL = _names(_PROJECT["optional-dependencies"]["formats"] + _PROJECT["optional-dependencies"]["vllm"])


def _imported() -> set[str]:
    """Return the third-party modules that the product names in an import, early or late."""
    found: set[str] = set()
    for path in (ROOT / "profiler").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"profiler"}


def _module(package: str) -> str:
    return IMPORTED_AS.get(package, package.replace("-", "_"))


def test_every_required_package_is_imported_or_has_a_reason() -> None:
    unused = {package for package in REQUIRED if _module(package) not in _imported()}
    assert unused == set(NOT_IMPORTED)
    assert len(NOT_IMPORTED) <= 2


def test_every_imported_package_is_declared() -> None:
    declared = {_module(package) for package in REQUIRED | OPTIONAL}
    assert _imported() <= declared


def test_the_packages_that_it_is_built_on_are_required_and_used() -> None:
    assert REQUIRED - set(NOT_IMPORTED) >= BUILT_ON


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["count", "smollm2-135m", "--gpu", "T4"], ["judge", "RUN", "--format", "json"]],
    ids=["help", "count", "judge"],
)
def test_commands_that_draw_nothing_import_no_plotting_library(arguments: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for file in (ROOT / RUN).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    words = [str(folder) if word == "RUN" else word for word in arguments]
    code = (
        "import sys\n"
        f"sys.argv = ['roofscope', *{words!r}]\n"
        "from profiler.cli.app import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print(sorted({'seaborn', 'matplotlib'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr.splitlines()[-1] == "[]"
