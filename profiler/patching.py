"""Replace attributes of other objects and global switches, and restore them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

_T = TypeVar("_T")


def replace_attribute(owner: object, name: str, value: object) -> Callable[[], None]:
    """Set an attribute of a module, a class or an object, and return a function that restores it."""
    restore = functools.partial(delattr, owner, name)
    if name in vars(owner):
        restore = functools.partial(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)
    return restore


@contextmanager
def switched(switch: Callable[[_T], object], to: _T, back: _T) -> Iterator[None]:
    """Context manager that begins with `switch(to)` and ends with `switch(back)`."""
    switch(to)
    try:
        yield
    finally:
        switch(back)


@contextmanager
def patched(owner: object, **attributes: object) -> Iterator[None]:
    """Context manager in which an object has other attributes."""
    with ExitStack() as undo:
        for name, value in attributes.items():
            undo.callback(replace_attribute(owner, name, value))
        yield
