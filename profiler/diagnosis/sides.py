"""One side of a comparison: what was asked, what it took, and everything that two sides may differ in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from profiler.grid import PHASES, Phase
from profiler.roofs.values import Look

Weight = Literal["refuses", "explains", "context"]
"""What a difference means: the two are not to be compared, it may explain a change, or it hardly matters."""

PROCESSOR, NOT_TOLD = "processor", "not told"
"""A CPU's family and model, which older runs do not tell: several have one name, such as AMD EPYC."""

_REFUSING = ("model", "parameters", "architecture", "device", PROCESSOR)
_CONTEXT = ("memory", "budget")
# Clocks of one card differ by a few MHz from look to look.
_CLOCK_TOLERANCE = 0.02


class Asked(NamedTuple):
    """What was asked for: never a column that the number of new tokens shifts."""

    phase: Phase
    batch_size: int
    prompt_len: int
    context_len: int
    """Cached tokens before the step: 0 where a prompt was prefilled."""
    engine: str = ""
    """Empty where the sides have no engine in common."""
    settings: tuple[tuple[str, str], ...] = ()
    """What else tells cells of one side apart, by name: another tool's file may hold a sweep of threads."""

    @property
    def depth(self) -> int:
        """Tokens in the cache when decoding begins, or the prompt."""
        return self.prompt_len or self.context_len

    @property
    def name(self) -> str:
        """`decode 1 x 512 (static)`, `decode 1 x 512, threads 2`."""
        engine = f" ({self.engine})" if self.engine not in ("", "eager") else ""
        settings = "".join(f", {name} {value}" for name, value in self.settings)
        return f"{self.phase} {self.batch_size} x {self.depth}{engine}{settings}"


@dataclass(frozen=True, slots=True)
class Timed:
    """One cell's time on one side."""

    median_s: float
    low_s: float
    high_s: float
    """Its 95 % interval; the median itself, twice, where nothing is known of its spread."""
    visits: int
    """0 where another tool's file does not tell how often it was measured, or how far that lay apart."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """The split in seconds; empty where it is not known."""
    half_widths_s: Mapping[str, float] = field(default_factory=dict)
    drift: float = 0.0
    """One standard deviation of what all cells of the run did together, as a share: more cells do not average it."""
    visit_s: float = 0.0
    """Wall seconds of one visit."""
    foreign_cores: float = 0.0
    """CPU cores that others kept busy meanwhile."""


@dataclass(frozen=True)
class Witness:
    """What one run knows of its machine, apart from its cells: the roofs and the same small work again and again."""

    memory_bytes_per_s: float
    memory_half_width: float
    compute_flops_per_s: float
    compute_half_width: float
    roofs_at_unix_s: float
    """When the roofs were measured: two runs of a day may share them."""
    looks: tuple[Look, ...] = ()


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a run folder, or a file of another tool."""

    name: str
    created: str
    tool: str
    settings: Mapping[str, str]
    """Everything that two sides may differ in, by name, the most telling first."""
    cells: Mapping[Asked, Timed]
    clock_hz: float | None = None
    witness: Witness | None = None
    is_cpu: bool = True

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines of its cells, in their order."""
        return tuple(dict.fromkeys(asked.engine for asked in self.cells))


@dataclass(frozen=True)
class Difference:
    """Something that is not the same on both sides."""

    name: str
    before: str
    after: str
    weight: Weight

    @property
    def words(self) -> str:
        """`transformers 5.22.0 -> 5.23.0`."""
        return f"{self.name} {self.before} -> {self.after}"


def differences(before: Side, after: Side) -> tuple[Difference, ...]:
    """What is not the same on both sides: what refuses a comparison first, then what may explain a change."""
    found = [
        _difference(name, before.settings[name], after.settings[name])
        for name in before.settings
        if name in after.settings and before.settings[name] != after.settings[name]
    ]
    if before.clock_hz and after.clock_hz and abs(after.clock_hz / before.clock_hz - 1) > _CLOCK_TOLERANCE:
        found.append(Difference("clock", _mhz(before.clock_hz), _mhz(after.clock_hz), "explains"))
    order = ("refuses", "explains", "context")
    return tuple(sorted(found, key=lambda item: order.index(item.weight)))


def _difference(name: str, before: str, after: str) -> Difference:
    weight: Weight = "context" if name in _CONTEXT else "explains"
    if name in _REFUSING and NOT_TOLD not in (before, after):
        weight = "refuses"
    return Difference(name, before, after, weight)


def _mhz(clock_hz: float) -> str:
    return f"{clock_hz / 1e6:.0f} MHz"


def aligned(sides: Sequence[Side]) -> list[Mapping[Asked, Timed]]:
    """The cells of each side by keys that all of them share.

    Where no engine is common, as for two tools, each side stands with its first one. Other tools know no difference
    between a cache that a prompt has filled and one that was filled directly: with one of them, depth alone counts.
    Settings that differ within one side tell the cells of all of them apart.
    """
    common = set.intersection(*(set(side.engines) for side in sides))
    by_depth = len({side.tool for side in sides}) > 1 or any(side.tool != "roofscope" for side in sides)
    swept = tuple(dict.fromkeys(name for side in sides for asked in side.cells for name, _ in asked.settings))
    return [dict(_keyed(side, bool(common), by_depth, swept)) for side in sides]


def _keyed(side: Side, by_engine: bool, by_depth: bool, swept: Sequence[str]) -> Iterator[tuple[Asked, Timed]]:
    engines = side.engines if by_engine else side.engines[:1]
    for asked, timed in side.cells.items():
        if asked.engine not in engines:
            continue
        prompted = asked._replace(prompt_len=asked.depth, context_len=0)
        # Where this side has both of one depth, the one that was filled directly stays what it is.
        if by_depth and asked.phase == "decode" and prompted not in side.cells:
            asked = prompted
        if swept:
            told = {**side.settings, **dict(asked.settings)}
            asked = asked._replace(settings=tuple((name, told.get(name, NOT_TOLD)) for name in swept))
        yield asked if by_engine else asked._replace(engine=""), timed


def in_order(keys: Sequence[Asked]) -> list[Asked]:
    """By phase, engine, batch and depth, as a table's rows stand."""
    return sorted(keys, key=lambda key: (PHASES.index(key.phase), key.engine, key.batch_size, key.depth, key.settings))
