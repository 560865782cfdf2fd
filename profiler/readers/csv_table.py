"""Read CSV tables with batch_size, prompt_len, new_tokens, tokens_per_s; optional phase, context_len, latency_s.

Optional, too: `samples_s`, the seconds of each repetition, separated by semicolons, `repeats`, `bits_per_weight` as
stored, and `tokens_per_step`, which speculative decoding gives. `context_len` is that of cells.csv: cached tokens
before a prefill, and at the middle step of a decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from profiler.errors import RequestError
from profiler.readers.figures import Covers, Figure, ForeignFile, told_apart
from profiler.readers.sources import Source
from profiler.readers.values import PER_SECOND, SECONDS, Record, measured, not_read, number_of, whole_of

CSV_COLUMNS = "batch_size, prompt_len, new_tokens, tokens_per_s"
_REQUIRED = {"batch_size", "prompt_len"}
_TIMES = {"latency_s", "tokens_per_s"}
_KNOWN = _REQUIRED | _TIMES | {
    *("status", "phase", "context_len", "new_tokens", "repeats", "samples_s", "bits_per_weight", "tokens_per_step")
}  # fmt: skip
_COVERS: Mapping[str, Covers] = {"prefill": "prefill", "decode": "decode", "generate": "generate"}
_NO_PHASE = "no phase named: read as decode steps only"


def read_csv_table(source: Source) -> ForeignFile | None:
    """The figures of a table; None if it lacks the columns. Raises RequestError naming the broken row."""
    names = source.records[0].keys()
    if not names >= _REQUIRED or not names & _TIMES:
        return None
    rows = [{**row, "row": number} for number, row in enumerate(source.records, 1)]
    done = [row for row in rows if row.get("status") in (None, "", "ok")]
    figures, _ = told_apart(done, lambda row: {"bits per weight": row.get("bits_per_weight")}, _figures)
    return ForeignFile("table", figures, remarks=not_read(names, _KNOWN))


def _figures(record: Record) -> list[Figure]:
    try:
        return [_figure({name: str(cell) for name, cell in record.items() if cell not in (None, "")})]
    except RequestError as error:
        raise RequestError(f"row {record['row']}: {error}") from None


def _figure(row: Record) -> Figure:
    phase = row.get("phase", "")
    new = whole_of(row["new_tokens"], "new_tokens", 1) if "new_tokens" in row else None
    covers = _COVERS.get(phase or ("decode" if new else "prefill"))
    if covers is None:
        raise RequestError(f"{phase[:40]!r} is not a phase; use prefill, decode or generate.")
    batch = whole_of(row.get("batch_size"), "batch_size", 1)
    prompt = whole_of(row.get("prompt_len") or 0, "prompt_len", 0) or None
    per_step = number_of(row.get("tokens_per_step") or 1, "tokens_per_step") if covers == "decode" else 1.0
    if per_step < 1:
        raise RequestError(f"tokens_per_step is below 1: {per_step:g}.")
    tokens = batch * {"prefill": prompt or 0, "decode": per_step, "generate": new or 0}[covers]
    if not tokens:
        raise RequestError(f"a {covers} of 0 tokens has no time.")
    if "latency_s" in row:
        time_s = measured(row["latency_s"], "latency_s", SECONDS)
    else:
        time_s = measured(row.get("tokens_per_s"), "tokens_per_s", PER_SECOND).of(tokens)
    context = whole_of(row["context_len"], "context_len", 0) if "context_len" in row else None
    if covers == "decode" and context is not None:
        context = max(0, context - (prompt or 0) - (new or 0) // 2)
    samples = [text.strip() for text in row.get("samples_s", "").split(";") if text]
    figure = Figure(
        covers=covers,
        batch_size=batch,
        prompt_len=prompt,
        context_len=context,
        new_tokens=new,
        repeats=whole_of(row["repeats"], "repeats", 1) if "repeats" in row else 0,
        weight_bytes=number_of(row["bits_per_weight"], "bits_per_weight") / 8 if "bits_per_weight" in row else None,
        step_tokens=per_step,
        may_speculate=covers == "decode" and "tokens_per_step" not in row,
        notes=() if phase or not new else (_NO_PHASE,),
    )
    values = tuple(number_of(text, "samples_s") for text in samples)
    return figure.timed(replace(time_s, values=values))
