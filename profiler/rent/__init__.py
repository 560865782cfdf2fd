"""`rent`: which GPU to rent for a model, and what a million tokens cost there."""

from typing import TYPE_CHECKING, Any

from profiler.rent.options import RentOptions

if TYPE_CHECKING:
    from profiler.rent.command import rent
    from profiler.rent.text import rent_sentences

__all__ = ["RentOptions", "rent", "rent_sentences"]

_HOMES = {"rent": "command", "rent_sentences": "text"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `roofscope --help` does not wait for numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'profiler.rent' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"profiler.rent.{_HOMES[name]}"), name)
