"""The input of judging: a run's model, its device, and all its facts."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from profiler.data.free_memory import idle_room_bytes
from profiler.facts.ceilings import Ceilings
from profiler.facts.fact import MergedFacts
from profiler.facts.operators import OperatorWork
from profiler.facts.repetitions import phase_samples
from profiler.facts.telemetry import Timeline
from profiler.grid.cells import CellKey, Grid


@dataclass(frozen=True)
class ModelFacts:
    """The model of a run, as it was loaded."""

    id: str
    kind: str
    """Its source: card (a preset), hub, folder or gguf."""
    revision: str | None
    architecture: str
    params: int
    dtype: str
    quant: str
    double_quant: bool
    compute_dtype: str
    """The dtype of quantised matmuls."""
    weights: str
    """`checkpoint` or `random`."""
    storage_bytes: int
    load_s: float
    first_call_s: float
    unpacked_from: str | None
    """The format of a packed checkpoint whose weights are dense in memory; None for others."""
    attention: str
    offloaded_bytes: Mapping[str, int]
    """Bytes of weights that cross a link at every step, by location: host or disk."""
    placement: Mapping[str, str] | None
    linear_weights: int = 0
    """Weights of the block linears."""
    linear_bytes: int = 0
    """Bytes of these weights as stored, with scales."""
    cache_itemsize: int = 2
    """Bytes per element of the KV cache."""
    four_bit_dense_from_rows: int | None = None
    """Rows from which every 4-bit kernel first writes a dense 16-bit copy on this device; None: never or unknown."""
    linears: Mapping[str, int] = field(default_factory=dict)
    """Number of linears by class, format and first action of their kernel; empty in older runs."""
    experts: str | None = None
    """transformers' implementation of the experts; None without experts."""

    @property
    def precision(self) -> str:
        """Such as `bfloat16`, or `bfloat16, nf4`."""
        return self.dtype if self.quant == "none" else f"{self.dtype}, {self.quant}"


@dataclass(frozen=True)
class OwnedModel:
    """The model and cache of an engine that loads the model itself."""

    version: str
    load_s: float
    """Seconds to load, compile, capture and warm up, before the first cell."""
    weight_bytes: int
    cache_bytes: int
    """Bytes reserved for the cache, filled or not."""


@dataclass(frozen=True)
class DeviceFacts:
    """The device of a run, with the figures of its datasheet for the model's dtype if it has one."""

    kind: str
    name: str
    memory_bytes: int
    last_level_cache_bytes: int
    threads: int
    compute_capability: str
    datasheet: str | None = None
    """The row of the table of datasheets."""
    datasheet_flops_per_s: float | None = None
    datasheet_bytes_per_s: float | None = None

    @property
    def room_bytes(self) -> int:
        """The bytes that a model may take of its memory if nothing else runs there (`data.free_memory`)."""
        return idle_room_bytes(self.kind, self.memory_bytes)

    @property
    def hides_overhead(self) -> bool:
        """Whether the host can run ahead of the device, which then hides overhead."""
        return self.kind == "cuda"


@dataclass(frozen=True, kw_only=True)
class Facts(MergedFacts):
    """All facts of a run so far, merged, with the model, device and grid that they describe."""

    model: ModelFacts
    device: DeviceFacts
    grid: Grid
    ceilings: Ceilings
    operators: Mapping[CellKey, Sequence[OperatorWork]]
    graph_engines: frozenset[str] = frozenset()
    """Engines whose decode step is one launch of a captured graph."""
    generate_engines: frozenset[str] = frozenset()
    """Engines that call transformers' `generate`."""
    owning_engines: frozenset[str] = frozenset()
    """Engines that load the model themselves and hide its kernels."""

    @cached_property
    def timeline(self) -> Timeline:
        """The telemetry readings, searchable by time."""
        return Timeline(self.readings)

    @property
    def measured(self) -> list[CellKey]:
        """Keys of the measured cells, in the order of the table's rows."""
        return [key for key in self.grid.keys if self.repetitions.get(key.cell)]

    def medians_s(self) -> dict[CellKey, float]:
        return {
            key: statistics.median(chain.from_iterable(phase_samples(key.phase, self.repetitions[key.cell])))
            for key in self.measured
        }
