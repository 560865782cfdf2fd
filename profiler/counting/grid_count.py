"""Count a grid without measuring: FLOPs, bytes and memory of every cell, and its floor on each GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from profiler.counting.floor import StepFloor, ceiling_times
from profiler.counting.memory_need import MemoryNeed, memory_need, need_in_chunks, path_on
from profiler.counting.operators import ModelWork
from profiler.counting.preset_counts import CountedModel
from profiler.counting.stored_bits import stored_note
from profiler.data.ceiling_set import CeilingSet
from profiler.errors import RequestError
from profiler.facts.step import Step
from profiler.grid.cells import PHASES, Phase
from profiler.grid.ranges import beyond_positions, check_prefix

_Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]
MOST_GRID_POINTS = 1_000_000


@dataclass(frozen=True)
class GpuFloors(StepFloor):
    """The floors [n] of all points of a grid under the ceilings of one GPU."""

    ceilings: CeilingSet
    need: MemoryNeed
    """What each point needs of this GPU's memory [n], by the attention that it has."""
    served_bytes: _Floats
    """The bytes with which servers run each decode step [n]; infinite for a prefill."""

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Whether the tensors of each point fit the GPU [n]; true if its memory is unknown."""
        return np.asarray(self.need.fits(self.ceilings.room_bytes))

    @property
    def tight(self) -> NDArray[np.bool_]:
        """Whether they fit, but the step may run out of memory [n] (`MemoryNeed.is_tight`)."""
        return np.asarray(self.need.is_tight(self.ceilings.room_bytes))

    @property
    def in_chunks(self) -> NDArray[np.bool_]:
        """Whether a decode step fits only if prompts are prefilled in chunks, as servers do [n]."""
        return np.asarray(~self.fits & (self.served_bytes <= self.ceilings.room_bytes))

    @property
    def runs(self) -> NDArray[np.bool_]:
        """Whether each point fits, at once or in chunks [n]."""
        return self.fits | self.in_chunks


@dataclass(frozen=True)
class GridCount:
    """The counted steps of a grid, one array element per point: first all prefills, then all decodes."""

    model: str
    params: int
    dtype: str
    quant: str
    weight_bytes: int
    phases: tuple[Phase, ...]
    batch_size: _Integers
    prompt_len: _Integers
    """Prompt tokens [n]; 0 for a decode."""
    context_len: _Integers
    """Cached tokens before the step [n]; for a prefill, those of the prefix."""
    model_flops: _Floats
    model_bytes: _Floats
    cache_bytes: _Floats
    """Bytes of the KV cache at the end of the step [n]."""
    needs_bytes: _Floats
    """Weights, KV cache and workspace with fused attention [n]; a decode step has its prefill's."""
    gpus: tuple[GpuFloors, ...]
    prefix: int = 0
    """The first tokens of every prompt, which are cached once for all sequences; prefills run only the others."""
    note: str = ""
    """On the format of the weights, and on sequences beyond the model's own limit."""

    def __len__(self) -> int:
        return len(self.phases)

    @property
    def intensity(self) -> _Floats:
        """Model FLOPs per model byte [n]."""
        return self.model_flops / self.model_bytes

    @property
    def tokens(self) -> _Integers:
        """New tokens of each step [n]: a prefill reads its prompts, a decode gives one per sequence."""
        return np.where(self.prompt_len > 0, self.batch_size * (self.prompt_len - self.prefix), self.batch_size)

    @property
    def depth(self) -> _Integers:
        """Prompt tokens of a prefill, cached tokens of a decode [n]."""
        return np.where(self.prompt_len > 0, self.prompt_len, self.context_len)


def count_grid(
    model: str,
    counted: CountedModel,
    quant: str,
    *,
    batch_sizes: Sequence[int],
    prompt_lens: Sequence[int],
    context_lens: Sequence[int],
    prefix: int = 0,
    gpus: Sequence[CeilingSet] = (),
) -> GridCount:
    """Count the prefill of every prompt length and the decode step after every context, at every batch size.

    The first `prefix` tokens of every prompt are cached. Raises RequestError for more than MOST_GRID_POINTS points, and
    for a prefix that is not shorter than each length. Work that 64-bit integers cannot count wraps (`check_countable`).
    """
    phases, batch, prompt, context = _points(batch_sizes, prompt_lens, context_lens, prefix)
    check_prefix(prefix, min((*prompt_lens, *context_lens), default=0))
    beyond = beyond_positions(counted.max_positions, max((*prompt_lens, *context_lens), default=0))
    step = Step(batch, np.maximum(prompt - prefix, 1), context, prefix)
    work = counted.work.work(step)
    ones = np.ones(len(batch))
    # A decode step needs the memory of the prefill that filled its cache.
    first = np.where(prompt > 0, prompt, np.maximum(context, 1))

    def needs(*, fuses: bool) -> MemoryNeed:
        path = path_on(counted.work, counted.attention, fuses_grouped_heads=fuses)
        prefill = Step(batch, first - prefix, prefix, prefix)
        return memory_need(counted.work, counted.weight_bytes, prefill, prompt == 0, path)

    fused = needs(fuses=True)
    served = need_in_chunks(counted.work, counted.weight_bytes, batch, first, prefix)
    served_bytes = np.where(prompt > 0, np.inf, served.safe_bytes)
    return GridCount(
        model=model,
        params=counted.work.params,
        dtype=counted.dtype,
        quant=quant,
        weight_bytes=counted.weight_bytes,
        phases=phases,
        batch_size=batch,
        prompt_len=prompt,
        context_len=context,
        model_flops=ones * work.model_flops,
        model_bytes=ones * work.model_bytes,
        cache_bytes=ones * fused.cache_bytes,
        needs_bytes=ones * fused.peak_bytes,
        prefix=prefix,
        note="; ".join(filter(None, (stored_note(quant, counted), beyond))),
        gpus=tuple(
            GpuFloors(
                *ceiling_times(counted.work, step, ceilings, counted.dtype),
                ceilings,
                needs(fuses=ceilings.fuses_grouped_heads),
                served_bytes,
            )
            for ceilings in gpus
        ),
    )


def _points(
    batch_sizes: Sequence[int], prompt_lens: Sequence[int], context_lens: Sequence[int], prefix: int
) -> tuple[tuple[Phase, ...], _Integers, _Integers, _Integers]:
    """Phase, batch size, prompt and context of each point: first all prefills, then all decodes."""
    number = len(batch_sizes) * (len(prompt_lens) + len(context_lens))
    if number > MOST_GRID_POINTS:
        raise RequestError(f"this grid has {number:,} points; use at most {MOST_GRID_POINTS:,}.")
    prefills = [(batch, prompt, prefix) for batch in batch_sizes for prompt in prompt_lens]
    decodes = [(batch, 0, context) for batch in batch_sizes for context in context_lens]
    batch, prompt, context = np.array([*prefills, *decodes], dtype=np.int64).reshape(-1, 3).T
    prefill, decode = PHASES
    return (prefill,) * len(prefills) + (decode,) * len(decodes), batch, prompt, context


def check_countable(grid: GridCount, work: ModelWork) -> None:
    """Raise RequestError if 64-bit integers cannot count the FLOPs of the largest steps of the grid."""
    tokens = grid.batch_size * np.maximum(grid.prompt_len - grid.prefix, 1.0)
    for at in {int(np.argmax(tokens)), int(np.argmax(tokens * (grid.prompt_len + grid.context_len)))}:
        batch, prompt, context = (int(each[at]) for each in (grid.batch_size, grid.prompt_len, grid.context_len))
        if work.work(Step(batch, max(prompt - grid.prefix, 1), context)).model_flops > np.iinfo(np.int64).max:
            raise RequestError(f"a step of batch {batch} is more work than 64-bit integers can count.")
