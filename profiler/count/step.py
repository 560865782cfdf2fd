"""A counted step as text, tables, CSV and a JSON document."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from profiler.count.grid import number_blocks
from profiler.counting.count import RankShare, SharedPrefix, StepCount
from profiler.counting.crosscheck import Crosscheck
from profiler.counting.floor import TIGHT, GpuRow
from profiler.counting.model_numbers import ModelNumbers
from profiler.counting.operators import ModelWork, Operator
from profiler.facts.operators import GemmShape
from profiler.facts.step import ExecutionPath, Work, bytes_by_kind, plain_number
from profiler.json_document import Document, view
from profiler.quant.checkpoints import Gguf
from profiler.report.blocks import FIRST_LOOK, FULL_SCREEN, Lines, Section, TextTable, text_table
from profiler.report.time_breakdown import GEMM_FIT, gemm_fit
from profiler.units import duration, percent, scaled, several, short_count, significant


def count_sections(counted: StepCount, numbers: ModelNumbers | None) -> list[Section]:
    """A counted step: its totals, the model's own figures, its time on GPUs, and its operators."""
    share, check, whole = counted.share, counted.crosscheck, counted.whole
    dense = whole.work.dense_instead if whole else ()
    unruled = f"{', '.join(dense)}: attends to a choice of keys by a rule that is not known, and is counted as dense"
    unknown = f"{100 * (1 - counted.coverage):.3g} % of the parameters are not understood: {'; '.join(counted.unknown)}"
    blocks = [
        Lines(_totals(counted)),
        Lines([_one_rank(share)] if share else []),
        Lines(list(_crosscheck_lines(check)) if check else []),
        Lines([unknown] if counted.unknown else [], "warning"),
        Lines([unruled] if dense else [], "warning"),
        *(number_blocks(numbers) if numbers else []),
        _gpus(counted.gpus),
        Lines([*_gpu_notes(counted.gpus, counted.dtype), *_verifying(counted.gpus)]),
        *([_collectives(share)] if share else []),
        _gemms(counted.gemms),
    ]
    return [
        Section("", blocks),
        Section("", [_groups(counted.by_operator, each=False)], media=FIRST_LOOK),
        Section("", [_groups(counted.by_operator, each=True)], media=FULL_SCREEN),
    ]


def _totals(counted: StepCount) -> list[str]:
    work, step = counted.work, counted.step
    verified = counted.phase == "decode" and int(step.query) > 1
    moved = bytes_by_kind(work)
    quant = "" if counted.quant == "none" else f" {counted.quant}"
    parts = ", ".join(
        f"{name.replace('_', ' ').replace('kv', 'KV')} {scaled(value, 'B')}"
        for name, value in moved.items()
        if value and name != "total"
    )
    avoidable = ", ".join(
        f"{cause} {scaled(float(value), 'B')}" for cause, value in work.avoidable_bytes.items() if value
    )
    return [
        f"{counted.model}: {short_count(counted.params)} parameters, {counted.dtype}{quant};"
        f" {counted.phase} at batch {step.batch}: {several(int(step.query), 'token', 'tokens')} each"
        + (f" after {step.context} cached" if step.context else "")
        + (f", {several(int(step.query) - 1, 'draft', 'drafts')} verified" if verified else ""),
        f"model work: {plain_number(work.model_flops):,} FLOPs over {moved['total']:,.0f} bytes,"
        f" intensity {significant(float(work.intensity), 4)} FLOP/byte",
        f"            {parts}",
        f"executed:   {plain_number(work.executed_flops):,} FLOPs over up to {scaled(float(work.executed_bytes), 'B')}"
        + (f"; avoidable: {avoidable}" if avoidable else ""),
        *([f"stored:     {_as_published(counted.published)}"] if counted.published else []),
        *([f"stored:     {_dequantised(counted.gguf, counted.dtype)}"] if counted.gguf and counted.gguf.types else []),
        *(_prefix(counted.prefix, int(step.batch)) if counted.prefix else []),
        *([f"note:       {counted.note}"] if counted.note else []),
        *([f"pictures:   {_tower(counted.whole.work)}"] if counted.whole and counted.whole.work.tower_params else []),
    ]


def _prefix(prefix: SharedPrefix, batch: int) -> list[str]:
    """Return what a prefix saves, and what is counted: it is read once, whatever the kernel does."""
    saved = f"{scaled(prefix.saved_flops, '')} FLOPs ({percent(prefix.saved_share)}) of the prefill"
    kept = f"{scaled(prefix.cache_bytes, 'B')} of KV cache in place of {scaled(prefix.unshared_cache_bytes, 'B')}"
    once = "" if batch == 1 else "; a step is counted as if it read the prefix once for all sequences"
    return [f"prefix:     its {prefix.tokens} tokens save {saved}; {kept}{once}"]


def _tower(work: ModelWork) -> str:
    side = work.picture_pixels
    flops = f"; about {scaled(work.tower_flops, 'FLOPs')} for one of {side} x {side} pixels" if work.tower_flops else ""
    return f"towers of {short_count(work.tower_params)} parameters, which a step of text does not run{flops}"


def _as_published(name: str) -> str:
    """Return the checkpoint's format. MXFP4 covers only the experts; which layers other formats leave dense differs."""
    return f"{'experts' if name == 'mxfp4' else 'weights'} as published: {name.upper()}"


def _dequantised(file: Gguf, dtype: str) -> str:
    condition = " where it has no kernel for the device" if file.kept_by_kernels else ""
    return f"dequantised from {file.name} to {dtype}, as transformers loads it{condition}"


def _groups(operators: Sequence[tuple[Operator, Work]], *, each: bool) -> TextTable:
    """Return a row per group of operators, and one for `each` operator in it; else the groups with most bytes first."""
    flops = sum(float(work.model_flops) for _, work in operators) or 1
    moved = sum(float(work.model_bytes) for _, work in operators) or 1
    groups: dict[str, list[tuple[Operator, Work]]] = {}
    for operator, work in operators:
        if work.model_flops or work.model_bytes:
            groups.setdefault(operator.group, []).append((operator, work))
    rows: list[list[str]] = []
    starts = []
    by_bytes = sorted(groups.items(), key=lambda item: -sum(float(work.model_bytes) for _, work in item[1]))
    for group, items in groups.items() if each else by_bytes:
        starts.append(len(rows))
        count = str(sum(operator.count for operator, _ in items))
        rows.append([group.replace("_", " "), count, *_figures([work for _, work in items], flops, moved)])
        if each:
            rows += [
                [f"  {operator.name}", str(operator.count), *_figures([work], flops, moved)] for operator, work in items
            ]
    headings = ("operator", "count", "FLOPs", "share", "bytes", "share", "FLOP/byte")
    return text_table(headings, rows, groups=starts if each else (), ranked=not each)


def _figures(items: Sequence[Work], all_flops: float, all_bytes: float) -> list[str]:
    flops = sum(float(work.model_flops) for work in items)
    moved = sum(float(work.model_bytes) for work in items)
    return [
        scaled(flops, ""),
        f"{100 * flops / all_flops:.1f} %",
        scaled(moved, "B"),
        f"{100 * moved / all_bytes:.1f} %",
        significant(flops / moved) if moved else "-",
    ]


def _one_rank(share: RankShare) -> str:
    copied = f" ({share.replicated_kv_heads} KV heads, each held by several)" if share.replicated_kv_heads else ""
    return (
        f"one rank:   all of this is one of {share.ranks} ranks': it holds {scaled(share.weight_bytes, 'B')} of weights"
        f" and {scaled(share.cache_bytes, 'B')} of KV cache{copied}, and sends {scaled(share.bus_bytes, 'B')} per step"
    )


def _collectives(share: RankShare) -> TextTable:
    rows = [[item.name, str(item.count), scaled(item.bytes, "B")] for item in share.collectives]
    return text_table(("collective", "count", "bytes of one"), rows)


def _gemms(gemms: Sequence[GemmShape]) -> TextTable:
    """Return the census: m x n x k, and how well matrix units fit each shape."""
    rows = [[*map(str, (gemm.m, gemm.n, gemm.k)), gemm.dtype, str(gemm.count), *gemm_fit([gemm])] for gemm in gemms]
    return text_table(("m", "n", "k", "dtype", "count", *GEMM_FIT), rows, texts=("dtype",))


def _gpus(gpus: Sequence[GpuRow]) -> TextTable:
    """Return a table of the GPUs that the step fits."""
    rows = [
        [
            gpu.gpu,
            significant(gpu.ridge_flops_per_byte),
            duration(gpu.floor_s),
            gpu.bound or "-",
            scaled(gpu.needs_bytes, "B"),
            scaled(gpu.room_bytes, "B"),
        ]
        for gpu in gpus
        if gpu.floor_s is not None and gpu.ridge_flops_per_byte is not None
    ]
    headings = ("GPU", "ridge FLOP/byte", "floor", "bound by", "needs", "has room for")
    return text_table(headings, rows, texts=("bound by",))


def _gpu_notes(gpus: Sequence[GpuRow], dtype: str) -> list[str]:
    """Return a line for each GPU that the step does not or hardly fit, or whose matrix units need another dtype."""
    lines = []
    for gpu in gpus:
        if gpu.refusal:
            lines.append(gpu.refusal)
            continue
        if gpu.tight:
            lines.append(f"{gpu.gpu}: {TIGHT}; room for {scaled(gpu.safe_bytes, 'B')} is enough")
        if gpu.dtype != dtype:
            lines.append(f"{gpu.gpu}: has no {dtype} units; its floor is that of {gpu.dtype}")
    return lines


def _verifying(gpus: Sequence[GpuRow]) -> Iterator[str]:
    """Yield from how many accepted drafts on verifying pays on each GPU."""
    costs = {gpu: gpu.floor_s / gpu.one_token_floor_s for gpu in gpus if gpu.floor_s and gpu.one_token_floor_s}
    for gpu, cost in costs.items():
        pays = "do not pay, even if all are accepted"
        if gpu.pays_from is not None:
            each = f"each with a probability of {percent(gpu.pays_from)}"
            pays = f"pay from {significant(cost - 1)} accepted per step on: {each}"
        yield f"{gpu.gpu}: {significant(cost)} times the floor of one token, so drafts {pays}"
    if costs:
        yield "Drafting itself is taken as free, as it nearly is from n-grams; a draft model's steps come on top."


def _crosscheck_lines(check: Crosscheck) -> Iterator[str]:
    if check.equal:
        yield f"second opinion: {check.counter} counts {check.flops:,} executed FLOPs as well: equal"
    else:
        yield f"second opinion: {check.counter} counts {check.flops:,}, the walk {check.walk_flops:,}:"
    for item in check.differences:
        yield f"  {item.module or '(the model itself)'}: {item.counter_flops:,}, not {item.walk_flops:,}"
    for item in check.left_out:
        yield f"  left out: {item.module}, for whose angles or recurrence it has {item.counter_flops:,} FLOPs"


Number = int | float
_CSV_COLUMNS = ("name", "group", "count", "dtype", "model_flops", "executed_flops", "model_bytes", "executed_bytes")


@dataclass(frozen=True)
class OperatorRow:
    """The work of one operator in the step."""

    name: str
    group: str
    count: int
    """Equal operators in the model; the figures are their sum."""
    dtype: str
    model_flops: Number
    executed_flops: Number
    vector_flops: Number
    weight_bytes: Number
    kv_read_bytes: Number
    kv_write_bytes: Number
    model_bytes: Number
    executed_bytes: Number
    link_bytes: Number


@dataclass(frozen=True)
class ExecutedBytes:
    """Executed bytes beyond model bytes."""

    activations: Number
    avoidable: Mapping[str, Number]
    """By cause."""
    total: Number


@dataclass(frozen=True)
class CountDocument(Document):
    """`roofscope count --format json`."""

    model: str
    params: int
    dtype: str
    quant: str
    published: str | None
    """The packed format of the published checkpoint, in which weights are counted; null: dense, or as requested."""
    gguf: Gguf | None
    """The formats in a GGUF file; its weights are counted dense, as transformers loads them."""
    note: str
    """The note of the model's preset, or the format from which transformers unpacks the weights."""
    phase: str
    batch: Number
    query_tokens: Number
    context_tokens: Number
    model_flops: Number
    executed_flops: Number
    vector_flops: Number
    bytes: Mapping[str, Number]
    """Model bytes by kind, and their total."""
    executed_bytes: ExecutedBytes
    avoidable_flops: Mapping[str, Number]
    """By cause."""
    intensity: float
    """Model FLOPs per model byte."""
    coverage: float
    """Share of the parameters that the count understands."""
    unknown: Sequence[str]
    path: ExecutionPath
    operators: Sequence[OperatorRow]
    tp: RankShare | None = None
    """Only with `--tp`: the share of one rank."""
    gemms: Sequence[GemmShape] | None = None
    """Only with `--gemm-census`."""
    gpus: Sequence[GpuRow] | None = None
    """Only with `--gpu`: the floor on each GPU, or why there is none."""
    crosscheck: Crosscheck | None = None
    """Only with `--crosscheck`."""
    prefix: SharedPrefix | None = None
    """Only with `--prefix`."""
    numbers: ModelNumbers | None = None
    """The architecture, the KV cache, and what each GPU allows; not with `--tp`."""


def count_document(counted: StepCount, numbers: ModelNumbers | None = None) -> CountDocument:
    """Return the document of a counted step."""
    work, step = counted.work, counted.step
    return view(
        CountDocument,
        counted,
        batch=plain_number(step.batch),
        query_tokens=plain_number(step.query),
        context_tokens=plain_number(step.context),
        model_flops=plain_number(work.model_flops),
        executed_flops=plain_number(work.executed_flops),
        vector_flops=plain_number(work.vector_flops),
        bytes=bytes_by_kind(work),
        executed_bytes=ExecutedBytes(
            plain_number(work.activation_bytes),
            {cause: plain_number(value) for cause, value in work.avoidable_bytes.items()},
            plain_number(work.executed_bytes),
        ),
        avoidable_flops={cause: plain_number(value) for cause, value in work.avoidable_flops.items()},
        intensity=float(work.intensity),
        operators=[_operator_row(operator, part) for operator, part in counted.by_operator],
        tp=counted.share,
        gemms=counted.gemms or None,
        gpus=counted.gpus or None,
        numbers=numbers,
    )


def _operator_row(operator: Operator, work: Work) -> OperatorRow:
    amounts = (plain_number(getattr(work, item.name)) for item in fields(OperatorRow)[4:])
    return OperatorRow(operator.name, operator.group, operator.count, operator.dtype_name, *amounts)


def count_csv(counted: StepCount) -> str:
    """Return the operators as CSV, with unrounded numbers."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, _CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in count_document(counted).operators:
        writer.writerow(vars(row))
    return buffer.getvalue()
