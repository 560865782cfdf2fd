"""What ran, and what would change the time: kernels, formats and caches, levers, other GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from profiler.facts.measurements import COMPILED, DYNAMIC_CACHE, EIGHT_BIT_CACHE, PADDING_MASK, UNQUANTISED, BatchTimes
from profiler.judge.cells import CellEvidence
from profiler.quant.registry import tried_formats
from profiler.report.blocks import DOCUMENTS, FULL, Lines, Section, text_table
from profiler.report.selection import evidence_of, first_engine, selected_cells
from profiler.report.time_breakdown import WORTH_SHOWING
from profiler.store.folder import Run
from profiler.units import duration, percent, saving, scaled, significant

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
    """Part, execution path, and the time that its variants save or cost in the cell in which they were tried."""
    if not run.measured:
        return None
    model, first, device = run.model, _first_tried(run), run.document.device
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
    if path := run.document.counting.paths.get(f"{first_engine(run)} decode"):
        kept = _CACHE_WORDS[path.cache] + (f": {path.cache_format.name}" if path.cache_format else "")
        rows.append(("cache", kept, _instead(first, *_CACHES, COMPILED)))
    for name, item in run.document.engine.owned.items():
        cache = f"{scaled(item.cache_bytes, 'B')} reserved for its cache"
        rows.append((name, f"{item.version}; {cache}; loaded, compiled and warm after {duration(item.load_s)}", ""))
    if device.kind == "cpu":
        fewer = f"{device.threads // 2} of {device.threads} threads"
        rows.append(("threads", str(device.threads), _instead(first, fewer)))
    elif "MIG" in device.name:
        rows.append(("card", f"a slice of one: {device.name}", ""))
    headings = ("part", "what ran here", f"tried in its place at {first.key.name}" if first else "")
    blocks = [text_table(headings, rows, wrapped=headings[1:]), Lines(packed_lines(run))]
    return Section("What ran", blocks, "reported by the libraries on this device", FULL)


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


def packed_lines(run: Run) -> list[str]:
    """Return at which batches the packed format pays; nothing for dense models, or if it was not measured."""
    packed = run.document.packed_batches
    if packed is None or not packed.times:
        return []
    ends = dict.fromkeys((packed.times[0], packed.times[-1]))
    seconds = " and ".join(
        f"{duration(item.packed_s)} against {duration(item.dense_s)} at batch {item.batch}" for item in ends
    )
    return [
        f"{packed.format} ({packed.kernel}) against dense {packed.dense_dtype}, all packed linears of a decode step:"
        f" {paying_batches(packed.times)} ({seconds})"
    ]


_PAYS = {True: "packed weights are faster", False: "dense weights are faster", None: "the rounds disagree"}


def paying_batches(times: Sequence[BatchTimes]) -> str:
    """Return in words at which batches the packed format pays; empty without times."""
    parts = []
    for pays, of_side in groupby(times, key=lambda item: item.pays):
        batches = [item.batch for item in of_side]
        parts.append(f"{_PAYS[pays]} at batch {' to '.join(map(str, dict.fromkeys((batches[0], batches[-1]))))}")
    return "; ".join(parts)


def levers(run: Run) -> Section:
    """Cell, change, time saved (or lost), its share and the reason, for the cells of `selected_cells`."""
    evidence = evidence_of(run)
    rows = [
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
    note = (
        "measured in this run, tried on this device, or computed from the cell's breakdown; a negative saving is a cost"
    )
    headings = ("cell", "change", "saves", "of the step", "because")
    return Section("What would change it", [text_table(headings, rows, wrapped=("change", "because"))], note, DOCUMENTS)


def other_gpus(run: Run) -> Section | None:
    """The most tokens/s that other GPUs' datasheets allow the cells of `selected_cells`."""
    evidence, shown = evidence_of(run), selected_cells(run)
    gpus = list(dict.fromkeys(name for item in evidence.values() for name in item.at_least_s_on))
    if not gpus:
        return None
    rows = [["here, measured", *(significant(result.tokens_per_s) for result in shown)]]
    for gpu in gpus:
        floors_s = [evidence[result.key].at_least_s_on.get(gpu) if result.key in evidence else None for result in shown]
        allowed = [
            significant(result.tokens_per_s * result.latency_s / floor_s) if floor_s else "does not fit"
            for result, floor_s in zip(shown, floors_s, strict=True)
        ]
        rows.append([gpu, *allowed])
    note = f"datasheet: the most tokens/s that their {run.model.dtype} roofs allow, without their host's dispatch"
    return Section("On other GPUs", [text_table(["", *(result.key.name for result in shown)], rows)], note, DOCUMENTS)
