"""What was measured and counted: all that a verdict is drawn from. Plain values, which a run folder keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from profiler.diagnosis.step_time import Dispatch
from profiler.grid import Cell, CellKey, Grid, Phase
from profiler.machine.clock import NOTHING, Timing, timing_of
from profiler.machine.readings import Reading, Timeline
from profiler.roofs.values import Ceilings, Look, RoofsAgain
from profiler.timing.outcomes import Gap, Visit
from profiler.work.causes import Cause

Amount = int | float
"""FLOPs or bytes; whole numbers stay whole."""

NO_AMOUNTS: Mapping[Cause, Amount] = {}
"""What most operators avoid: one for all of them, since a large run has hundreds of thousands."""


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """What one operator of a cell's step must do, all its `count` equal instances together."""

    operator: str
    group: str
    count: int
    dtype: str
    """The dtype that it computes in, which decides its compute roof."""
    flops: Amount
    """Model FLOPs: what the algorithm needs."""
    weight_bytes: Amount
    """Weights as stored, embedding rows and logits."""
    kv_bytes: Amount
    """Cache read and written."""
    activation_bytes: Amount
    """Operands and intermediates written and read between kernels, at most."""
    avoidable_flops: Mapping[Cause, Amount] = field(default_factory=dict)
    avoidable_bytes: Mapping[Cause, Amount] = field(default_factory=dict)
    bus_bytes: Amount = 0
    """What crosses each rank's link, of a collective: its message by the factor of nccl-tests."""

    @property
    def model_bytes(self) -> Amount:
        """The algorithm's minimum."""
        return self.weight_bytes + self.kv_bytes

    @property
    def executed_flops(self) -> Amount:
        return self.flops + sum(self.avoidable_flops.values())

    @property
    def executed_bytes(self) -> Amount:
        """Bytes that the library's path moves when no intermediate stays in a cache."""
        return self.model_bytes + self.activation_bytes + sum(self.avoidable_bytes.values())


COLLECTIVE = "collective"
"""The group of operators that exchange results between ranks."""

REST = "all other kernels"
"""What stands among the operators that were run alone for all the small kernels between them."""


@dataclass(frozen=True)
class Replay:
    """Seconds that one instance of an operator took alone, at one cell's shape."""

    operator: str
    seconds: tuple[float, ...]
    conversion_seconds: tuple[float, ...] = ()
    """Of its kernels that only convert between formats, where it has some."""
    without_faults: bool = False
    """Whether the time of its own page faults is taken off (CPU): those of a step are counted in the step."""

    @property
    def whole(self) -> Timing:
        return timing_of(self.seconds)

    @property
    def conversion(self) -> Timing:
        return timing_of(self.conversion_seconds) if self.conversion_seconds else NOTHING


@dataclass(frozen=True)
class Calls:
    """Seconds of one call of something that a step calls `count` times."""

    count: int
    seconds: tuple[float, ...]

    @property
    def total_s(self) -> float:
        return self.count * timing_of(self.seconds).median_s


@dataclass(frozen=True)
class DispatchSamples:
    """The hollow twin's steps as they were measured, for one engine, phase and batch size."""

    engine: str
    phase: Phase
    batch_size: int
    alone_s: tuple[float, ...]
    """Steps of the twin by itself."""
    among_s: tuple[float, ...] = ()
    """Steps between whose operators the model's own linears ran, without their time; empty where the twin steps
    alone."""
    bare_s: tuple[float, ...] = ()
    """All calls of the twin's own linears, between the model's."""
    cores: tuple[Calls, ...] = ()
    """The twin's attention cores and experts alone."""
    conversions: tuple[Calls, ...] = ()
    """The twin's conversions between formats alone."""
    waits: bool = False
    """Whether such a step waits for its device on the way."""


@dataclass(frozen=True)
class Hooked:
    """A step cut at the entry and exit of every known module: seconds by group, step by step."""

    key: CellKey
    groups: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Activity:
    """What ran during one step: kernels on CUDA, operators on a CPU (where each is a call of the host)."""

    key: CellKey
    kernels: int
    busy_s: float
    """Time in which at least one of them ran."""
    gaps: int
    """Pauses of more than a microsecond between them."""
    gap_s: float
    longest_s: float
    """The longest single kernel."""

    @property
    def busy_share(self) -> float:
        """Share of the span from the first to the last kernel in which one ran."""
        span_s = self.busy_s + self.gap_s
        return self.busy_s / span_s if span_s else 0.0


@dataclass(frozen=True, slots=True)
class CellPeak:
    """The peak memory that was predicted for a cell."""

    cell: Cell
    peak_bytes: int


@dataclass(frozen=True)
class PredictedPeaks:
    """What every cell of the grid was predicted to need."""

    peaks: tuple[CellPeak, ...]


@dataclass(frozen=True)
class Replays:
    """Operators that were run alone, at the shape that these cells share."""

    keys: tuple[CellKey, ...]
    operators: tuple[Replay, ...]


@dataclass(frozen=True)
class Readings:
    """What the device reported since the last such record."""

    readings: tuple[Reading, ...]


@dataclass(frozen=True)
class Stepped:
    """Steps of a short model, each cut at the entry and the exit of its repeating layers."""

    layers_s: tuple[float, ...]
    """Seconds within those layers."""
    beside_s: tuple[float, ...]
    """Seconds of the same steps before and behind them: embedding, layers of another kind, head."""


COMPILED = "torch.compile"
"""The name of the trial whose steps are compiled, on a static cache."""
UNQUANTISED = "unquantised "
"""What the name of a trial begins with that leaves the run's quantisation out."""
PADDING_MASK = "a padding mask"
"""What the name of a trial begins with whose batch has a shorter sequence: a cost to know, no change to advise."""


@dataclass(frozen=True)
class Trial:
    """A step tried in another form: the same architecture with fewer layers, as it is and in that form, in turn."""

    key: CellKey
    form: str
    layers: int
    """Repeating layers of the short model."""
    of_layers: int
    """Repeating layers of the whole one."""
    before: Stepped
    after: Stepped


@dataclass(frozen=True)
class GenerateSteps:
    """Decode steps within `generate` and within our own loop, in turn: seconds in each part, step by step."""

    cell: Cell
    transformers: str
    """Its version: the parts are its own functions."""
    parts_s: Mapping[str, tuple[float, ...]]
    own_s: Mapping[str, tuple[float, ...]]
    streamed_s: tuple[float, ...]
    """The part that ends a step, with a streamer that takes every token."""
    reads_a_token: float
    """Values that the host reads from the device in a step."""


@dataclass(frozen=True)
class QueueTrial:
    """The prompts of a queue prefilled as they come and batched in another way, in turn: seconds of all of them."""

    cell: Cell
    way: str
    as_they_come_s: tuple[float, ...]
    this_way_s: tuple[float, ...]


@dataclass(frozen=True)
class FirstCalls:
    """The first requests of a process to one engine."""

    preparation_s: float
    """Compiling, capturing."""
    first_s: float
    """Until all tokens of the first request were on the host."""
    second_s: float
    """The same request once more."""

    @property
    def once_s(self) -> float:
        """What is paid once."""
        return self.preparation_s + self.first_s - self.second_s


@dataclass(frozen=True)
class FreshStart:
    """A process that was started for one model, until it had answered."""

    link: str
    """Where its weights came from: disk, page cache, cached (a hub's folder), drawn (random)."""
    launch_s: float
    """The interpreter's start and all imports."""
    load_s: float
    load_bytes: int
    engines: Mapping[str, FirstCalls]


@dataclass(frozen=True)
class AfterSilence:
    """The first decode steps after some seconds without work, time and again."""

    cell: Cell
    silence_s: float
    steps_s: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Quality:
    """The next-token distributions of two models over the same text, held against each other."""

    mean_kl_nats: float
    """Mean over positions of KL(unquantised || quantised), in nats; 0 where they are the same."""
    top1_agreement: float
    """Share of positions where both put the same token first."""
    tokens: int


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
class RankSteps:
    """What each rank's own share of a cell takes, by rank, while nothing is exchanged and all work at once."""

    cell: Cell
    prefill_s: tuple[float, ...]
    """Empty where the cell has no prefill."""
    decode_s: tuple[float, ...]
    prefill_last_s: float = 0.0
    decode_last_s: float = 0.0
    """The same where every exchange waits for the rank that comes to it last; nothing in older runs."""

    def seconds(self, phase: Phase) -> tuple[float, ...]:
        return self.prefill_s if phase == "prefill" else self.decode_s

    def last_s(self, phase: Phase) -> float:
        """Seconds of the shares, waiting for the last at every exchange; of the slowest rank where that is unknown."""
        found = self.prefill_last_s if phase == "prefill" else self.decode_last_s
        return found or max(self.seconds(phase))


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
    looks: Sequence[Look] = ()
    roofs_again: Sequence[RoofsAgain] = ()
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
