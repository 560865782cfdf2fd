"""Tables with batch_size, prompt_len, new_tokens, tokens_per_s; optional phase, context_len, latency_s.

Optional, too: `gpu`, `model` and `quant`, `samples_s`, the seconds of each repetition, separated by semicolons,
`repeats`, `bits_per_weight` as stored, and `tokens_per_step` or `acceptance_length` of speculative decoding.
`context_len` is that of cells.csv: cached tokens before a prefill, and at the middle step of a decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from profiler.errors import RequestError
from profiler.readers.figures import Covers, Figure, Held
from profiler.readers.formats import Format
from profiler.readers.sources import Source
from profiler.readers.values import Record, escaped, measured, number_at, number_of, whole_at, whole_of

CSV_COLUMNS = "batch_size, prompt_len, new_tokens, tokens_per_s"
_KNOWN = {"status", "phase", "batch_size", "prompt_len", "context_len", "new_tokens", "latency_s", "tokens_per_s"}
_KNOWN |= {"repeats", "samples_s", "bits_per_weight", "tokens_per_step", "acceptance_length", "gpu", "model", "quant"}
_COVERS: Mapping[str, Covers] = {"prefill": "prefill", "decode": "decode", "generate": "generate"}
_NO_PHASE = "no phase named: read as decode steps only"


def _figures(row: Record) -> list[Figure]:
    try:
        return [_figure(row)] if row.get("status") in (None, "", "ok") else []
    except RequestError as error:
        raise RequestError(f"row {row['row']}: {error}") from None


def _figure(row: Record) -> Figure:
    phase, new, context = str(row.get("phase") or ""), whole_at(row, "new_tokens"), whole_at(row, "context_len", 0)
    covers = _COVERS.get(phase or ("decode" if new else "prefill"))
    if covers is None:
        raise RequestError(f"{phase[:40]!r} is not a phase; use prefill, decode or generate.")
    batch, prompt = whole_of(row.get("batch_size"), "batch_size", 1), whole_at(row, "prompt_len", 0)
    named = number_at(row, "tokens_per_step | acceptance_length") if covers == "decode" else 1.0
    per_step = named or 1.0
    if per_step < 1:
        raise RequestError(f"tokens_per_step is below 1: {per_step:g}.")
    tokens = batch * {"prefill": prompt or 0, "decode": per_step, "generate": new or 0}[covers]
    if not tokens:
        raise RequestError(f"a {covers} of 0 tokens has no time.")
    if row.get("latency_s"):
        time_s = measured(row["latency_s"], "latency_s")
    else:
        time_s = measured(row.get("tokens_per_s"), "tokens_per_s").of(tokens)
    samples = tuple(number_of(text, "samples_s") for text in str(row.get("samples_s") or "").split(";") if text)
    if covers == "decode" and context is not None:
        context = max(0, context - (prompt or 0) - (new or 0) // 2)
    time_s = replace(time_s, values=samples, repeats=len(samples) or whole_at(row, "repeats") or 0)
    bits, notes = number_at(row, "bits_per_weight"), () if phase or not new else (_NO_PHASE,)
    shape = (batch, prompt or None, context, new)
    held = Held(weight_bytes=bits and bits / 8)
    return Figure(covers, time_s, *shape, step_tokens=named, query_tokens=per_step, held=held, notes=notes)


def _numbered(source: Source) -> list[Record]:
    unknown = [escaped(name) for name in source.records[0] if name not in _KNOWN]
    remark = f"columns that are not read: {', '.join(unknown)}." if unknown else ""
    return [{**row, "row": number, "remark": remark} for number, row in enumerate(source.records, 1)]


CSV_TABLE = Format(
    tool="table",
    has=("batch_size", "prompt_len", "latency_s | tokens_per_s"),
    records=_numbered,
    figures=_figures,
    settings={"bits per weight": "bits_per_weight", "device": "gpu", "model's name": "model", "quantization": "quant"},
)
