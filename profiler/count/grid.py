"""The theory of a grid as tables, as a DataFrame, and as a JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.counting.floor import CLOSE, IN_CHUNKS, MOST, NEEDS_LESS
from profiler.counting.model_numbers import ModelNumbers
from profiler.data.ceiling_set import sustained_words
from profiler.data.free_memory import SURE_SHARE
from profiler.json_document import Document
from profiler.quant.registry import FORMATS, flag_of
from profiler.report.blocks import FIRST_LOOK, FULL_SCREEN, Block, Lines, Section, TextTable, text_table
from profiler.units import duration, percent, scaled, short_count, significant

if TYPE_CHECKING:
    import pandas as pd

    from profiler.counting.count import StepCount
    from profiler.counting.grid_count import GpuFloors, GridCount

_MOST_GPUS = 3
"""GPUs that a table of 80 columns has at most."""
_WORK_COLUMNS = ("phase", "batch", "tokens", "FLOPs", "bytes", "FLOP/byte", "KV cache", "memory")
_NUMBER_COLUMNS = (
    "GPU", "batch at most", "one prompt at a time", "longest prompt", "longest context", "model's limit",
    "tok/s at most", "linears bound by compute", "step bound by compute",
)  # fmt: skip
_GPU_COLUMNS = ("phase", "batch", "tokens", "floor", "tok/s at most", "bound by")


def grid_sections(grid: GridCount, numbers: ModelNumbers) -> list[Section]:
    """The model's own figures; a table of the work and one of the floors for each GPU, or one short table of both."""
    points = range(len(grid))
    starts = [n for n in points[1:] if grid.phases[n] != grid.phases[n - 1]]
    columns: tuple[Iterable[str], ...] = (
        grid.phases,
        map(str, grid.batch_size),
        map(str, grid.depth),
        (scaled(flops, "") for flops in grid.model_flops),
        (scaled(moved, "B") for moved in grid.model_bytes),
        map(significant, grid.intensity),
        (scaled(cached, "B") for cached in grid.cache_bytes),
        (scaled(needs, "B") for needs in grid.needs_bytes),
    )
    work = list(zip(*columns, strict=True))
    floors = [[_floor(grid, gpu, n) for n in points] for gpu in grid.gpus]
    tables: list[Block] = [text_table(_WORK_COLUMNS, work, groups=starts)]
    for gpu, of_gpu in zip(grid.gpus, floors, strict=True):
        rows = [[*work[n][:3], *of_gpu[n]] for n in points]
        tables.append(Lines(["", f"{gpu.ceilings.name}: {scaled(gpu.ceilings.bytes_per_s, 'B/s')}"]))
        tables.append(text_table(_GPU_COLUMNS, rows, texts=("bound by",), groups=starts))
        tables.append(Lines(list(_memory_notes(gpu))))
    fitting = {gpu.ceilings.name: bool(gpu.runs.any()) for gpu in grid.gpus}
    names = (gpu.ceilings.name.removesuffix(", datasheet") for gpu in grid.gpus[:_MOST_GPUS])
    brief = text_table(
        (*_WORK_COLUMNS[:5], *names),
        [[*work[n][:5], *(of_gpu[n][0] for of_gpu in floors[:_MOST_GPUS])] for n in points],
        caption="last columns: the floor of a step on each GPU" if floors else "",
        groups=starts,
    )
    return [
        Section("", [_title(grid), *number_blocks(numbers)]),
        Section("", [brief], media=FIRST_LOOK),
        Section("", tables, media=FULL_SCREEN),
        Section("", [next_step(grid, fitting, grid.depth[0], grid.batch_size[0])]),
    ]


def next_step(
    counted: GridCount | StepCount, gpus: Mapping[str, bool], tokens: int | float, batch: int | float, ranks: int = 1
) -> Lines:
    """What to do next: name a GPU, find a larger one, or measure what the floors leave out. `gpus` says which fit."""
    model, tp = counted.model + flag_of(counted.quant), f" --tp {ranks}" if ranks > 1 else ""
    runs = counted.quant in (("none",) if tp else FORMATS)  # `check_cut`
    gpu = next((name.removesuffix(", datasheet") for name, fits in gpus.items() if fits), "")
    if not gpus:
        step = "add --gpu, such as --gpu 'T4,H100 SXM', for the least time there"
    elif not gpu and not runs:
        step = "name a GPU with more memory; roofscope gpus lists them"
    elif not gpu:
        step = f"find a GPU on which it fits: roofscope rent {model}"
    elif not runs:
        step = f"compare another tool's figures with the floor: roofscope place FILE --model {model} --gpu '{gpu}'{tp}"
    else:
        shape = f"--prompt-lens {tokens or 1} --batch-sizes {batch}{tp}"
        step = f"measure what the floor leaves out, on {gpu}: roofscope run {model} {shape}"
    return Lines([f"next: {step}"])


def _memory_notes(gpu: GpuFloors) -> Iterator[str]:
    if gpu.tight.any():
        safe_bytes = gpu.need.safe_bytes[gpu.tight].max() / SURE_SHARE
        yield f"{CLOSE}; {scaled(safe_bytes, 'B')} of free memory are enough for these"
    if gpu.in_chunks.any():
        yield IN_CHUNKS
    if not gpu.runs.all():
        least_bytes = np.minimum(gpu.need.peak_bytes, gpu.served_bytes)[~gpu.runs].min()
        has, least = scaled(gpu.ceilings.room_bytes, "B"), scaled(least_bytes, "B")
        yield f"does not fit: the GPU has {has}, and the least of these needs {least}; {NEEDS_LESS}"


def _floor(grid: GridCount, gpu: GpuFloors, n: int) -> list[str]:
    if not gpu.runs[n]:
        return ["does not fit", "-", "-"]
    floor_s, how = gpu.floor_s[n], " (close)" if gpu.tight[n] else " (in chunks)" if gpu.in_chunks[n] else ""
    return [f"{duration(floor_s)}{how}", significant(grid.tokens[n] / floor_s), str(gpu.bound[n])]


def grid_frame(grid: GridCount) -> pd.DataFrame:
    """Return a row per point and GPU (per point without a GPU); units are in the names of the columns."""
    import pandas as pd

    points = pd.DataFrame(
        {
            "phase": grid.phases,
            "batch_size": grid.batch_size,
            "prompt_len": grid.prompt_len,
            "context_len": grid.context_len,
            "model_flops": grid.model_flops,
            "model_bytes": grid.model_bytes,
            "intensity": grid.intensity,
            "kv_bytes": grid.cache_bytes,
            "needs_bytes": grid.needs_bytes,
        }
    )
    if not grid.gpus:
        return points
    frames = [
        points.assign(
            gpu=gpu.ceilings.name,
            needs_bytes=gpu.need.peak_bytes,
            safe_bytes=gpu.need.safe_bytes,
            fits=gpu.fits,
            tight=gpu.tight,
            in_chunks=gpu.in_chunks,
            floor_s=np.where(gpu.runs, gpu.floor_s, np.nan),
            tokens_per_s_at_most=np.where(gpu.runs, grid.tokens / gpu.floor_s, np.nan),
            bound=np.where(gpu.runs, gpu.bound, ""),
        )
        for gpu in grid.gpus
    ]
    return pd.concat(frames, ignore_index=True)


@dataclass(frozen=True)
class GridRow:
    """One point of a grid on one GPU. Without a GPU, the last eight are missing."""

    phase: str
    batch_size: int
    prompt_len: int
    """0 for a decode."""
    context_len: int
    """Cached tokens before the step; for a prefill, those of `--prefix`."""
    model_flops: float
    model_bytes: float
    intensity: float
    """Model FLOPs per model byte."""
    kv_bytes: float
    """Of the KV cache at the end of the step."""
    needs_bytes: float
    """Weights, KV cache and workspace: all tensors at their peak."""
    gpu: str
    safe_bytes: float
    """The bytes with which the step runs, in whatever pieces free memory is."""
    fits: bool
    """Whether `needs_bytes` are at most what a model may take of the GPU's memory."""
    tight: bool
    """Whether it fits, but runs out of memory if free memory is in pieces."""
    in_chunks: bool
    """Whether a decode step fits only if its prompts are prefilled in chunks, as servers do."""
    floor_s: float | None
    """Sum over operators of max(FLOPs / peak, bytes / bandwidth); null where it does not fit in either way."""
    tokens_per_s_at_most: float | None
    """New tokens / floor; null where it does not fit."""
    bound: str
    """`compute` or `memory`: the side on which the larger part of the floor lies; empty where it does not fit."""


@dataclass(frozen=True)
class GridDocument(Document):
    """`roofscope count MODEL --batch-sizes ... --format json`."""

    model: str
    params: int
    dtype: str
    quant: str
    weight_bytes: int
    note: str
    """On the format of the weights, and on sequences beyond the model's own limit."""
    numbers: ModelNumbers
    rows: Sequence[GridRow]
    """The rows of `--format csv`: one per point and GPU."""


def grid_document(grid: GridCount, numbers: ModelNumbers) -> GridDocument:
    """Return the document of a grid; what does not fit has no floor (null)."""
    frame = grid_frame(grid)
    records: Any = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return GridDocument(grid.model, grid.params, grid.dtype, grid.quant, grid.weight_bytes, grid.note, numbers, records)


def _title(grid: GridCount) -> Lines:
    quant = "" if grid.quant == "none" else f" {grid.quant}"
    title = f"{grid.model}: {short_count(grid.params)} parameters, {grid.dtype}{quant}"
    prefix = f"; the first {grid.prefix} tokens of every prompt are cached once, and prefills run the others"
    return Lines([title + (prefix if grid.prefix else ""), *([f"note:         {grid.note}"] if grid.note else [])])


def number_blocks(numbers: ModelNumbers) -> list[Block]:
    """Return the architecture, the parameters, the KV cache, and what each GPU allows."""
    widths = numbers.architecture
    params = sum(numbers.params_by_group.values())
    groups = ", ".join(
        f"{name.replace('_', ' ')} {short_count(count)} ({percent(count / params)})"
        for name, count in numbers.params_by_group.items()
        if count
    )
    experts = f", {widths.experts_per_token:.3g} of {widths.experts} experts per token" if widths.experts else ""
    heads = ", " + " or ".join(f"{query} heads ({kv} KV heads) of {width}" for query, kv, width in widths.heads)
    kinds = "" if widths.attention_layers >= widths.layers else f", {widths.attention_layers or 'none'} with attention"
    lines = [
        f"architecture: {widths.layers} layers{kinds}, width {widths.hidden_size}"
        f"{heads if widths.attention_layers else ''}, vocabulary {widths.vocabulary}{experts}",
        f"parameters:   {groups}",
        *_used(numbers, params),
        *_kept(numbers),
    ]
    if widths.attention_layers:
        half = _at(numbers, numbers.attention_is_half_at, "half of the FLOPs of a decode step")
        lines.append(f"attention:    {half}")
    sustained = [sustained_words(gpu.gpu, gpu.bytes_per_s, gpu.sustained_bytes_per_s) for gpu in numbers.gpus]
    return [Lines(lines), _gpu_table(numbers), Lines([sentence for words in sustained for sentence in words])]


def _used(numbers: ModelNumbers, params: int) -> Iterator[str]:
    used, but_table = numbers.used_params, numbers.used_params_but_table
    if used < params:
        table = f", {short_count(but_table)} without the embedding table" if but_table < used else ""
        yield f"used:         {short_count(used)} of {short_count(params)} parameters per token of text{table}"


def _kept(numbers: ModelNumbers) -> Iterator[str]:
    slopes = f"{scaled(numbers.kv_bytes_per_token, 'B')} per token"
    if numbers.kv_bytes_per_later_token != numbers.kv_bytes_per_token:
        until = f" up to {numbers.windows_full_at:,}" if numbers.windows_full_at else ""
        later = numbers.kv_bytes_per_later_token
        slopes += f"{until}, then {scaled(later, 'B') if later > 0 else 'no more'}"
    if numbers.kv_bytes_per_token or numbers.kv_bytes_per_sequence:
        large = _at(numbers, numbers.kv_equals_weights_at, "as large as the weights")
        sequence = f"{scaled(numbers.kv_bytes_per_sequence, 'B')} per sequence of {numbers.context_len} tokens"
        yield f"KV cache:     {slopes}; {sequence}; {large}"
    if numbers.state_bytes_per_sequence:
        yield f"state:        {scaled(numbers.state_bytes_per_sequence, 'B')} per sequence, whatever its length"


def _at(numbers: ModelNumbers, tokens: int | None, what: str) -> str:
    if tokens:
        return f"{what} at {tokens:,} tokens"
    if numbers.kv_bytes_per_later_token > 0:
        return f"not {what} up to {MOST:,} tokens"
    return f"never {what}, since its windows or its state limit it"


def _gpu_table(numbers: ModelNumbers) -> TextTable:
    rows = [
        [
            gpu.gpu.removesuffix(", datasheet"),
            *map(_most, (gpu.largest_batch, gpu.largest_batch_one_by_one, gpu.longest_prompt, gpu.longest_context)),
            f"{numbers.max_positions:,}" if numbers.max_positions else "-",
            significant(gpu.tokens_per_s_at_most) if gpu.tokens_per_s_at_most else "-",
            _batch(gpu.linears_compute_bound_from_batch),
            _batch(gpu.compute_bound_from_batch),
        ]
        for gpu in numbers.gpus
    ]
    caption = (
        f"Decode after {numbers.context_len} cached tokens. Prompts run together, or one at a time in chunks as in"
        " servers. Of one sequence: the longest prompt that fits in one step, the longest context that fits in chunks,"
        " tok/s. Compute limits from the batch on that is shown."
    )
    return text_table(_NUMBER_COLUMNS, rows, caption=caption)


def _most(number: int) -> str:
    return "no limit" if number >= MOST else f"{number:,}" if number else "none fits"


def _batch(batch: int | None) -> str:
    return "never" if batch is None else f"from {batch}"
