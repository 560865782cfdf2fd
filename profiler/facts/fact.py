"""The base class of facts, which have a name on disk and a rule for merging; and all facts of a run, merged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from profiler.grid.cells import Cell, CellKey, Phase

if TYPE_CHECKING:
    from profiler.facts.ceilings import CeilingsRemeasured, DriftReading
    from profiler.facts.measurements import Activity, ForecastTime, GenerateSteps, HookedStep, Replay, Trial
    from profiler.facts.overhead import Overhead
    from profiler.facts.repetitions import Gap, Repetition
    from profiler.facts.telemetry import Reading


class Fact:
    """A measured value of a run, stored as one line of samples.jsonl.

    `class Warmth(Fact, kind="warmth")` is enough for a new fact: it is stored and read as `warmth`, and
    `facts.latest(Warmth)` and `facts.every(Warmth)` return it. With `into="warmth"`, it is an element of that list of
    `MergedFacts`, or the value of its key or cell in that mapping. Other facts override `merge_into`. A kind is never
    renamed, since folders of all versions have it.
    """

    __slots__ = ()
    KIND: ClassVar[str]
    INTO: ClassVar[str] = "others"
    kinds: ClassVar[dict[str, type[Fact]]] = {}
    """All classes of facts by their names on disk."""

    def __init_subclass__(cls, kind: str = "", into: str = "") -> None:
        # A dataclass with slots is a second class, made without the keywords.
        cls.KIND, cls.INTO = kind or cls.KIND, into or cls.INTO
        Fact.kinds[cls.KIND] = cls

    def merge_into(self, merged: MergedFacts) -> None:
        """Add this fact to the earlier ones."""
        place: Any = getattr(merged, self.INTO)
        if place is merged.others:
            place.setdefault(type(self), []).append(self)
        elif isinstance(place, list):
            place.append(self)
        else:
            own: Any = self
            place[own.key if hasattr(own, "key") else own.cell] = self


F = TypeVar("F", bound=Fact)


@dataclass(frozen=True)
class MergedFacts:
    """All facts of a run so far, whether read from a folder or just measured."""

    predicted_peak_bytes: dict[Cell, int] = field(default_factory=dict)
    overhead: dict[tuple[str, Phase, int], Overhead] = field(default_factory=dict)
    """By engine, phase and batch size; empty if not measured."""
    generate_steps: dict[Cell, GenerateSteps] = field(default_factory=dict)
    repetitions: dict[Cell, list[Repetition]] = field(default_factory=dict)
    gaps: dict[Cell, Gap] = field(default_factory=dict)
    forecasts: dict[CellKey, ForecastTime] = field(default_factory=dict)
    drift_readings: list[DriftReading] = field(default_factory=list)
    remeasured_ceilings: list[CeilingsRemeasured] = field(default_factory=list)
    """The ceilings at the end of the run (of each part of a resumed one); empty in runs of older versions."""
    readings: list[Reading] = field(default_factory=list)
    replays: dict[CellKey, dict[str, Replay]] = field(default_factory=dict)
    """By cell and operator."""
    hooked: dict[CellKey, HookedStep] = field(default_factory=dict)
    activity: dict[CellKey, Activity] = field(default_factory=dict)
    trials: dict[CellKey, list[Trial]] = field(default_factory=dict)
    others: dict[type[Fact], list[Fact]] = field(default_factory=dict)
    """Facts whose class has no merge rule, in the order of measurement."""

    def every(self, kind: type[F]) -> list[F]:
        """Return all facts of a class without a merge rule, in the order of measurement."""
        return cast(list[F], self.others.get(kind, []))

    def latest_by(self, kind: type[F], name: str) -> tuple[F, ...]:
        """Return the last fact of a class for each value of its field `name`, in order of first appearance."""
        return tuple({getattr(fact, name): fact for fact in self.every(kind)}.values())

    def latest(self, kind: type[F]) -> F | None:
        """Return the last fact of a class; None without one."""
        return next(reversed(self.every(kind)), None)
