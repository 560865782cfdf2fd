"""A model in one precision and one engine, split over some GPUs: its work, its memory, and its times on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from profiler.counting.cache import counted_model
from profiler.counting.memory_need import MemoryNeed, cache_bytes, need_of_batch, path_on
from profiler.counting.operators import Experts
from profiler.counting.preset_counts import CountedModel
from profiler.data.datasheets import Datasheet
from profiler.data.links import Link, link_of
from profiler.data.published_results import EngineKind
from profiler.errors import RequestError
from profiler.grid.cells import PHASES, Phase
from profiler.grid.ranges import check_positions
from profiler.loading.source import resolve
from profiler.predict.operator_arrays import Array, StepArrays, operator_arrays, path_of
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
from profiler.rent.options import MOST_BATCH, Workload
from profiler.rent.serving import StepTimes

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
    prefix: int
    """The first of these tokens, which are cached."""
    new_tokens: int
    parameters: int
    """Of the whole model."""
    weight_bytes: float
    """Bytes of the weights in memory."""
    cache_bytes: float
    """Bytes of the KV cache of one sequence at its full length, without a prefix that others share."""
    needs: Mapping[tuple[bool, bool], MemoryNeed]
    """What each batch needs of a GPU's memory, by whether the GPU fuses the attention of grouped heads, and whether
    the prompts of a batch are prefilled together."""
    work: dict[Phase, WorkAt]
    exchanged_s: dict[Phase, Array]
    """Seconds of the collectives between the GPUs."""
    mixture: bool = False
    """Whether it is a mixture of experts."""

    @property
    def together(self) -> bool:
        """Whether the engine prefills the prompts of a batch together, as `generate` does; servers do one at a time."""
        return self.engine == "eager"

    def need_on(self, sheet: Datasheet, *, together: bool) -> MemoryNeed:
        """What each batch needs of this GPU's memory, with prompts prefilled together or one at a time."""
        return self.needs[sheet.fuses_grouped_heads, together]

    def largest_batch_on(self, sheet: Datasheet, *, together: bool) -> int:
        """The most sequences that certainly fit, in whatever pieces free memory is; 0 if not even one does."""
        need = self.need_on(sheet, together=together)
        return int(np.searchsorted(need.safe_bytes, sheet.room_bytes, side="right"))


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
        if quant != "none" or single.largest_batch_on(sheet, together=single.together) >= batch:
            return single
        for gpus in MOST_GPUS:
            link = link_of(sheet, gpus)
            if link is None or single.weight_bytes / gpus > sheet.room_bytes:
                continue
            try:
                split = self.plan(quant, engine, gpus, link)
            except RequestError:
                continue
            if split.largest_batch_on(sheet, together=split.together) >= batch:
                return split
        return single

    def _count(self, quant: str, gpus: int) -> CountedModel:
        if (quant, gpus) not in self._counted:
            self._counted[quant, gpus] = counted_model(resolve(self.model), quant=quant, rented=True, ranks=gpus)
        return self._counted[quant, gpus]


def _planned(
    counted: CountedModel, quant: str, engine: EngineKind, load: Workload, gpus: int, link: Link | None
) -> GpuShare:
    work, weights = counted.work, counted.weight_bytes
    path = path_of(engine, counted)
    batches = np.arange(1, MOST_BATCH + 1, dtype=np.int64)
    tokens, shared = load.prompt_len + load.new_tokens, 0 if engine == "eager" else load.prefix
    phase_work: dict[Phase, WorkAt] = {}
    exchanged_s: dict[Phase, Array] = {}
    for phase in PHASES:
        prefill = phase == "prefill"
        steps = StepArrays(
            prefill=np.full(len(batches), prefill),
            batch=batches,
            prompt_len=np.full(len(batches), load.prompt_len - load.prefix),
            context=np.full(len(batches), load.prefix if prefill else load.prompt_len + load.new_tokens // 2),
            new_tokens=np.full(len(batches), load.new_tokens),
            prefix=np.full(len(batches), load.prefix),
            shared=np.full(len(batches), shared),
        )
        needed = operator_arrays(work, steps, dict.fromkeys(PHASES, path), weights, link)
        phase_work[phase] = executed(needed, engine)
        exchanged_s[phase] = np.broadcast_to(needed.exchanged_s, len(batches))

    needs = {
        (fuses, together): need_of_batch(
            work,
            weights,
            batches,
            load.prompt_len,
            load.new_tokens,
            path if engine != "eager" else path_on(work, counted.attention, fuses_grouped_heads=fuses),
            together=together,
            prefix=load.prefix,
            shared=shared,
        )
        for fuses in (True, False)
        for together in (True, False)
    }
    return GpuShare(
        precision=counted.published or quant,
        format=published_as(quant),
        engine=engine,
        gpus=gpus,
        layers=work.layers,
        prompt_len=load.prompt_len,
        prefix=load.prefix,
        new_tokens=load.new_tokens,
        parameters=work.params,
        weight_bytes=float(weights),
        cache_bytes=float(cache_bytes(work, 1, tokens, shared=shared) - cache_bytes(work, 0, tokens, shared=shared)),
        needs=needs,
        work=phase_work,
        exchanged_s=exchanged_s,
        mixture=any(isinstance(op, Experts) for op in work.operators),
    )


def times_on(plan: GpuShare, sheet: Datasheet, largest: int, host_index: float | None) -> tuple[StepTimes, ...]:
    """The fastest, the typical and the slowest times of the 90 % range, on one GPU or its group.

    They are of one prompt, and of decode steps of 1 to `largest` sequences. `host_index` is the host's dispatch time
    relative to the reference; None: that with which the GPU is mostly rented.
    """
    host = host_index_of(sheet) if host_index is None else host_index
    peak, batches = peak_of(sheet, plan.format), np.arange(1, MOST_BATCH + 1)

    def range_of(phase: Phase, count: int) -> Range:
        steps = card_steps(sheet, plan.work[phase], batches, peak=peak, layers=plan.layers, host_index=host)
        query = np.full(count, plan.prompt_len - plan.prefix if phase == "prefill" else 1)
        return step_ranges(plan.engine, plan.format, steps, query, [phase] * count, plan.exchanged_s[phase])

    prompt, step = range_of("prefill", 1), range_of("decode", largest)
    return (
        StepTimes(float(prompt.low_s[0]), step.low_s, plan.new_tokens),
        StepTimes(float(prompt.typical_s[0]), step.typical_s, plan.new_tokens),
        StepTimes(float(prompt.high_s[0]), step.high_s, plan.new_tokens),
    )
