"""Expressions of a step's fields (batch, query, context), traced from the operators' own formulas.

An operator's formula runs once on symbols instead of numbers. Arithmetic and NumPy's functions on a symbol build an
expression, which a page evaluates for any of their values.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from profiler.facts.step import Step

Tree = int | float | bool | str | list[Any]
"""An expression as JSON: a number, the name of a symbol, or [operation, argument, ...], as theory.js computes it."""

_UFUNCS = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "floor_divide": "//",
    "power": "**",
    "minimum": "min",
    "maximum": "max",
    "greater": ">",
    "greater_equal": ">=",
    "less": "<",
    "less_equal": "<=",
    "equal": "==",
    "bitwise_or": "or",
    "bitwise_and": "and",
    "logical_or": "or",
    "logical_and": "and",
    "invert": "not",
    "logical_not": "not",
}


class Expression(NDArrayOperatorsMixin):
    """An operation on numbers and symbols that has not been evaluated."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **_: Any) -> Any:
        if method != "__call__" or ufunc.__name__ not in _UFUNCS:
            return NotImplemented
        return _apply(_UFUNCS[ufunc.__name__], *inputs)

    def __array_function__(self, function: Any, _types: Any, arguments: Any, _keywords: Any) -> Any:
        if function is np.where:
            return _apply("where", *arguments)
        if function is np.clip:
            value, low, high = arguments
            return _apply("min", _apply("max", value, low), high)
        return NotImplemented

    def __bool__(self) -> bool:
        raise TypeError("an expression has no truth value before it is evaluated; compare with NumPy's functions")

    __hash__ = object.__hash__  # the mixin compares, so it leaves none


def _apply(operation: str, *arguments: Any) -> Any:
    """Return an expression, or a number where the result depends on no expression."""
    plain = [_plain(argument) for argument in arguments]
    if operation == "*" and any(_is(argument, 0) for argument in plain):
        return 0
    if operation == "-" and _is(plain[1], 0):
        return plain[0]
    for neutral, unit in (("*", 1), ("+", 0)):
        if operation == neutral and any(_is(argument, unit) for argument in plain):
            return next(argument for argument in plain if not _is(argument, unit))
    return Expression([operation, *map(tree_of, plain)])


def _plain(argument: Any) -> Any:
    """NumPy wraps a symbol, or a number, in an array without dimensions."""
    return argument.item() if isinstance(argument, np.generic | np.ndarray) else argument


def _is(argument: Any, number: int) -> bool:
    return not isinstance(argument, Expression) and bool(argument == number)


def tree_of(value: Any) -> Tree:
    """Return a traced value as JSON."""
    plain = _plain(value)
    tree: Tree = plain.tree if isinstance(plain, Expression) else plain
    return tree


def symbolic_step() -> Step:
    """Return a step of symbols with the names of its fields, which have no values to check."""
    step = object.__new__(Step)
    for item in fields(Step):
        object.__setattr__(step, item.name, Expression(item.name))
    return step


def symbolic_prefill() -> Step:
    """Return a prefill of the symbols `batch` and `query` after a prefix of the symbol `shared`."""
    step = symbolic_step()
    object.__setattr__(step, "context", step.shared)
    return step
