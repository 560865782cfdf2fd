"""A run as it is judged: its model, its device, and all of its facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from profiler.facts.merged import MergedFacts
from profiler.facts.operators import OperatorWork
from profiler.facts.roofs import Ceilings
from profiler.facts.telemetry import Timeline
from profiler.grid.cells import CellKey, Grid


@dataclass(frozen=True)
class ModelFacts:
    """The model of a run, as it was loaded."""

    id: str
    kind: str
    """Where it came from: card, hub, folder or gguf."""
    revision: str | None
    architecture: str
    params: int
    dtype: str
    quant: str
    double_quant: bool
    compute_dtype: str
    """The dtype that quantised products run in."""
    weights: str
    """checkpoint or random."""
    storage_bytes: int
    load_s: float
    first_call_s: float
    unpacked_from: str | None
    """The format of a checkpoint that came packed and lies in memory as dense weights."""
    attention: str
    offloaded_bytes: Mapping[str, int]
    """Bytes of weights that cross a link at every step, by where they wait: host or disk."""
    placement: Mapping[str, str] | None
    linear_weights: int = 0
    """Weights of the block linears."""
    linear_bytes: int = 0
    """Their bytes as stored, scales included."""
    cache_itemsize: int = 2
    """Bytes an element of the KV cache."""
    four_bit_dense_from_rows: int | None = None
    """Rows from which a 4-bit kernel would first write a dense 16-bit copy on this device; None: never or not known."""

    linears: Mapping[str, int] = field(default_factory=dict)
    """Linears by class, format and what their kernel does first; empty in runs that did not tell."""
    experts: str | None = None
    """transformers' implementation of the experts, where there are some."""

    @property
    def offloaded(self) -> bool:
        return bool(self.offloaded_bytes)

    @property
    def precision(self) -> str:
        """`bfloat16`, or `bfloat16, nf4`."""
        return self.dtype if self.quant == "none" else f"{self.dtype}, {self.quant}"


@dataclass(frozen=True)
class DeviceFacts:
    """The device of a run, with its datasheet's figures for the model's dtype where it has one."""

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
    def overlaps_dispatch(self) -> bool:
        """Whether the host can run ahead of the device, so that dispatch hides behind it."""
        return self.kind == "cuda"

    @property
    def short_name(self) -> str:
        """As an answer calls it."""
        return "CPU" if self.kind == "cpu" else self.name.removeprefix("NVIDIA ")


@dataclass(frozen=True, kw_only=True)
class Facts(MergedFacts):
    """What a run is judged from, as far as it has come: its facts, merged, and what they are about."""

    model: ModelFacts
    device: DeviceFacts
    grid: Grid
    ceilings: Ceilings
    operators: Mapping[CellKey, Sequence[OperatorWork]]
    graph_engines: frozenset[str] = frozenset()
    """Engines whose decode step is one launch of recorded work."""
    generate_engines: frozenset[str] = frozenset()
    """Engines that are transformers' own `generate`."""
    owning_engines: Mapping[str, str] = field(default_factory=dict)
    """Engines that own their model, so that what their kernels do is not seen, and how each issues a step."""

    @cached_property
    def timeline(self) -> Timeline:
        """The readings, to be asked of one moment or another."""
        return Timeline(self.readings)

    @property
    def measured(self) -> list[CellKey]:
        """What has a time, in the order of the table's rows."""
        return [key for key in self.grid.keys if self.visits.get(key.cell)]
