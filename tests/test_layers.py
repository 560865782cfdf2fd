"""Imports point one way and are declared; diagnosis is pure; reports need neither torch nor a GPU."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "profiler"

WORDS = {
    "effort", "errors", "options", "patching", "units", "stats", "packages", "fallbacks", "user_cache", "json_document",
}  # fmt: skip
"""Modules at the root, which every package may import."""
CORE = (
    "grid", "data", "facts", "device", "quant", "loading", "counting", "engines", "roofs", "measure", "judge",
    "predict", "readers", "store", "report", "run",
)  # fmt: skip
"""Packages of the core in the order of the data: each may import those before it."""
COMMANDS = ("count", "comparison", "forecast", "rent", "place", "why_slow", "checks", "explore", "ranks")
"""One package per further command: each may import the core, and no other command's package."""
TORCH_FREE = ("grid", "data", "facts", "judge", "predict", "readers", "store", "report")
"""Packages that work where torch cannot be imported."""
HEAVY = {"torch", "transformers", "accelerate", "bitsandbytes"}


@functools.cache
def imports(file: Path) -> set[str]:
    """All imports of a file, except those that only the type checker sees."""
    nodes = set(ast.walk(ast.parse(file.read_text())))
    unseen = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    nodes -= {inner for node in unseen for inner in ast.walk(node)}
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return whole | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
"""Every module of the package by its dotted name, without the package's name."""


def own_imports(file: Path) -> set[str]:
    """The modules of this package that a file imports, without the package's name."""
    names = {name.removeprefix("profiler.") for name in imports(file) if name.startswith("profiler.")}
    return {name if name in MODULES else name.rpartition(".")[0] for name in names}


def test_every_package_has_its_place() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == WORDS | {"__init__", "__main__", "theory"}
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages == {*CORE, *COMMANDS, "cli"}
    for word in WORDS:
        assert own_imports(PACKAGE / f"{word}.py") <= WORDS, "modules at the root import only each other"


@pytest.mark.parametrize("package", [*CORE, *COMMANDS])
def test_imports_point_one_way(package: str) -> None:
    below = CORE[: CORE.index(package)] if package in CORE else CORE
    for file in (PACKAGE / package).rglob("*.py"):
        for name in own_imports(file):
            top = name.split(".")[0]
            assert top in WORDS | {package, *below}, f"{package}/{file.name} imports {name}"


def test_no_module_is_imported_in_a_circle() -> None:
    below = {name: own_imports(path) - {name} for name, path in MODULES.items()}
    while leaves := {name for name, needed in below.items() if not needed & below.keys()}:
        below = {name: needed for name, needed in below.items() if name not in leaves}
    assert not below, f"circular imports among {sorted(below)}"


@pytest.mark.parametrize("package", TORCH_FREE)
def test_no_torch_in(package: str) -> None:
    for file in (PACKAGE / package).rglob("*.py"):
        assert not {name.split(".")[0] for name in imports(file)} & HEAVY, file.name


@pytest.mark.parametrize("word", ["torch.cuda", "time.perf_counter", "time.monotonic"])
def test_one_door_to_the_device(word: str) -> None:
    """Only `device` queries devices and clocks, and `checks`, which tests that access. All others get a Machine."""
    named = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if word in path.read_text()}
    assert all(name.startswith(("device/", "checks/")) for name in named), named


WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "accelerate", "bitsandbytes", "pynvml"):
    sys.modules[name] = None
import importlib, pkgutil
from pathlib import Path
import profiler.report
for module in pkgutil.walk_packages(profiler.report.__path__, "profiler.report."):
    importlib.import_module(module.name)
from profiler.report.sections import run_sections
from profiler.report.terminal import print_sections, screen
from profiler.report.html import write_report
from profiler.run.judge_folder import judge_folder
from profiler.run.screens import comparison_sections, doubling_sections, write_comparison
from profiler.store.folder import read_run
run = judge_folder(Path(sys.argv[1]))
(run.folder / "report.html").unlink()
write_report(run)
print_sections(run_sections(run), screen())
print_sections(doubling_sections(run, "decode"), screen())
runs = [read_run(Path(folder)) for folder in sys.argv[2:]]
write_comparison(runs)
print_sections(comparison_sections(runs), screen())
"""


@pytest.mark.ci
def test_a_run_is_judged_and_reported_again_without_torch_to_the_byte(tiny_folder: Path, tmp_path: Path) -> None:
    import profiler

    base = shutil.copytree(PACKAGE.parent / "runs/reference/smollm2-135m-precisions", tmp_path / "precisions")
    run = profiler.profile(
        str(tiny_folder), prompt_lens=[8], batch_sizes=[1, 2], new_tokens=8, engine="eager,static", budget_s=1,
        breakdown=True, out=tmp_path / "run",
    )  # fmt: skip
    names = ("cells.csv", "run.json", "operators.csv")
    before = {name: (run.folder / name).read_bytes() for name in names}
    command = [sys.executable, "-c", WITHOUT_TORCH, run.folder, base / "none", base / "nf4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    assert {name: (run.folder / name).read_bytes() for name in names} == before
    assert "<svg" in (run.folder / "report.html").read_text("utf-8")
    assert (base / "report.html").stat().st_size > 5000
    assert all(words in done.stdout for words in ("decode 1 x 8", "evidence", "speed-up"))
    assert max(map(len, done.stdout.splitlines())) <= 100


ROOT = Path(__file__).parents[1]
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


IMPORTED = {name.split(".")[0] for path in MODULES.values() for name in imports(path)}
IMPORTED -= {*sys.stdlib_module_names, "profiler"}


def _module(package: str) -> str:
    return IMPORTED_AS.get(package, package.replace("-", "_"))


def test_packages_are_required_because_they_are_imported_or_for_a_reason() -> None:
    unused = {package for package in REQUIRED if _module(package) not in IMPORTED}
    assert unused == set(NOT_IMPORTED)
    assert len(NOT_IMPORTED) <= 2
    assert REQUIRED - unused >= BUILT_ON
    assert {_module(package) for package in REQUIRED | OPTIONAL} >= IMPORTED, "all that is imported is declared"


def _reloaded() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] in ("profiler", "matplotlib", "seaborn")]


@pytest.fixture
def anew() -> Iterator[None]:
    before = {name: sys.modules.pop(name) for name in _reloaded()}
    yield
    for name in _reloaded():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("command", ["--help", "count smollm2-135m --gpu T4", "judge run", "judge run --format json"])
def test_commands_that_draw_nothing_import_no_plotting_library(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Judging needs no torch either, and writes the three files that follow from the facts."""
    judges = command.startswith("judge")
    for name in ("matplotlib", "seaborn", *(("torch",) if judges else ())):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", ["roofscope", *command.split()])
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(ROOT / "runs/reference/mistral-7b-h100-default", tmp_path / "run"))
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(SystemExit) as end:
        importlib.import_module("profiler.cli.app").main()
    assert (end.value.code or 0, bool(capsys.readouterr().out)) == (0, True)
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    derived = {"run.json", "cells.csv", "operators.csv"} if judges else set()
    assert after.keys() == before.keys()
    assert {name for name in before if after[name] != before[name]} == derived
