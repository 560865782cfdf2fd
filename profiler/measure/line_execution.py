"""Execute the line of a change as it is printed, and set everything back."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from profiler.loading.changes import Change
from profiler.patching import replace_attribute

_MODULES = ("transformers", "torchao.quantization", "torchao.prototype.quantization.int4")
"""Where the names of a line come from, besides `torch`, `transformers` and `model`."""


class _Names(dict[str, Any]):
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


class Switch:
    """A change's statement about a model, switched on and off: what it assigns is evaluated once."""

    def __init__(self, change: Change, model: Any) -> None:
        self._change, self._model = change, model
        self._names = _Names(torch=torch, model=model, dict=dict)
        self._assigned: Any = None
        self._is_evaluated = False

    @contextmanager
    def on(self) -> Iterator[dict[str, Any]]:
        """Context manager after the statement, which it undoes; yields the change's arguments of `generate`."""
        undo = self._execute()
        try:
            yield arguments_of(self._change.calling, self._model)
        finally:
            undo()

    def _execute(self) -> Callable[[], object]:
        change, names = self._change, self._names
        if change.undoing or not change.statement:
            exec(change.statement, {}, names)
            return lambda: exec(change.undoing, {}, names)
        [statement] = ast.parse(change.statement).body
        assert isinstance(statement, ast.Assign), "a statement that is no assignment names what undoes it"
        [target] = statement.targets
        assert isinstance(target, ast.Attribute)
        owner = eval(ast.unparse(target.value), {}, names)
        if not self._is_evaluated:
            self._assigned, self._is_evaluated = eval(ast.unparse(statement.value), {}, names), True
        return replace_attribute(owner, target.attr, self._assigned)


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
