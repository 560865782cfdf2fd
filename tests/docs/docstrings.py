"""The texts below attributes and constants, which Python itself does not keep."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
import types


def one_line(text: str | None) -> str:
    """Return a text without line ends."""
    return " ".join((text or "").split())


def attribute_docs(kind: type) -> dict[str, str]:
    """Return the text below each attribute of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("profiler"):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for item, after in itertools.pairwise(body.body):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(after, ast.Expr):
                found[item.target.id] = one_line(ast.literal_eval(after.value))
    return found


def constant_docs(module: types.ModuleType) -> dict[str, str]:
    """Return the text below each constant of a module."""
    body = ast.parse(inspect.getsource(module)).body
    return {
        item.targets[0].id: one_line(after.value.value)
        for item, after in itertools.pairwise(body)
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }
