"""A counted step as text, tables, CSV and a JSON document."""

import csv
import io
from collections.abc import Iterator, Sequence

from profiler.count.grid import next_step, number_blocks
from profiler.counting.count import CountDocument, OperatorRow, RankShare, SharedPrefix, StepCount
from profiler.counting.crosscheck import Crosscheck
from profiler.counting.floor import CLOSE, IN_CHUNKS, GpuRow
from profiler.counting.model_numbers import ModelNumbers
from profiler.counting.operators import ModelWork
from profiler.data.free_memory import SURE_SHARE
from profiler.facts.operators import Amount, GemmShape
from profiler.json_document import view
from profiler.report.blocks import FIRST_LOOK, FULL_SCREEN, Lines, Section, TextTable, text_table
from profiler.units import duration, percent, scaled, several, short_count, significant


def count_sections(counted: StepCount, numbers: ModelNumbers | None) -> list[Section]:
    """A counted step: its totals, the model's own figures, its time on GPUs, and its operators."""
    share, check, whole, gpus = counted.tp, counted.crosscheck, counted.whole, counted.gpus or ()
    dense = whole.work.dense_instead if whole else ()
    unruled = f"{', '.join(dense)}: attends to a choice of keys by a rule that is not known, and is counted as dense"
    unknown = f"{100 * (1 - counted.coverage):.3g} % of the parameters are not understood: {'; '.join(counted.unknown)}"
    collectives = [[item.name, str(item.count), scaled(item.bytes, "B")] for item in share.collectives] if share else []
    fitting = {gpu.gpu: gpu.floor_s is not None for gpu in gpus}
    tokens = counted.query_tokens if counted.phase == "prefill" else counted.context_tokens
    blocks = [
        Lines(_totals(counted)),
        Lines([f"note:       {counted.note}"] if counted.note else []),
        Lines(_one_rank(share) if share else []),
        Lines(list(_crosscheck_lines(check)) if check else []),
        Lines([unknown] if counted.unknown else [], "warning"),
        Lines([unruled] if dense else [], "warning"),
        *(number_blocks(numbers) if numbers else []),
        _gpus(gpus),
        Lines([*_gpu_notes(gpus, counted.dtype), *_verifying(gpus)]),
        text_table(("collective", "count", "bytes of one"), collectives),
        _gemms(counted.gemms or ()),
    ]
    return [
        Section("", blocks),
        Section("", [_groups(counted.operators, each=False)], media=FIRST_LOOK),
        Section("", [_groups(counted.operators, each=True)], media=FULL_SCREEN),
        Section("", [next_step(counted, fitting, tokens, counted.batch, share.ranks if share else 1)]),
    ]


def _totals(counted: StepCount) -> list[str]:
    tokens, moved, executed = int(counted.query_tokens), counted.bytes, counted.executed_bytes
    verified = counted.phase == "decode" and tokens > 1
    quant = "" if counted.quant == "none" else f" {counted.quant}"
    parts = ", ".join(
        f"{name.replace('_', ' ').replace('kv', 'KV')} {scaled(value, 'B')}"
        for name, value in moved.items()
        if value and name != "total"
    )
    redundant = ", ".join(f"{cause} {scaled(value, 'B')}" for cause, value in executed.redundant.items() if value)
    return [
        f"{counted.model}: {short_count(counted.params)} parameters, {counted.dtype}{quant};"
        f" {counted.phase} at batch {counted.batch}: {several(tokens, 'token', 'tokens')} each"
        + (f" after {counted.context_tokens} cached" if counted.context_tokens else "")
        + (f", {several(tokens - 1, 'draft', 'drafts')} verified" if verified else ""),
        f"model work: {counted.model_flops:,} FLOPs over {moved['total']:,.0f} bytes,"
        f" intensity {significant(counted.intensity, 4)} FLOP/byte",
        f"            {parts}",
        f"executed:   {counted.executed_flops:,} FLOPs over up to {scaled(executed.total, 'B')}"
        + (f"; redundant: {redundant}" if redundant else ""),
        *_stored(counted),
        *([_prefix(counted.prefix, counted.batch)] if counted.prefix else []),
        *(_towers(counted.whole.work) if counted.whole else ()),
    ]


def _prefix(prefix: SharedPrefix, batch: Amount) -> str:
    saved = f"{scaled(prefix.saved_flops, '')} FLOPs ({percent(prefix.saved_share)}) of the prefill"
    kept = f"{scaled(prefix.cache_bytes, 'B')} of KV cache in place of {scaled(prefix.unshared_cache_bytes, 'B')}"
    once = "" if batch == 1 else "; a step is counted as if it read the prefix once for all sequences"
    return f"prefix:     its {prefix.tokens} tokens save {saved}; {kept}{once}"


def _towers(work: ModelWork) -> Iterator[str]:
    side = work.picture_pixels
    flops = f"; about {scaled(work.tower_flops, 'FLOPs')} for one of {side} x {side} pixels" if work.tower_flops else ""
    if params := dict(work.group_params).get("towers"):
        yield f"pictures:   towers of {short_count(params)} parameters, which a step of text does not run{flops}"


def _stored(counted: StepCount) -> Iterator[str]:
    if name := counted.published:
        yield f"stored:     {'experts' if name == 'mxfp4' else 'weights'} as published: {name.upper()}"
    if (file := counted.gguf) and file.types:
        condition = " where it has no kernel for the device" if file.kept_by_kernels else ""
        yield f"stored:     dequantised from {file.name} to {counted.dtype}, as transformers loads it{condition}"


def _groups(operators: Sequence[OperatorRow], *, each: bool) -> TextTable:
    """Return a row per group of operators, and one for `each` operator in it; else the groups with most bytes first."""
    flops = sum(item.model_flops for item in operators) or 1
    moved = sum(item.model_bytes for item in operators) or 1
    groups: dict[str, list[OperatorRow]] = {}
    for item in operators:
        if item.model_flops or item.model_bytes:
            groups.setdefault(item.group, []).append(item)
    rows: list[list[str]] = []
    starts = []
    by_bytes = sorted(groups.items(), key=lambda pair: -sum(item.model_bytes for item in pair[1]))
    for group, items in groups.items() if each else by_bytes:
        starts.append(len(rows))
        rows.append([group.replace("_", " "), str(sum(item.count for item in items)), *_figures(items, flops, moved)])
        for item in items if each else ():
            name = item.name.split("layers.", 1)[-1]  # all that a step of text runs have the same path before it
            rows.append([f"  {name}", str(item.count), *_figures([item], flops, moved)])
    return text_table(
        ("operator", "count", "FLOPs", "share", "bytes", "share", "FLOP/byte"),
        rows,
        groups=starts if each else (),
        ranked=not each,
    )


def _figures(items: Sequence[OperatorRow], all_flops: float, all_bytes: float) -> list[str]:
    flops, moved = sum(item.model_flops for item in items), sum(item.model_bytes for item in items)
    return [
        scaled(flops, ""),
        f"{100 * flops / all_flops:.1f} %",
        scaled(moved, "B"),
        f"{100 * moved / all_bytes:.1f} %",
        significant(flops / moved) if moved else "-",
    ]


def _one_rank(share: RankShare) -> list[str]:
    copied = f" ({share.replicated_kv_heads} KV heads, each held by several)" if share.replicated_kv_heads else ""
    held = f"{scaled(share.weight_bytes, 'B')} of weights and {scaled(share.cache_bytes, 'B')} of KV cache{copied}"
    sent = f"sends {scaled(share.bus_bytes, 'B')} per step"
    return [f"one rank:   all of this is one of {share.ranks} ranks': it holds {held}, and {sent}"]


def _gemms(gemms: Sequence[GemmShape]) -> TextTable:
    rows = []
    for gemm in gemms:
        sizes, aligned = map(str, (gemm.m, gemm.n, gemm.k)), "yes" if gemm.aligned else "no"
        rows.append([*sizes, gemm.dtype, str(gemm.count), percent(gemm.tiles_used), aligned])
    return text_table(("m", "n", "k", "dtype", "count", "of its tiles", "16-byte rows"), rows, texts=("dtype",))


def _gpus(gpus: Sequence[GpuRow]) -> TextTable:
    rows = []
    for gpu in gpus:
        if gpu.floor_s is not None and gpu.ridge_flops_per_byte is not None:
            rows.append(
                [
                    gpu.gpu,
                    significant(gpu.ridge_flops_per_byte),
                    duration(gpu.floor_s),
                    gpu.bound or "-",
                    scaled(gpu.needs_bytes, "B"),
                    scaled(gpu.room_bytes, "B"),
                ]
            )
    return text_table(
        ("GPU", "ridge FLOP/byte", "floor", "bound by", "needs", "free memory"), rows, texts=("bound by",)
    )


def _gpu_notes(gpus: Sequence[GpuRow], dtype: str) -> Iterator[str]:
    for gpu in gpus:
        if gpu.refusal:
            yield gpu.refusal
            continue
        if gpu.in_chunks:
            yield f"{gpu.gpu}: {IN_CHUNKS}"
        if gpu.tight:
            yield f"{gpu.gpu}: {CLOSE}; {scaled(gpu.safe_bytes / SURE_SHARE, 'B')} of free memory are enough"
        if gpu.dtype != dtype:
            yield f"{gpu.gpu}: has no {dtype} units; its floor is that of {gpu.dtype}"


def _verifying(gpus: Sequence[GpuRow]) -> Iterator[str]:
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


_CSV_COLUMNS = ("name", "group", "count", "dtype", "model_flops", "executed_flops", "model_bytes", "executed_bytes")


def count_document(counted: StepCount, numbers: ModelNumbers | None = None) -> CountDocument:
    return view(CountDocument, counted, numbers=numbers)


def count_csv(counted: StepCount) -> str:
    """Return the operators as CSV, with unrounded numbers."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, _CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in counted.operators:
        writer.writerow(vars(row))
    return buffer.getvalue()
