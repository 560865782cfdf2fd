"""The execution path: kernels, formats and caches that ran, each with the variants tried in its place."""

from __future__ import annotations

from collections.abc import Iterator

from profiler.facts.measurements import COMPILED, DYNAMIC_CACHE, EIGHT_BIT_CACHE, PADDING_MASK, UNQUANTISED
from profiler.facts.scheduler import OwnedModel
from profiler.facts.step import ExecutionPath
from profiler.judge.cells import CellEvidence
from profiler.quant.registry import tried_formats
from profiler.report.selection import evidence_of, first_engine
from profiler.store.folder import Run
from profiler.units import duration, percent, saving, scaled

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
        ("cache", _cache(path), _instead(first, *_CACHES, COMPILED))
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


def _cache(path: ExecutionPath) -> str:
    stored = path.cache_format
    return _CACHE_WORDS[path.cache] + (f": {stored.name}" if stored is not None else "")


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
