"""Coverage of the profiler's `except` clauses: code compiled in at import records each clause that runs."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOMS = ("device", "roofs", "measure", "engines", "loading")
_FILES = (
    "errors.py", "run/pipeline.py", "run/setup.py", "run/measure.py", "run/cold_start.py", "run/stages.py",
    "store/writer.py", "cli/app.py", "cli/run.py", "quant/storage.py",
)  # fmt: skip
_HOOK = "__roofscope_clause__"

reached: set[str] = set()
"""Clauses reached in this process, as `file:line`."""


def clauses(root: Path) -> list[str]:
    """Return every `except` clause of a package, in order."""
    names = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                names.append(f"{path.relative_to(root)}:{node.lineno}")
    return sorted(names)


def faces_device(clause: str) -> bool:
    """Return whether a clause is in a module where a device can fail."""
    file = clause.partition(":")[0]
    return file in _FILES or file.split("/")[0] in _ROOMS


def watch(package: str = "profiler") -> None:
    """Make each module of a package that is imported later record the clauses that it reaches."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    sys.meta_path.insert(0, _Finder(package, Path(spec.origin).parent))


class _Finder(importlib.machinery.PathFinder):
    def __init__(self, package: str, root: Path) -> None:
        self._package = package
        self._root = root

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:  # type: ignore[override]
        if name.split(".")[0] != self._package:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path or [str(self._root.parent)], target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin, self._root)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, origin: str, root: Path) -> None:
        super().__init__(name, origin)
        self._file = str(Path(origin).relative_to(root))

    def get_code(self, fullname: str) -> Any:
        """Compile from the source: a cached file does not record clauses."""
        path = self.get_filename(fullname)
        tree = _Telling(self._file).visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _HOOK, reached.add)
        super().exec_module(module)


class _Telling(ast.NodeTransformer):
    def __init__(self, file: str) -> None:
        self._file = file

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        self.generic_visit(node)
        name = ast.copy_location(ast.Name(_HOOK, ast.Load()), node.body[0])
        record = ast.Call(name, [ast.Constant(f"{self._file}:{node.lineno}")], [])
        node.body.insert(0, ast.copy_location(ast.Expr(record), node.body[0]))
        return node
