"""The base class of facts: each declares its kind on disk and how it joins the facts before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from profiler.facts.merged import MergedFacts


class Fact:
    """A value that a run measures; samples.jsonl keeps each as one line.

    `class Warmth(Fact, kind="warmth")` is all that a new fact costs: it is stored and read as `warmth`, and
    `facts.latest(Warmth)` and `facts.every(Warmth)` find it. One that is looked up by cell overrides `merge_into`.
    """

    __slots__ = ()
    KIND: ClassVar[str]
    kinds: ClassVar[dict[str, type[Fact]]] = {}
    """Every kind of fact by its name on disk."""

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.KIND = kind or cls.KIND  # a dataclass with slots is a second class, made without the keyword
        Fact.kinds[cls.KIND] = cls

    def merge_into(self, merged: MergedFacts) -> None:
        """Join the facts that came before."""
        merged.others.setdefault(type(self), []).append(self)
