"""What ran, and what would change the time: kernels, formats and caches, levers, other GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from profiler.facts.measurements import COMPILED, DYNAMIC_CACHE, EIGHT_BIT_CACHE, PADDING_MASK, UNQUANTISED, BatchTimes
from profiler.facts.scheduler import OwnedModel
from profiler.judge.cells import CellEvidence, CellResult
from profiler.quant.registry import tried_formats
from profiler.report.blocks import DOCUMENTS, FULL, Lines, Section, text_table
from profiler.report.selection import evidence_of, first_engine, selected_cells
from profiler.report.time_breakdown import WORTH_SHOWING
from profiler.store.folder import Run
from profiler.units import duration, percent, saving, scaled, significant

RAN_COLUMNS = ("part", "what ran here", "tried in its place")
_CACHE_WORDS = {
    "dynamic": "dynamic, copied at every step",
    "static": "static, read to its last slot",
    "paged": "paged, written in place",
    "quantized": "quantised, converted at every step",
}
_CACHES = (DYNAMIC_CACHE, "a static cache", EIGHT_BIT_CACHE)
_DTYPES = ("float32", "bfloat16", "float16")
_DENSE = tuple(UNQUANTISED + dtype for dtype in _DTYPES)
_EXPERTS = ("grouped_mm experts", "batched_mm experts", "eager experts")
_KERNELS = tuple(f"{name} attention" for name in ("math", "flash", "memory-efficient", "cudnn"))
_MASKED = (PADDING_MASK, *(f"{PADDING_MASK} and {name}" for name in _KERNELS))
# A dtype whose matmul throughput is below this share of float32's is emulated.
_EMULATED_SHARE = 0.9


def ran(run: Run) -> Section | None:
    if not run.measured:
        return None
    cell = trial_cell(run)
    headings = (*RAN_COLUMNS[:2], f"{RAN_COLUMNS[2]} at {cell}" if cell else "")
    table = text_table(headings, ran_rows(run), wrapped=headings[1:])
    packed = packed_line(run)
    return Section(
        "What ran", [table, Lines([packed] if packed else [])], "reported by the libraries on this device", FULL
    )


def ran_rows(run: Run) -> list[tuple[str, str, str]]:
    """Return part, execution path, and the time that its variants save or cost in the cell of `trial_cell`."""
    model, first = run.model, _first_tried(run)
    rows = [("arithmetic", _arithmetic(run), _instead(first, *_DTYPES))]
    # The modules of an engine that owns its model cannot be read.
    if first_engine(run) not in run.document.engine.owned:
        formats = _instead(first, *(item.name for item in tried_formats()), *_DENSE)
        rows += [
            (f"{count} linear{'' if count == 1 else 's'}", kind, "" if number else formats)
            for number, (kind, count) in enumerate(model.linears.items())
        ]
        kernels = _instead(first, *_KERNELS, *_MASKED)
        rows += [(name, text, kernels if name == "decode attention" else "") for name, text in _attention(run)]
    if model.experts is not None:
        rows.append(("experts", model.experts, _instead(first, *_EXPERTS)))
    rows += [
        (
            "cache",
            _CACHE_WORDS[path.cache] + (f": {path.cache_format.name}" if path.cache_format else ""),
            _instead(first, *_CACHES, COMPILED),
        )
        for name, path in run.document.counting.paths.items()
        if name == f"{first_engine(run)} decode"
    ]
    rows += [(name, _owned(item), "") for name, item in run.document.engine.owned.items()]
    threads = run.document.device.threads
    if run.document.device.kind == "cpu":
        rows.append(("threads", str(threads), _instead(first, f"{threads // 2} of {threads} threads")))
    elif "MIG" in run.document.device.name:
        rows.append(("card", f"a slice of one: {run.document.device.name}", ""))
    return rows


def _owned(item: OwnedModel) -> str:
    """Return version, chosen kernels, memory and load time of an engine that owns its model."""
    chosen = f"attention {item.attention}, linears {item.linears}; " if item.attention else ""
    return (
        f"{item.version}, {item.how}; {chosen}{scaled(item.weight_bytes, 'B')} of weights;"
        f" {scaled(item.cache_bytes, 'B')} reserved for {item.cache_tokens} tokens in blocks of {item.block_tokens},"
        f" {scaled(item.cache_used_bytes, 'B')} used at most; up to {item.tokens_an_iteration} tokens per iteration;"
        f" loaded, compiled and warm after {duration(item.load_s)}"
    )


def trial_cell(run: Run) -> str:
    """Return the name of the cell in which variants were tried; empty without trials."""
    first = _first_tried(run)
    return first.key.name if first else ""


def _first_tried(run: Run) -> CellEvidence | None:
    """Return the smallest decode step with a tried variant, or else the smallest such prefill."""
    candidates = [item for item in evidence_of(run).values() if any(lever.basis == "tried" for lever in item.levers)]
    return min(candidates, key=lambda item: (item.phase == "prefill", item.batch_size, item.prompt_len), default=None)


def _arithmetic(run: Run) -> str:
    dtype, ceilings = run.model.dtype, run.document.ceilings.ceilings
    roof, float32 = ceilings.compute.get(dtype), ceilings.compute.get("float32")
    if roof is None or float32 is None or run.document.device.kind != "cpu" or dtype == "float32":
        return dtype
    if roof.per_s < _EMULATED_SHARE * float32.per_s:
        return f"{dtype}, emulated: products reach {percent(roof.per_s / float32.per_s)} of float32's"
    return f"{dtype}, native: products reach {scaled(roof.per_s, 'FLOP/s')}"


def _attention(run: Run) -> Iterator[tuple[str, str]]:
    for name, path in run.document.counting.paths.items():
        engine, _, phase = name.rpartition(" ")
        if engine != first_engine(run):
            continue
        if path.attention == "sdpa":
            masked = "" if path.masked_kernel == path.kernel else f", {path.masked_kernel} where a mask is passed"
            yield f"{phase} attention", f"sdpa, {path.kernel} kernel{masked}"
        else:
            yield f"{phase} attention", path.attention


def _instead(evidence: CellEvidence | None, *variants: str) -> str:
    """Return what each tried variant saves or costs; empty if none was tried."""
    return "; ".join(
        f"{lever.change} {saving(lever.saves_s)}"
        for lever in (evidence.levers if evidence else ())
        if lever.basis == "tried" and lever.change in variants
    )


def packed_line(run: Run) -> str | None:
    """Return up to which batch the packed format pays; None for dense models, or if it was not measured."""
    packed = run.document.packed_batches
    if packed is None or not packed.times:
        return None
    ends = dict.fromkeys((packed.times[0], packed.times[-1]))
    seconds = " and ".join(
        f"{duration(item.packed_s)} against {duration(item.dense_s)} at batch {item.batch}" for item in ends
    )
    return (
        f"{packed.format} ({packed.kernel}) against dense {packed.dense_dtype}, all packed linears of a decode step:"
        f" {paying_batches(packed.times)} ({seconds})"
    )


def paying_batches(times: Sequence[BatchTimes]) -> str:
    """Return in words where the packed format pays; empty without times.

    The break-even batch is between the last batch of one side and the first of the other. Between them the rounds
    disagree, or no batch was timed.
    """
    if not times:
        return ""
    first, last = times[0].batch, times[-1].batch
    packed, dense = ([item.batch for item in times if item.pays is pays] for pays in (True, False))
    if not packed and not dense:
        return f"packed and dense weights are equally fast at batches {first} to {last}"
    if packed and dense and max(packed) < min(dense):
        return f"packed weights are faster up to batch {max(packed)}, dense ones from batch {min(dense)} on"
    if packed and dense and max(dense) < min(packed):
        return f"dense weights are faster up to batch {max(dense)}, packed ones from batch {min(packed)} on"
    if packed and dense:
        return f"packed weights are faster only at batches {', '.join(map(str, packed))}"
    side, batches = ("packed", packed) if packed else ("dense", dense)
    if len(batches) == len(times):
        return f"{side} weights are faster at batches {first} to {last}"
    of_batches = f"batch{'' if len(batches) == 1 else 'es'} {', '.join(map(str, batches))}"
    return f"{side} weights are faster at {of_batches}; at the others rounds disagree"


def levers(run: Run) -> Section:
    headings = ("cell", "change", "saves", "of the step", "because")
    note = (
        "measured in this run, tried on this device, or computed from the cell's breakdown; a negative saving is a cost"
    )
    table = text_table(headings, lever_rows(run), wrapped=("change", "because"))
    return Section("What would change it", [table], note, DOCUMENTS)


def lever_rows(run: Run) -> list[list[str]]:
    """Return cell, change, time saved (or lost), its share and the reason, for the cells of `selected_cells`."""
    evidence = evidence_of(run)
    return [
        [
            result.key.name,
            lever.change,
            lever.amount,
            percent(lever.saves_s / result.latency_s),
            f"{lever.basis}: {lever.because}",
        ]
        for result in selected_cells(run)
        if result.key in evidence
        for lever in evidence[result.key].levers
        if abs(lever.saves_s) >= WORTH_SHOWING * result.latency_s
    ]


def other_gpus(run: Run) -> Section | None:
    rows = card_rows(run)
    note = f"datasheet: the most tokens/s that their {run.model.dtype} roofs allow, without their host's dispatch"
    return Section("On other GPUs", [text_table(rows[0], rows[1:])], note, DOCUMENTS) if rows else None


def card_rows(run: Run) -> list[list[str]]:
    """Return the most tokens/s that other GPUs' datasheets allow the cells of `selected_cells`, after a heading.

    A cell that does not fit a GPU gets `does not fit`.
    """
    evidence, shown = evidence_of(run), selected_cells(run)
    cards = list(dict.fromkeys(name for item in evidence.values() for name in item.at_least_s_on))
    if not cards:
        return []
    rows = [["", *(result.key.name for result in shown)]]
    rows.append(["here, measured", *(significant(result.tokens_per_s) for result in shown)])
    return rows + [[card, *(_on_card(card, result, evidence.get(result.key)) for result in shown)] for card in cards]


def _on_card(card: str, result: CellResult, evidence: CellEvidence | None) -> str:
    floor_s = evidence.at_least_s_on.get(card) if evidence else None
    return significant(result.tokens_per_s * result.latency_s / floor_s) if floor_s else "does not fit"
