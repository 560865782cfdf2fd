"""A device profile and its file: roofs, and times of products, attention and dispatch; roofs of any GPU by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from profiler.counting.floor import RoofSet
from profiler.data.datasheets import PEAK_DTYPES, Datasheet, gpu_called
from profiler.data.room import idle_room_bytes
from profiler.errors import RequestError
from profiler.facts.roofs import Ceilings
from profiler.grid.cells import Phase
from profiler.units import visible_in

PROFILE_SCHEMA = 1


@dataclass(frozen=True)
class ProductPoint:
    """Seconds of a linear's product of these sizes, with its weights read from memory as in a step."""

    dtype: str
    format: str
    rows: int
    in_features: int
    out_features: int
    weight_bytes: float
    seconds: float


@dataclass(frozen=True)
class AttentionPoint:
    """Seconds of one layer's attention kernel."""

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
    """The host's seconds per layer for a step of a standard model."""

    dtype: str
    phase: Phase
    batch_size: int
    layer_s: float
    in_kernels_s: float
    """The part of `layer_s` that products and attention also pay when they run in isolation."""


@dataclass(frozen=True)
class SmallPoint:
    """One layer's small kernels (norms, activations, casts) in a prefill of a standard model.

    They are run without its products and attention.
    """

    dtype: str
    traffic_s: float
    """Counted bytes between these kernels over the memory bandwidth, in seconds."""
    seconds: float
    """Their measured time beyond dispatch."""


@dataclass(frozen=True)
class GpuProfile:
    """The measurements of a device that forecasts need; they involve no particular model."""

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
    """Only for a CPU; on a GPU, small kernels take the shortest kernel time each."""
    datasheet: str | None = None

    @property
    def room_bytes(self) -> int:
        """The bytes that a model may take of its memory if nothing else runs there (`data.room`)."""
        return idle_room_bytes(self.kind, self.memory_bytes)

    @property
    def overlaps(self) -> bool:
        return self.kind == "cuda"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes with dense products."""
        return tuple(dict.fromkeys(point.dtype for point in self.products if point.format == "dense"))


def least_of(passes: Sequence[GpuProfile]) -> GpuProfile:
    """Combine profiles of one machine: each kernel and dispatch in its least time, since contention only adds time."""
    points: dict[str, Any] = {
        name: fastest_points(point for profile in passes for point in getattr(profile, name))
        for name in ("products", "attentions", "dispatches", "smalls")
    }
    return replace(passes[0], **points)


_Point = TypeVar("_Point", ProductPoint, AttentionPoint, DispatchPoint, SmallPoint)
_MEASURED = ("seconds", "layer_s", "in_kernels_s")
"""The measured fields of points; all other fields identify a point."""


def fastest_points(points: Iterable[_Point]) -> tuple[_Point, ...]:
    """Return each point once, with its least time."""
    fastest: dict[tuple[object, ...], tuple[float, _Point]] = {}
    for point in points:
        values = asdict(point)
        seconds, *_ = [values.pop(name) for name in _MEASURED if name in values]
        shape = tuple(values.values())
        if shape not in fastest or seconds < fastest[shape][0]:
            fastest[shape] = seconds, point
    return tuple(point for _, point in fastest.values())


_ADAPTER = TypeAdapter(GpuProfile)
_NO_SAMPLES: Any = {"__all__": {"seconds"}}
_LEFT_OUT: Any = {"ceilings": {**dict.fromkeys(("compute", "memory", "links"), _NO_SAMPLES), "host": {"seconds"}}}


def profile_json(profile: GpuProfile) -> str:
    """The JSON text of a profile, without samples, which keeps the file small enough to share."""
    return _ADAPTER.dump_json(profile, indent=1, exclude=_LEFT_OUT).decode() + "\n"


def read_profile(path: Path) -> GpuProfile:
    """Read a profile. Raises RequestError if the file is missing, is not a profile, or has another schema version."""
    try:
        content = visible_in(json.loads(path.read_text(encoding="utf-8")))
    except OSError:
        raise RequestError(f"there is no profile at {path}; make one: `roofscope ceilings --out {path}`.") from None
    except (ValueError, RecursionError):
        raise RequestError(f"{path} is not a profile: it is not JSON.") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != PROFILE_SCHEMA:
        problem = f"has version {version}, not {PROFILE_SCHEMA}" if version else "is not a profile"
        raise RequestError(f"{path} {problem}; measure the device again: `roofscope ceilings --out {path}`.")
    try:
        return _ADAPTER.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise RequestError(f"{path} is a damaged profile: {key}: {first['msg']}.") from None


def roofs_called(name: str) -> RoofSet:
    """Return the roofs of a GPU by its datasheet's name, or of a profile by its path.

    Raises RequestError for an unknown name.
    """
    if name.endswith(".json"):
        profile = read_profile(Path(name))
        return RoofSet.measured(profile.name, profile.ceilings, profile.room_bytes)
    return datasheet_roofs(gpu_called(name))


def datasheet_roofs(sheet: Datasheet, gpus: int = 1) -> RoofSet:
    """Return the dense peaks and the bandwidth of a datasheet; of several GPUs, those of all of them together."""
    peaks = {dtype: gpus * peak for dtype in PEAK_DTYPES if (peak := sheet.peak_flops_per_s(dtype))}
    return RoofSet(
        f"{sheet.gpu if gpus == 1 else f'{gpus} x {sheet.gpu}'}, datasheet",
        gpus * sheet.bandwidth_bytes_per_s,
        peaks,
        gpus * sheet.room_bytes,
        sheet.fuses_grouped_heads,
        {sheet.sustained_dtype: gpus * held} if (held := sheet.sustained_flops_per_s) else {},
    )
