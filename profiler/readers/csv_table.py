"""Read CSV tables with batch_size, prompt_len, new_tokens, tokens_per_s; optional phase, context_len, latency_s.

Optional, too: `samples_s`, the seconds of each repetition, separated by semicolons, `repeats`, `bits_per_weight` as
stored, and `tokens_per_step`, which speculative decoding gives.
"""

from __future__ import annotations

from dataclasses import replace

from profiler.errors import RequestError
from profiler.readers.figures import Covers, Figure, ForeignFile
from profiler.readers.sources import Source
from profiler.readers.values import Record, apart, escaped, half_a_unit, number_of, whole_of

CSV_COLUMNS = "batch_size, prompt_len, new_tokens, tokens_per_s"
_REQUIRED = {"batch_size", "prompt_len"}
_TIMES = {"latency_s", "tokens_per_s"}
_KNOWN = _REQUIRED | _TIMES | {
    *("status", "phase", "context_len", "new_tokens", "repeats", "samples_s", "bits_per_weight", "tokens_per_step")
}  # fmt: skip
_COVERS: dict[str, Covers] = {"prefill": "prefill", "decode": "decode", "generate": "generate"}
_NO_PHASE = "no phase named: read as decode steps only"


def read_csv_table(source: Source) -> ForeignFile | None:
    """The figures of a table; None if it lacks the columns. Raises RequestError naming the broken row."""
    names = source.records[0].keys()
    if not names >= _REQUIRED or not names & _TIMES:
        return None
    rows = [(number, row) for number, row in enumerate(source.records, 1) if row.get("status") in (None, "", "ok")]
    figures = []
    for number, row in rows:
        try:
            figures.append(_figure({name: str(cell).strip() for name, cell in row.items() if cell not in (None, "")}))
        except RequestError as error:
            raise RequestError(f"row {number}: {error}") from None
    _, bits = apart([{"bits per weight": row.get("bits_per_weight")} for _, row in rows])
    unknown = [escaped(name) for name in names if name not in _KNOWN and name]
    remarks = (f"columns that are not read: {', '.join(unknown)}.",) if unknown else ()
    figures = [replace(figure, settings=own) for figure, own in zip(figures, bits, strict=True)]
    return ForeignFile("", "table", figures, remarks=remarks)


def _figure(row: Record) -> Figure:
    phase = row.get("phase", "")
    new = whole_of(row["new_tokens"], "new_tokens", 1) if "new_tokens" in row else None
    covers = _COVERS.get(phase or ("decode" if new else "prefill"))
    if covers is None:
        raise RequestError(f"{phase[:40]!r} is not a phase; use prefill, decode or generate.")
    batch = whole_of(row.get("batch_size", ""), "batch_size", 1)
    prompt = whole_of(row.get("prompt_len") or 0, "prompt_len", 0) or None
    # With a prompt, the context follows from it.
    context = whole_of(row["context_len"], "context_len", 0) if "context_len" in row and not prompt else None
    per_step = number_of(row.get("tokens_per_step") or 1, "tokens_per_step") if covers == "decode" else 1.0
    if per_step < 1:
        raise RequestError(f"tokens_per_step is below 1: {per_step:g}.")
    tokens = batch * ((prompt or 0) if covers == "prefill" else per_step if covers == "decode" else new or 0)
    if not tokens:
        raise RequestError(f"a {covers} of 0 tokens has no time.")
    if "latency_s" in row:
        seconds = number_of(row["latency_s"], "latency_s")
        rounding_s = half_a_unit(row["latency_s"])
    else:
        per_s = number_of(row.get("tokens_per_s", ""), "tokens_per_s")
        seconds = tokens / per_s
        rounding_s = seconds * half_a_unit(row["tokens_per_s"].replace(",", "")) / per_s
    samples = tuple(number_of(text.strip(), "samples_s") for text in row.get("samples_s", "").split(";") if text)
    repeats = whole_of(row["repeats"], "repeats", 1) if "repeats" in row else 0
    return Figure(
        covers=covers,
        seconds=seconds,
        rounding_s=rounding_s,
        batch_size=batch,
        prompt_len=prompt,
        context_len=context,
        new_tokens=new,
        samples_s=samples,
        repeats=len(samples) or repeats,
        weight_bytes=number_of(row["bits_per_weight"], "bits_per_weight") / 8 if "bits_per_weight" in row else None,
        step_tokens=per_step,
        may_speculate=covers == "decode" and "tokens_per_step" not in row,
        notes=() if phase or not new else (_NO_PHASE,),
    )
