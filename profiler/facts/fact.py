"""The base class of facts: each has a name on disk and a rule for merging it with earlier facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from profiler.facts.merged import MergedFacts


class Fact:
    """A measured value of a run, stored as one line of samples.jsonl.

    `class Warmth(Fact, kind="warmth")` is enough for a new fact: it is stored and read as `warmth`, and
    `facts.latest(Warmth)` and `facts.every(Warmth)` return it. A fact that is looked up by cell overrides `merge_into`.
    """

    __slots__ = ()
    KIND: ClassVar[str]
    kinds: ClassVar[dict[str, type[Fact]]] = {}
    """All classes of facts by their names on disk."""

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.KIND = kind or cls.KIND  # a dataclass with slots is a second class, made without the keyword
        Fact.kinds[cls.KIND] = cls

    def merge_into(self, merged: MergedFacts) -> None:
        """Add this fact to the earlier ones."""
        merged.others.setdefault(type(self), []).append(self)
