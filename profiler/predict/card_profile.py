"""A GPU profile: its roofs and the efficiency of products, attention and dispatch, and times from it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from profiler.counting.floor import floor_s
from profiler.errors import RequestError, near_misses
from profiler.facts.card_profile import PROFILE_SCHEMA, AttentionPoint, CardProfile, ProductPoint
from profiler.facts.dispatch import Dispatch
from profiler.facts.roofs import Ceilings
from profiler.grid.cells import PHASES, Phase
from profiler.predict.cross_validation import HeldOut
from profiler.predict.interpolation import Line, Surface, line, surface
from profiler.predict.kernel_times import DeviceRates
from profiler.predict.operator_arrays import Array, OperatorColumn, StepArrays
from profiler.predict.predict import Fitted
from profiler.units import visible_in

_SAMPLING = 0.02
"""How well the median of a few dozen calls is known, as a share."""
_NS = 1e9
_OCTAVES_OF_WIDTH = 0.5
"""A doubling of a width changes a kernel's share of its roof about half as much as a doubling of rows does."""


@dataclass(frozen=True)
class Reached:
    """What kernels of a kind take of what they would: the log of their time over roof and least time."""

    surface: Surface
    least_s: float
    """The shortest that one of them took: its call, or its launch."""

    def seconds(self, sizes: Array, roof_s: Array) -> Array:
        """Seconds at these sizes, never below the roof; beyond the sizes that were measured the share stays."""
        return np.asarray(np.maximum(roof_s, np.exp(self.surface.level(sizes)) * (roof_s + self.least_s)))


def _reached(sizes: Array, seconds: Array, roof_s: Array, least_s: float) -> Reached:
    ratios = np.log(seconds / (roof_s + least_s))
    return Reached(surface(sizes, ratios, np.full(len(seconds), _SAMPLING)), least_s)


@dataclass(frozen=True)
class Products:
    """What products take over their roof: the log of it, over widths at each number of rows that was measured.

    A library may take another kernel for two rows than for one (MKL's float32 ones lost 63 ms of a decode step of
    SmolLM2-135M to two rows, 30 to one and 48 to four): nothing is smoothed over rows, and between two numbers of rows
    the line is straight.
    """

    by_rows: Mapping[int, Surface]
    measured: Mapping[tuple[int, int, int], float]
    """By rows, in and out features: as they were measured. A library has kernels for some widths, and a surface takes
    what is one width's own for noise."""

    def log_ratio(self, rows: Array, in_features: int, out_features: int) -> Array:
        """At these rows [n]; beyond those that were measured it stays."""
        at = _widths(in_features, out_features)
        known = sorted(self.by_rows)
        ratios = [
            self.measured.get((count, in_features, out_features), float(self.by_rows[count].level(at)[0]))
            for count in known
        ]
        return np.asarray(np.interp(np.log2(np.maximum(rows, 1)), np.log2(known), ratios))

    def sigma(self, rows: int, in_features: int, out_features: int) -> float:
        """How far off the log may be at rows that were measured."""
        return float(self.by_rows[rows].value(_widths(in_features, out_features))[1][0])


@dataclass(frozen=True)
class ProfileKernels:
    """The kernels of a model on a profiled card: shares of the roof over rows and widths."""

    ceilings: Ceilings
    products: Mapping[tuple[str, str], Products]
    """By dtype and format."""
    attentions: Mapping[str, Reached]
    """By dtype: over batch, queries, keys and heads."""
    layers: int
    """Of the model that is forecast."""
    least_small_s: float = 0.0
    """Seconds that the small kernels of a step take at least, by their number; 0 on a CPU, where that is dispatch."""
    small: Line | None = None
    """What those of a layer take over their traffic, over that traffic; None where they were not run alone."""

    def small_s(self, steps: StepArrays, traffic_s: Array, from_memory_s: Array) -> Array:
        """Their traffic, or the time that their number takes; in a prefill as they were when they were run alone."""
        if self.small is None:
            return np.maximum(self.least_small_s, traffic_s)
        alone_s = np.exp(self.small.log_ratio(_NS * from_memory_s / self.layers)) * from_memory_s
        return np.where(steps.prefill, alone_s, traffic_s)

    def seconds(self, column: OperatorColumn, steps: StepArrays, roof_s: Array) -> Array | None:
        """Seconds of one instance at each step; None for what was not profiled.

        All were measured with operands from memory. A cache that holds a model's spares it the traffic, not what its
        kernels lose besides: a 4-bit kernel unpacks no faster there.
        """
        memory_s = column.model_bytes / self.ceilings.memory_bytes_per_s
        from_memory_s = np.maximum(column.flops / self.ceilings.compute_flops_per_s(column.dtype), memory_s)
        from_memory_s = from_memory_s / column.count
        if column.heads is not None:
            known = self.attentions.get(column.dtype)
            if known is None:
                return None
            heads = np.full(len(steps), column.heads.query_heads * column.heads.head_dim)
            alone_s = known.seconds(_sizes(steps.batch, steps.query, steps.depth, heads), from_memory_s)
        else:
            if column.shape is None:
                return None
            own = self.products.get((column.dtype, column.shape.format)) or self.products.get((column.dtype, "dense"))
            if own is None:
                return None
            log_ratio = own.log_ratio(column.rows, column.shape.in_features, column.shape.out_features)
            alone_s = np.exp(log_ratio) * from_memory_s
        return np.asarray(roof_s + np.maximum(0.0, alone_s - from_memory_s))

    def converting_s(self, column: OperatorColumn, steps: StepArrays, roof_s: Array) -> Array:
        """Conversions are inside of a format's products."""
        return np.zeros(len(steps))


def kernels_of(profile: CardProfile, dtype: str, layers: int) -> ProfileKernels:
    """The surfaces through all points of a profile, for a model of so many layers."""
    ceilings = profile.ceilings
    products = {
        key: _products_reached([point for point in profile.products if (point.dtype, point.format) == key], ceilings)
        for key in dict.fromkeys((point.dtype, point.format) for point in profile.products)
    }
    attentions = {
        kind: _attentions_reached([point for point in profile.attentions if point.dtype == kind], ceilings)
        for kind in dict.fromkeys(point.dtype for point in profile.attentions)
    }
    least_s = layers * _SMALL_KERNELS * ceilings.launch.get("device_s", 0.0)
    return ProfileKernels(ceilings, products, attentions, layers, least_s, _smalls(profile, dtype))


def _smalls(profile: CardProfile, dtype: str) -> Line | None:
    points = [point for point in profile.smalls if point.dtype == dtype]
    if not points:
        return None
    traffic_s, seconds = (np.array([getattr(point, name) for point in points]) for name in ("traffic_s", "seconds"))
    return line(_NS * traffic_s, seconds, traffic_s)


def _products_reached(points: Sequence[ProductPoint], ceilings: Ceilings) -> Products:
    by_rows: dict[int, list[ProductPoint]] = {}
    for point in points:
        by_rows.setdefault(point.rows, []).append(point)
    measured = {(point.rows, point.in_features, point.out_features): _log_ratio(point, ceilings) for point in points}
    return Products({rows: _over_widths(some, ceilings) for rows, some in by_rows.items()}, measured)


def _over_widths(points: Sequence[ProductPoint], ceilings: Ceilings) -> Surface:
    at = np.concatenate([_widths(point.in_features, point.out_features) for point in points])
    ratios = np.array([_log_ratio(point, ceilings) for point in points])
    return surface(at, ratios, np.full(len(points), _SAMPLING))


def _log_ratio(point: ProductPoint, ceilings: Ceilings) -> float:
    return math.log(point.seconds / _product_roof_s(point, ceilings))


def _product_roof_s(point: ProductPoint, ceilings: Ceilings) -> float:
    flops = 2.0 * point.rows * point.in_features * point.out_features
    return floor_s(flops, point.weight_bytes, ceilings.compute_flops_per_s(point.dtype), ceilings.memory_bytes_per_s)


def _attentions_reached(points: Sequence[AttentionPoint], ceilings: Ceilings) -> Reached:
    shapes = [(point.batch, point.query, point.keys, point.query_heads * point.head_dim) for point in points]
    seconds, roofs = ([point.seconds for point in points], [_attention_roof_s(point, ceilings) for point in points])
    return _reached(_sizes(*np.array(shapes).T), np.array(seconds), np.array(roofs), min(seconds))


def _attention_roof_s(point: AttentionPoint, ceilings: Ceilings) -> float:
    """As a core is counted: the exact triangle's FLOPs, the cache read and the new tokens written once."""
    past = point.keys - point.query
    pairs = point.batch * (point.query * past + point.query * (point.query + 1) // 2)
    flops = 4.0 * point.query_heads * point.head_dim * pairs
    itemsize = 4 if point.dtype == "float32" else 2
    nbytes = point.batch * point.keys * 2 * point.kv_heads * point.head_dim * itemsize
    return floor_s(flops, nbytes, ceilings.compute_flops_per_s(point.dtype), ceilings.memory_bytes_per_s)


def _widths(in_features: int, out_features: int) -> Array:
    """[1, 2]"""
    return np.asarray(_OCTAVES_OF_WIDTH * np.log2([[float(in_features), float(out_features)]]))


def _sizes(*columns: Array) -> Array:
    return np.log2(np.stack(columns, axis=1).astype(np.float64))


def fitted_on(profile: CardProfile, dtype: str, layers: int) -> Fitted:
    """A model of so many layers on a profiled card: its split's terms, with nothing learnt from a run of it."""
    dispatch: dict[Phase, dict[int, Dispatch]] = {phase: {} for phase in PHASES}
    near = dtype if any(point.dtype == dtype for point in profile.dispatches) else "float32"
    for point in profile.dispatches:
        if point.dtype == near:
            step = Dispatch(layers * point.layer_s, layers * point.in_kernels_s)
            dispatch[point.phase][point.batch_size] = step
    device = DeviceRates(profile.ceilings, dtype, dispatch, profile.overlaps, profile.memory_bytes)
    return Fitted(device, kernels_of(profile, dtype, layers), {})


_SMALL_KERNELS = 32
"""Kernels a layer of a dense model beside its seven products and its attention: transformers 5.23 runs some 40 a layer
(counted on fake tensors: 9 multiplications, 6 additions, 4 concatenations, 4 casts, 2 each of pow, mean, rsqrt, neg,
copies). Each takes the device at least as long as a tiny one does in a replayed graph."""


def held_out_kernels(profile: CardProfile, dtype: str) -> HeldOut:
    """How far off the profile is of its own products of a width that is left out."""
    points = [point for point in profile.products if point.dtype == dtype and point.format == "dense"]
    errors: list[float] = []
    widths: list[float] = []
    guessed: list[float] = []
    for shape in dict.fromkeys((point.in_features, point.out_features) for point in points):
        inside = [point for point in points if (point.in_features, point.out_features) == shape]
        others = [point for point in points if point not in inside]
        if len(others) < 3:
            continue
        found = _products_reached(others, profile.ceilings)
        for point in inside:
            if point.rows not in found.by_rows:
                continue
            ratio = float(np.exp(found.log_ratio(np.array([point.rows]), *shape)[0]))
            seconds = max(1.0, ratio) * _product_roof_s(point, profile.ceilings)
            guessed.append(seconds)
            errors.append(abs(seconds / point.seconds - 1))
            widths.append(abs(float(np.log(seconds / point.seconds))) / found.sigma(point.rows, *shape))
    return HeldOut(np.array(errors), np.array(widths), np.arange(len(errors)), np.array(guessed))


FOLDER = Path(__file__).parents[1] / "data" / "profiles"

_ADAPTER = TypeAdapter(CardProfile)
_NO_SAMPLES: Any = {"__all__": {"seconds"}}
_LEFT_OUT: Any = {"ceilings": {**dict.fromkeys(("compute", "memory", "links"), _NO_SAMPLES), "host": {"seconds"}}}


def profile_json(profile: CardProfile) -> str:
    """The text of a profile; single samples are left out, so that it is small enough to share."""
    return _ADAPTER.dump_json(profile, indent=1, exclude=_LEFT_OUT).decode() + "\n"


def read_profile(path: Path) -> CardProfile:
    """Read a profile. Raises RequestError for a file that is none, or of another version."""
    try:
        content = visible_in(json.loads(path.read_text(encoding="utf-8")))
    except OSError:
        raise RequestError(
            f"there is no card profile at {path}; `roofscope ceilings --out {path}` makes one."
        ) from None
    except (ValueError, RecursionError):
        raise RequestError(f"{path} is no card profile: it is not JSON.") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != PROFILE_SCHEMA:
        told = f"of version {version}, and this roofscope reads {PROFILE_SCHEMA}" if version else "no card profile"
        raise RequestError(f"{path} is {told}; measure the card again: `roofscope ceilings --out {path}`.")
    try:
        return _ADAPTER.validate_python(content)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise RequestError(f"{path} is a damaged card profile: {where}: {problem['msg']}.") from None


def profiles(folder: Path = FOLDER) -> dict[str, Path]:
    """The profiles of a folder by their file's name."""
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def profile_called(name: str) -> CardProfile:
    """A profile by its path, or one that comes with roofscope by its name. Raises RequestError."""
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        return read_profile(path)
    known = profiles()
    if name in known:
        return read_profile(known[name])
    raise RequestError(
        f"no card profile is called {name!r}.{near_misses(name, known)} Known: {', '.join(known) or 'none'}; measure"
        " yours with `roofscope ceilings --out card.json`."
    )
