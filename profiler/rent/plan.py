"""A model in one precision and one engine, split over some GPUs: its work, its memory, and its times on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from profiler.counting.cache import counted_model
from profiler.counting.memory_need import MemoryNeed, cache_bytes, path_on
from profiler.counting.operators import Experts
from profiler.counting.preset_counts import CountedModel
from profiler.data.datasheets import Datasheet
from profiler.data.links import Link, link_of
from profiler.data.published_results import EngineKind
from profiler.errors import RequestError
from profiler.grid.cells import PHASES, Phase
from profiler.grid.ranges import check_positions
from profiler.loading.source import resolve
from profiler.predict.operator_arrays import Array, StepArrays, need_of_cells, operator_arrays, path_of
from profiler.predict.published_efficiency import (
    Range,
    WorkAt,
    card_steps,
    executed,
    host_index_of,
    peak_of,
    step_ranges,
)
from profiler.quant.registry import published_as
from profiler.rent.serving import StepTimes
from profiler.rent.workload import Workload

MOST_BATCH = 4096
MOST_GPUS = (2, 4, 8)
"""Numbers of GPUs over which a model is split if one does not hold it."""


@dataclass(frozen=True)
class GpuShare:
    """One GPU's share of a model at every batch size from 1; arrays are [batches]."""

    precision: str
    """A format of `--quant` (`none`: 16 bits), or the packed format in which the weights are published (`mxfp4`)."""
    format: str
    """The format's name in published figures."""
    engine: EngineKind
    gpus: int
    """GPUs over which tensor parallelism splits the model."""
    layers: int
    prompt_len: int
    new_tokens: int
    parameters: int
    """Of the whole model."""
    weight_bytes: float
    """Bytes of the weights in memory."""
    cache_bytes: float
    """Bytes of the KV cache of one sequence at its full length."""
    need: MemoryNeed
    """What each batch needs of a GPU's memory."""
    unfused_need: MemoryNeed
    """The same on a GPU without a fused attention kernel for grouped heads."""
    work: dict[Phase, WorkAt]
    exchanged_s: dict[Phase, Array]
    """Seconds of the collectives between the GPUs."""
    mixture: bool = False
    """Whether it is a mixture of experts."""

    @property
    def batches(self) -> Array:
        return np.arange(1, len(self.need.peak_bytes) + 1)

    def need_on(self, sheet: Datasheet) -> MemoryNeed:
        """What each batch needs of this GPU's memory."""
        return self.need if sheet.fuses_grouped_heads else self.unfused_need

    def largest_batch_on(self, sheet: Datasheet) -> int:
        """The most sequences that certainly fit, in whatever pieces free memory is; 0 if not even one does."""
        return int(np.searchsorted(self.need_on(sheet).safe_bytes, sheet.room_bytes, side="right"))


@dataclass
class Planner:
    """Plans of one model for one load; each share of the model is counted once."""

    model: str
    load: Workload
    _counted: dict[tuple[str, int], CountedModel] = field(default_factory=dict)
    _plans: dict[tuple[str, EngineKind, int, str], GpuShare] = field(default_factory=dict)

    def plan(self, quant: str, engine: EngineKind, gpus: int = 1, link: Link | None = None) -> GpuShare:
        """The work and memory of each GPU's share at every batch size, counted from the model's config.

        Raises RequestError for an unknown model, one that cannot be split so, or more tokens than it has positions.
        """
        key = (quant, engine, gpus, link.name if link else "")
        if key not in self._plans:
            counted = self._count(quant, gpus)
            tokens = self.load.prompt_len + self.load.new_tokens
            check_positions(counted.max_positions, tokens, "a shorter --prompt or fewer --new")
            self._plans[key] = _planned(counted, quant, engine, self.load, gpus, link)
        return self._plans[key]

    def plan_on(self, sheet: Datasheet, quant: str, engine: EngineKind, batch: int) -> GpuShare:
        """The plan with the fewest GPUs that hold the weights and `batch` sequences; that of one GPU if none does.

        A model in 16 bits may be split over 2, 4 or 8 GPUs with a published link.
        """
        single = self.plan(quant, engine)
        if quant != "none" or single.largest_batch_on(sheet) >= batch:
            return single
        for gpus in MOST_GPUS:
            link = link_of(sheet, gpus)
            if link is None or single.weight_bytes / gpus > sheet.room_bytes:
                continue
            try:
                split = self.plan(quant, engine, gpus, link)
            except RequestError:
                continue
            if split.largest_batch_on(sheet) >= batch:
                return split
        return single

    def _count(self, quant: str, gpus: int) -> CountedModel:
        if (quant, gpus) not in self._counted:
            source = resolve(self.model)
            counted = counted_model(source, quant=quant, rented=True, ranks=gpus)
            self._counted[quant, gpus] = counted
        return self._counted[quant, gpus]


def _planned(
    counted: CountedModel, quant: str, engine: EngineKind, load: Workload, gpus: int, link: Link | None
) -> GpuShare:
    work, weights = counted.work, counted.weight_bytes
    path = path_of(engine, counted.attention)
    batches = np.arange(1, MOST_BATCH + 1, dtype=np.int64)
    phase_work: dict[Phase, WorkAt] = {}
    exchanged_s: dict[Phase, Array] = {}
    steps: dict[Phase, StepArrays] = {}
    for phase in PHASES:
        prefill = phase == "prefill"
        steps[phase] = StepArrays(
            prefill=np.full(len(batches), prefill),
            batch=batches,
            prompt_len=np.full(len(batches), load.prompt_len),
            context=np.full(len(batches), 0 if prefill else load.prompt_len + load.new_tokens // 2),
            new_tokens=np.full(len(batches), load.new_tokens),
        )
        needed = operator_arrays(work, steps[phase], dict.fromkeys(PHASES, path), weights, link)
        phase_work[phase] = executed(needed, engine)
        exchanged_s[phase] = np.broadcast_to(needed.exchanged_s, len(batches))

    def need_with(*, fuses_grouped_heads: bool) -> MemoryNeed:
        there = path if engine != "eager" else path_on(work, counted.attention, fuses_grouped_heads=fuses_grouped_heads)
        return need_of_cells(work, steps["prefill"], there, weights)

    return GpuShare(
        precision=counted.published or quant,
        format=published_as(quant),
        engine=engine,
        gpus=gpus,
        layers=work.layers,
        prompt_len=load.prompt_len,
        new_tokens=load.new_tokens,
        parameters=work.params,
        weight_bytes=float(weights),
        cache_bytes=float(cache_bytes(work, 1, load.prompt_len + load.new_tokens)),
        need=need_with(fuses_grouped_heads=True),
        unfused_need=need_with(fuses_grouped_heads=False),
        work=phase_work,
        exchanged_s=exchanged_s,
        mixture=any(isinstance(op, Experts) for op in work.operators),
    )


@dataclass(frozen=True)
class Times:
    """The step times of a plan on a GPU: the ends of the 90 % range, and the typical ones."""

    low: StepTimes
    typical: StepTimes
    high: StepTimes

    @property
    def ends(self) -> tuple[StepTimes, StepTimes, StepTimes]:
        return self.low, self.typical, self.high


def times_on(plan: GpuShare, sheet: Datasheet, largest: int, host_index: float | None) -> Times:
    """The times of one prompt, and of decode steps of 1 to `largest` sequences, on one GPU or its group.

    `host_index` is the host's dispatch time relative to the reference; None: that with which the GPU is mostly rented.
    """
    host = host_index_of(sheet.gpu) if host_index is None else host_index
    prompt = _range(plan, "prefill", sheet, 1, host)
    step = _range(plan, "decode", sheet, largest, host)
    return Times(*(
        StepTimes(float(prompt_s[0]), step_s, plan.new_tokens)
        for prompt_s, step_s in zip(_ends(prompt), _ends(step), strict=True)
    ))  # fmt: skip


def _ends(seconds: Range) -> tuple[Array, Array, Array]:
    return seconds.low_s, seconds.typical_s, seconds.high_s


def _range(plan: GpuShare, phase: Phase, sheet: Datasheet, largest: int, host: float) -> Range:
    query = np.full(largest, plan.prompt_len if phase == "prefill" else 1)
    peak = peak_of(sheet, plan.format)
    steps = card_steps(sheet, plan.work[phase], plan.batches, peak=peak, layers=plan.layers, host_index=host)
    return step_ranges(plan.engine, plan.format, steps, query, [phase] * largest, plan.exchanged_s[phase])
