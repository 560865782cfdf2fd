"""Measured roofs as values: compute, memory, launch, links, and the readings of the drift probe."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from profiler.data.datasheets import Datasheet
from profiler.data.links import Link
from profiler.facts.fact import Fact
from profiler.stats import NOTCH

if TYPE_CHECKING:
    from profiler.facts.merged import MergedFacts


TFLOAT32 = "tfloat32"
GEMV = "gemv"
READ = "read"
COPY = "copy"
TRIAD = "triad"
DATASHEET = "datasheet"
"""The method of a roof that was not measured: it is the dense peak of the card's datasheet, which no kernel reaches."""
PINNED = "host, pinned"
"""The link from pinned memory; weights cross the one from ordinary memory, `host`."""
RESIDENT_GAIN = 1.25
"""A size that is read this much faster again and again than memory can be is served by a cache."""
AGREE = 0.05
"""Two measurements of one roof that lie no further apart, as a share, agree; on a quiet machine they lie within 3 %."""


@dataclass(frozen=True)
class Roof:
    """One measured roof, in units a second."""

    per_s: float
    """The median of the samples."""
    low_per_s: float
    high_per_s: float
    """Quartiles of the samples."""
    samples: int
    method: str
    clock_hz: float | None = None
    """The device's clock while it was measured (median), where the device says."""
    seconds: tuple[float, ...] = ()
    """Each sample; empty where only its figures were kept."""

    @property
    def measured(self) -> bool:
        """Whether the device reached this; a datasheet's peak has no samples."""
        return self.samples > 0

    @property
    def half_width(self) -> float:
        """How far the median may be off, as a share of it (the notch of a box plot, see `clock.timing_of`); 0 where
        there are no samples."""
        if not self.measured:
            return 0.0
        return NOTCH * (self.high_per_s - self.low_per_s) / self.per_s / math.sqrt(self.samples)

    def times(self, share: float) -> Roof:
        """This roof scaled by a share; its single samples are dropped."""
        per_s, low, high = (share * value for value in (self.per_s, self.low_per_s, self.high_per_s))
        return replace(self, per_s=per_s, low_per_s=low, high_per_s=high, seconds=())


def _nominal_roof(per_s: float, method: str) -> Roof:
    return Roof(per_s, per_s, per_s, 0, method)


_NO_ROOF = _nominal_roof(math.inf, "none")


@dataclass(frozen=True)
class CurvePoint:
    """The bandwidth of reading one buffer of this size again and again."""

    nbytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class DriftReading(Fact, kind="sentinel"):
    """One reading of the drift probe: seconds of its memory-bound and its compute-bound work."""

    memory: float
    compute: float
    at_unix_s: float = 0.0

    def merge_into(self, merged: MergedFacts) -> None:
        merged.looks.append(self)


REFERENCE_HOST = "AMD EPYC (Zen 4, 2.6 GHz)"
REFERENCE_HOST_STEP_S = 7.2e-3
"""A step of `roofs.host.measure_host_pace` there: `AMD EPYC`, family 25, model 17, as lscpu names it, a virtual machine
of two cores at 2.6 GHz; Python 3.11.7, torch 2.13.0, transformers 5.23.0. The machine was shared and busy: the fastest
quartile of twelve measurements within half an hour, which lay between 7.0 and 13 ms."""


@dataclass(frozen=True)
class HostPace:
    """How fast one core of the host dispatches, by the steps of the standard hollow twin."""

    step_s: float
    """Seconds that a core works for one of them: the fastest quartile of `seconds`."""
    seconds: tuple[float, ...] = ()
    """A step of each run of steps; empty where only its figure was kept."""

    @property
    def index(self) -> float:
        """How many times as long as the reference host a step takes here."""
        return self.step_s / REFERENCE_HOST_STEP_S


@dataclass(frozen=True)
class WeightReadRoof:
    """The model's own weights, read where they lie: what its steps find instead of a stream's buffer."""

    nbytes: int
    """Of the tensors that were read."""
    roof: Roof
    stream: Roof | None = None
    """A buffer cut into the same pieces, read in turn with them; None in older runs."""


@dataclass(frozen=True)
class RoofsRemeasured(Fact, kind="roofs_again"):
    """The roofs that a verdict rests on, looked at once more as a run ended."""

    memory: Mapping[str, Roof]
    """Bytes/s of reading a stream, and of the matrix-vector product."""
    compute: Mapping[str, Roof]
    """FLOP/s of the product in the model's dtype."""
    at_unix_s: float = 0.0

    def merge_into(self, merged: MergedFacts) -> None:
        merged.roofs_again.append(self)


@dataclass(frozen=True)
class Ceilings(Fact, kind="roofs"):
    """What this device does at best, as measured in this run."""

    compute: Mapping[str, Roof]
    """FLOP/s of a large matrix product, by dtype name."""
    memory: Mapping[str, Roof]
    """Bytes/s by kind of stream: read, copy, triad, and the matrix-vector product of the model's dtype."""
    stream_bytes: int
    """Size of the buffers that were streamed."""
    beyond_cache: bool
    """Whether the buffers were at least four times the last-level caches that the device tells of, or showed that no
    cache serves a part of them."""
    curve: tuple[CurvePoint, ...] = ()
    """Read bandwidth over buffer sizes up to those that were streamed: caches show as steps."""
    launch: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the host needs to submit one tiny kernel, and that the device needs to run it (by graph replay)."""
    page_fault_s: float = 0.0
    """Seconds to touch a page that the system has just given (CPU); 0 where it was not measured."""
    links: Mapping[str, Roof] = field(default_factory=dict)
    """Bytes/s from the `host` or the `disk` to the device; measured only for where weights of this model wait."""
    collective: Link | None = None
    """Between the ranks that share the model; None: one device works alone."""
    host: HostPace | None = None
    """How fast the host dispatches; None where it was not measured."""
    measured_s: float = 0.0
    """Seconds that measuring took."""
    measured_at_unix_s: float = 0.0
    weights: WeightReadRoof | None = None
    """The weights of this run's model; None where they are too small to tell, or were not read."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """What could not be measured, by name, each with the reason in one line."""

    @property
    def judges(self) -> bool:
        """Whether there is a roof of memory and one of arithmetic: with only one of them no time can be split."""
        return bool(self.memory) and bool(self.compute)

    def measured(self, dtype: str) -> bool:
        """Whether both roofs of a step in this dtype were measured on the device."""
        return self._memory_roof.measured and dtype in self.compute and self.compute[dtype].measured

    def fetch_s(self, waiting_bytes: Mapping[str, int]) -> float:
        """Seconds that so many bytes, by where they wait, take to cross their links; those over a link that was not
        measured are left out."""
        return sum(nbytes / self.links[where].per_s for where, nbytes in waiting_bytes.items() if where in self.links)

    @property
    def plateau(self) -> bool:
        """Whether the two largest sizes are read equally fast; where they are not, a cache still serves a part."""
        last = [point.bytes_per_s for point in self.curve[-2:]]
        return len(last) == 2 and agree(*last)

    @property
    def past_caches_bytes(self) -> int:
        """Twice the least size that is read about as slowly as memory, as all larger ones are: of what is read again
        and again over so many bytes a cache serves next to nothing (of that size itself it may serve a fifth)."""
        slow = takewhile(
            lambda point: point.bytes_per_s <= RESIDENT_GAIN * self.curve[-1].bytes_per_s, reversed(self.curve)
        )
        least = min((point.nbytes for point in slow), default=None)
        return 2 * least if least else self.stream_bytes

    @property
    def memory_bytes_per_s(self) -> float:
        """The memory roof, past every cache: reading a stream, or the weights of a matrix-vector product if faster;
        infinite where none is known."""
        return self._memory_roof.per_s

    @property
    def memory_half_width(self) -> float:
        """How far the memory roof may be off, as a share of it."""
        return self._memory_roof.half_width

    @property
    def _memory_roof(self) -> Roof:
        return memory_roof(self.memory)

    def memory_bytes_per_s_for(self, working_set_bytes: float) -> float:
        """The roof of a working set: what its size reaches when it is read again and again, or the memory roof.

        A model that a cache holds whole is not bound by memory; the nearest larger size of the curve decides, by how
        much faster it is read than the curve's own end: a shared machine may have changed between curve and roof.
        """
        larger = [point.bytes_per_s for point in self.curve if point.nbytes >= working_set_bytes]
        gain = larger[0] / self.curve[-1].bytes_per_s if larger else 1.0
        return self.memory_bytes_per_s * max(1.0, gain)

    @property
    def copy_share(self) -> float:
        """Share of the memory roof that a copy reaches, which writes as much as it reads; 1 where none was measured."""
        copied = self.memory.get(COPY)
        return min(1.0, copied.per_s / self.memory_bytes_per_s) if copied else 1.0

    def cache_resident(self, working_set_bytes: float) -> bool:
        """Whether a working set is served by a cache: its size is read clearly faster than memory is."""
        return self.memory_bytes_per_s_for(working_set_bytes) > RESIDENT_GAIN * self.memory_bytes_per_s

    def out_of_the_cache(self, working_set_bytes: float) -> Ceilings:
        """These ceilings for a working set that is served like the next smaller size of the curve.

        Only where a cache ends between the two sizes around it for certain: two sizes beyond it at least, all of them
        read clearly slower, and the curve's end no faster than the memory roof. Otherwise one of these figures was
        measured too low, and no cache is made of it.
        """
        smaller = tuple(point for point in self.curve if point.nbytes < working_set_bytes)
        larger = self.curve[len(smaller) :]
        if not smaller or len(larger) < 2:
            return self
        of_memory = max(point.bytes_per_s for point in larger)
        if smaller[-1].bytes_per_s <= RESIDENT_GAIN * of_memory or of_memory > RESIDENT_GAIN * self.memory_bytes_per_s:
            return self
        served = CurvePoint(math.ceil(working_set_bytes), smaller[-1].bytes_per_s)
        return replace(self, curve=(*smaller, served, *larger))

    def only(self, dtypes: Sequence[str], model_dtype: str, sheet: Datasheet | None = None) -> Ceilings:
        """The roofs of these dtypes, for a model whose weights are of `model_dtype`.

        For what was not measured the peak of `sheet` stands, where the card has one; else it is left out.
        """
        streams = {name: roof for name, roof in self.memory.items() if not name.startswith(GEMV)}
        product = self.memory.get(f"{GEMV} {model_dtype}")
        memory = {**streams, **({GEMV: product} if product else {})}
        compute = {name: self.compute[name] for name in dtypes if name in self.compute}
        if sheet is not None:
            peaks = {name: sheet.peak_flops_per_s(name) for name in dtypes if name not in compute}
            compute |= {name: _nominal_roof(peak, DATASHEET) for name, peak in peaks.items() if peak}
            memory = memory or {READ: _nominal_roof(sheet.bandwidth_bytes_per_s, DATASHEET)}
        return replace(self, compute=compute, memory=memory)

    def times(self, memory: float, compute: float) -> Ceilings:
        """These ceilings with memory (caches too) and arithmetic scaled by these shares."""
        return replace(
            self,
            memory={name: roof.times(memory) for name, roof in self.memory.items()},
            curve=tuple(replace(point, bytes_per_s=memory * point.bytes_per_s) for point in self.curve),
            compute={name: roof.times(compute) for name, roof in self.compute.items()},
        )

    def compute_flops_per_s(self, dtype: str) -> float:
        """The compute roof of a dtype; where that is not known the highest of the others, infinite without any."""
        return self._compute_roof(dtype).per_s

    def compute_half_width(self, dtype: str) -> float:
        """How far that roof may be off, as a share of it."""
        return self._compute_roof(dtype).half_width

    def compute_clock_hz(self, dtype: str) -> float | None:
        """The device's clock while that roof was measured, where it told."""
        return self._compute_roof(dtype).clock_hz

    def _compute_roof(self, dtype: str) -> Roof:
        return self.compute.get(dtype) or max(self.compute.values(), key=lambda roof: roof.per_s, default=_NO_ROOF)


def memory_roof(memory: Mapping[str, Roof]) -> Roof:
    """The roof of a decode step among those of memory: reading a stream, or a matrix-vector product if faster.

    A step reads; copies and triads write as well, and stand beside it for comparison.
    """
    reads = [roof for name, roof in memory.items() if name == READ or name.startswith(GEMV)]
    return max(reads or memory.values(), key=lambda roof: roof.per_s, default=_NO_ROOF)


def agree(one_per_s: float, other_per_s: float, half_widths: float = 0.0) -> bool:
    """Whether two measurements of one rate lie within AGREE, or within what both may be off (shares, added up)."""
    return abs(one_per_s / other_per_s - 1) <= max(AGREE, half_widths)


def drift(looks: Sequence[DriftReading]) -> float:
    """By how much the machine changed from the first half of the looks to the second, as a share.

    Medians are compared, since a single look may be disturbed; the larger change of both kinds counts.
    """
    half = len(looks) // 2
    if not half:
        return 0.0
    before, after = looks[:half], looks[half:]
    return max(
        _change([look.memory for look in before], [look.memory for look in after]),
        _change([look.compute for look in before], [look.compute for look in after]),
    )


def swing(looks: Sequence[DriftReading]) -> float:
    """From the fastest look to the slowest, as a share; the larger of both kinds."""
    if not looks:
        return 0.0
    kinds = [look.memory for look in looks], [look.compute for look in looks]
    return max(max(seconds) / min(seconds) - 1 for seconds in kinds)


def _change(before: Sequence[float], after: Sequence[float]) -> float:
    return abs(statistics.median(after) / statistics.median(before) - 1)
