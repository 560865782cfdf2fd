"""A plain table: batch_size, prompt_len, new_tokens, tokens_per_s; where it has them phase, context_len, latency_s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from profiler.errors import RequestError
from profiler.record.readers.figures import Covers, Figure, ForeignFile, number_of, whole_of

_NEEDED = {"batch_size", "prompt_len"}
_COVERS: dict[str, Covers] = {"prefill": "prefill", "decode": "decode", "generate": "generate"}
_TIMES = ("latency_s", "tokens_per_s")


def read(records: Sequence[Mapping[str, Any]]) -> ForeignFile | None:
    """The figures of a table; None where it lacks the columns. Raises RequestError naming the row that is broken."""
    first = records[0] if records else {}
    if not first.keys() >= _NEEDED or not any(name in first for name in _TIMES):
        return None
    figures = []
    for number, record in enumerate(records, 1):
        if record.get("status") in (None, "", "ok"):
            try:
                figures.append(_figure(record))
            except RequestError as error:
                raise RequestError(f"row {number}: {error}") from None
    return ForeignFile("", "table", tuple(figures))


def _figure(record: Mapping[str, Any]) -> Figure:
    phase = (record.get("phase") or "").strip()
    if phase and phase not in _COVERS:
        raise RequestError(f"the phase {phase[:40]!r} is none; use prefill, decode or generate.")
    batch = whole_of(record["batch_size"], "batch_size", 1)
    prompt = whole_of(record["prompt_len"] or 0, "prompt_len")
    context = record.get("context_len")
    new = whole_of(record["new_tokens"], "new_tokens", 1) if record.get("new_tokens") else None
    covers = _COVERS[phase or ("decode" if new else "prefill")]
    tokens = batch * (prompt if covers == "prefill" else 1 if covers == "decode" else new or 0)
    if record.get("latency_s"):
        seconds = number_of(record["latency_s"], "latency_s")
    else:
        seconds = tokens / number_of(record.get("tokens_per_s"), "tokens_per_s")
    if not tokens:
        raise RequestError(f"a {covers} without tokens has no time.")
    return Figure(
        covers=covers,
        seconds=seconds,
        batch_size=batch,
        prompt_len=prompt or None,
        context_len=None if prompt or not context else whole_of(context, "context_len"),
        new_tokens=new,
        repeats=whole_of(record["repeats"], "repeats", 1) if record.get("repeats") else 0,
        notes=() if phase or not new else ("no phase named: taken for decode steps alone",),
    )
