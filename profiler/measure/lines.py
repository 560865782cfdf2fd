"""Execute the line of a change as it is printed, and set everything back."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from profiler.loading.changes import Change

_MODULES = ("transformers", "torchao.quantization", "torchao.prototype.quantization.int4")
"""Where the names of a line come from, besides `torch`, `transformers` and `model`."""


class _Names(dict[str, Any]):
    """The names that a line may use."""

    def __missing__(self, name: str) -> Any:
        for module in _MODULES:
            if module == name or hasattr(import_module(module), name):
                found = import_module(module)
                return found if module == name else getattr(found, name)
        raise KeyError(name)


def arguments_of(text: str, model: Any = None) -> dict[str, Any]:
    """Return the arguments that a line passes: `dtype=torch.bfloat16` is `{"dtype": torch.bfloat16}`."""
    arguments: dict[str, Any] = eval(f"dict({text})", {}, _Names(torch=torch, model=model, dict=dict))
    return arguments


@contextmanager
def executed(change: Change, model: Any) -> Iterator[dict[str, Any]]:
    """Context manager after a change's statement; yields its arguments of `generate`, and undoes the statement."""
    names = _Names(torch=torch, model=model, dict=dict)
    undo = _undoing(change, names)
    if change.statement:
        exec(change.statement, {}, names)
    try:
        yield arguments_of(change.calling, model)
    finally:
        undo()


def _undoing(change: Change, names: _Names) -> Callable[[], object]:
    """Return a function that undoes a change's statement, which has not been executed yet."""
    if change.undoing:
        return lambda: exec(change.undoing, {}, names)
    statement = ast.parse(change.statement).body
    if not statement:
        return lambda: None
    assert isinstance(statement[0], ast.Assign), "a statement that is no assignment names what undoes it"
    [target] = statement[0].targets
    assert isinstance(target, ast.Attribute)
    owner, name = eval(ast.unparse(target.value), {}, names), target.attr
    if name not in vars(owner):
        return lambda: delattr(owner, name)
    before = vars(owner)[name]
    return lambda: setattr(owner, name, before)


@contextmanager
def attributes_kept(model: Any) -> Iterator[None]:
    """Context manager after which a model has the attributes that it had before, such as no cache and compiled code."""
    before = dict(vars(model))
    try:
        yield
    finally:
        for name in vars(model).keys() - before.keys():
            delattr(model, name)
        vars(model).update(before)
