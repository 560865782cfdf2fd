"""Read llama.cpp's llama-batched-bench and ik_llama.cpp's sweep-bench: JSON lines or a table.

Formats: tools/batched-bench/batched-bench.cpp and examples/sweep-bench/sweep-bench.cpp. A row has the prefill of B
prompts and the decode of TG tokens of each. If they share one prompt and its cache, N_KV is PP + B x TG (n_ctx_req). A
sweep has B = 1 and starts each row with a cache of N_KV tokens. Each row is measured once.
"""

from __future__ import annotations

import re
from dataclasses import replace

from profiler.readers.figures import LLAMA_CPP_PACKED_DTYPE, Figure, ForeignFile, told_apart
from profiler.readers.sources import Source
from profiler.readers.values import Record, measured, not_read, whole_of

_COLUMNS = {
    "PP": "pp",
    "TG": "tg",
    "B": "pl",
    "N_KV": "n_kv",
    "T_PP s": "t_pp",
    "S_PP t/s": "speed_pp",
    "T_TG s": "t_tg",
    "S_TG t/s": "speed_tg",
    "T s": "t",
    "S t/s": "speed",
}
_KEYS = {"pp", "tg", "t_pp", "t_tg"}
_SETTINGS = (
    *("n_kv_max", "n_batch", "n_ubatch", "flash_attn", "is_pp_shared", "is_tg_separate", "n_gpu_layers"),
    *("n_threads", "n_threads_batch"),
)
# The line above a table.
_HEADER = re.compile(r"\b(n_\w+|flash_attn|is_\w+) = (-?\d+)")


def read_llama_batched_bench(source: Source) -> ForeignFile | None:
    """The figures of either tool's file; None for another tool's file. Raises RequestError for a broken file."""
    header = dict(_HEADER.findall(source.text))
    records = [
        {**header, **{_COLUMNS.get(name, name): value for name, value in record.items()}} for record in source.records
    ]
    if not records[0].keys() >= _KEYS:
        return None
    names = {name: "threads" if name == "n_threads" else name for name in _SETTINGS}
    figures, settings = told_apart(
        records, lambda record: {own: record.get(name) for name, own in names.items()}, _figures
    )
    tool = "llama-batched-bench" if "pl" in records[0] else "sweep-bench"
    unknown = not_read(source.records[0], {*_COLUMNS, *_COLUMNS.values(), *_SETTINGS})
    return ForeignFile(tool, figures, settings=settings, packed_dtype=LLAMA_CPP_PACKED_DTYPE, remarks=unknown)


def _figures(row: Record) -> list[Figure]:
    prompt, new = whole_of(row["pp"], "PP"), whole_of(row["tg"], "TG")
    batch = whole_of(row.get("pl") or 1, "B", 1)
    # A cache that is not unified has a copy of a shared prompt for each sequence.
    is_kept_once = batch > 1 and str(row.get("n_kv")) == str(prompt + batch * new)
    is_shared = is_kept_once or str(row.get("is_pp_shared")) == "1"
    # One sequence after the other: as many steps for each, at batch 1.
    is_separate = str(row.get("is_tg_separate", 0)) == "1"
    is_sweep = "pl" not in row
    cached = whole_of(row["n_kv"], "N_KV") if is_sweep else None
    prefill = Figure(
        covers="prefill",
        batch_size=1 if is_shared else batch,
        prompt_len=prompt or None,
        context_len=cached,
        new_tokens=new or None,
        chunk_tokens=min(whole_of(row.get(name) or row["n_ubatch"], name, 1) for name in ("n_batch", "n_ubatch"))
        if row.get("n_ubatch")
        else None,
        gpu_layers=layers if (layers := int(row.get("n_gpu_layers", -1))) >= 0 else None,
        repeats=1,
        notes=("measured once",),
    )
    # A sweep decodes before it adds the row's prompt to its cache.
    decode = replace(
        prefill,
        covers="decode",
        batch_size=1 if is_separate else batch,
        prompt_len=None if is_sweep else prefill.prompt_len,
        context_len=cached if is_sweep or prompt else 0,
        chunk_tokens=None,
        shared=prompt if is_kept_once else 0,
        notes=(*prefill.notes, *(["all sequences share the prompt's cache"] if is_kept_once else [])),
    )
    figures = [prefill.timed(measured(row["t_pp"], "T_PP"))] if prompt else []
    steps = new * (batch if is_separate else 1)
    return [*figures, decode.timed(measured(row["t_tg"], "T_TG").times(1 / steps))] if new else figures
