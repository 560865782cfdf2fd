"""What was measured and counted: all that a verdict is drawn from. Plain values, which a run folder keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from profiler.facts.dispatch import Dispatch
from profiler.facts.measurements import GenerateSteps, Hooked, QueueTrial, RankSteps, Replay, Trial
from profiler.facts.operators import OperatorWork
from profiler.facts.roofs import Ceilings, DriftReading, RoofsRemeasured
from profiler.facts.telemetry import Reading, Timeline
from profiler.facts.visits import Gap, Visit
from profiler.grid.cells import Cell, CellKey, Grid, Phase


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


@dataclass(frozen=True)
class Facts:
    """One run, as far as it has come."""

    model: ModelFacts
    device: DeviceFacts
    grid: Grid
    ceilings: Ceilings
    operators: Mapping[CellKey, Sequence[OperatorWork]]
    predicted_peak_bytes: Mapping[Cell, int]
    dispatch: Mapping[tuple[str, Phase, int], Dispatch] = field(default_factory=dict)
    """By engine, phase and batch size; empty where it was not measured."""
    graph_engines: frozenset[str] = frozenset()
    """Engines whose decode step is one launch of recorded work."""
    generate_engines: frozenset[str] = frozenset()
    """Engines that are transformers' own `generate`."""
    generate_steps: Mapping[Cell, GenerateSteps] = field(default_factory=dict)
    owning_engines: Mapping[str, str] = field(default_factory=dict)
    """Engines that own their model, so that what their kernels do is not seen, and how each issues a step."""
    visits: Mapping[Cell, Sequence[Visit]] = field(default_factory=dict)
    gaps: Mapping[Cell, Gap] = field(default_factory=dict)
    looks: Sequence[DriftReading] = ()
    roofs_again: Sequence[RoofsRemeasured] = ()
    """The roofs at the end of the run (of each part of a resumed one); empty in runs of older versions."""
    readings: Sequence[Reading] = ()
    replays: Mapping[CellKey, Mapping[str, Replay]] = field(default_factory=dict)
    """By cell and operator."""
    hooked: Mapping[CellKey, Hooked] = field(default_factory=dict)
    trials: Mapping[CellKey, Sequence[Trial]] = field(default_factory=dict)
    queue_trials: Mapping[Cell, Mapping[str, QueueTrial]] = field(default_factory=dict)
    """By cell and way."""
    rank_steps: Mapping[Cell, RankSteps] = field(default_factory=dict)

    @cached_property
    def timeline(self) -> Timeline:
        """The readings, to be asked of one moment or another."""
        return Timeline(self.readings)

    @property
    def measured(self) -> list[CellKey]:
        """What has a time, in the order of the table's rows."""
        return [key for key in self.grid.keys if self.visits.get(key.cell)]
