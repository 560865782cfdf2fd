"""A GPU profile as values: its roofs and its measured products, attention and dispatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from profiler.facts.roofs import Ceilings
from profiler.grid.cells import Phase

PROFILE_SCHEMA = 1


@dataclass(frozen=True)
class ProductPoint:
    """A linear's product of these sizes, its weights read from where a step finds them."""

    dtype: str
    format: str
    rows: int
    in_features: int
    out_features: int
    weight_bytes: float
    seconds: float


@dataclass(frozen=True)
class AttentionPoint:
    """One layer's attention kernel."""

    dtype: str
    batch: int
    query: int
    keys: int
    query_heads: int
    kv_heads: int
    head_dim: int
    seconds: float


@dataclass(frozen=True)
class DispatchPoint:
    """What the host spends on a step of a standard model, a layer."""

    dtype: str
    phase: Phase
    batch_size: int
    layer_s: float
    in_kernels_s: float
    """The part of it that products and attention pay when they run alone."""


@dataclass(frozen=True)
class SmallPoint:
    """A layer's small kernels (norms, activations, casts) in a prefill of a standard model, run without its products
    and attention."""

    dtype: str
    traffic_s: float
    """What the bytes that they hand to each other would take from memory, by their count."""
    seconds: float
    """What they take beyond their dispatch."""


@dataclass(frozen=True)
class CardProfile:
    """What a forecast needs of a card, measured without a model."""

    schema_version: int
    roofscope: str
    created: str
    name: str
    kind: str
    threads: int
    compute_capability: str
    memory_bytes: int
    last_level_cache_bytes: int
    software: Mapping[str, str]
    ceilings: Ceilings
    products: tuple[ProductPoint, ...]
    attentions: tuple[AttentionPoint, ...]
    dispatches: tuple[DispatchPoint, ...]
    smalls: tuple[SmallPoint, ...] = ()
    """Of a CPU; a card's take the least time of a kernel by their number."""
    datasheet: str | None = None

    @property
    def overlaps(self) -> bool:
        return self.kind == "cuda"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What it has products of."""
        return tuple(dict.fromkeys(point.dtype for point in self.products if point.format == "dense"))


def least_of(passes: Sequence[CardProfile]) -> CardProfile:
    """Of several profiles of one machine each kernel and each dispatch in its least time: a neighbour makes none
    faster."""
    return replace(
        passes[0],
        products=fastest_points(point for one in passes for point in one.products),
        attentions=fastest_points(point for one in passes for point in one.attentions),
        dispatches=fastest_points(point for one in passes for point in one.dispatches),
        smalls=fastest_points(point for one in passes for point in one.smalls),
    )


_Point = TypeVar("_Point", ProductPoint, AttentionPoint, DispatchPoint, SmallPoint)
_MEASURED = ("seconds", "layer_s", "in_kernels_s")
"""What a pass measures of a point; all else says what the point is."""


def fastest_points(points: Iterable[_Point]) -> tuple[_Point, ...]:
    """Each point once, in its least time."""
    found: dict[tuple[object, ...], tuple[float, _Point]] = {}
    for point in points:
        values = asdict(point)
        seconds, *_ = [values.pop(name) for name in _MEASURED if name in values]
        shape = tuple(values.values())
        if shape not in found or seconds < found[shape][0]:
            found[shape] = seconds, point
    return tuple(point for _, point in found.values())
