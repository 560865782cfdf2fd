"""llama.cpp's llama-batched-bench and ik_llama.cpp's sweep-bench: JSON lines or a table.

Formats: tools/batched-bench/batched-bench.cpp and examples/sweep-bench/sweep-bench.cpp. A row has the prefill of B
prompts and the decode of TG tokens of each. If they share one prompt and its cache, N_KV is PP + B x TG (n_ctx_req). A
sweep has B = 1 and starts each row with a cache of N_KV tokens. Each row is measured once.
"""

from __future__ import annotations

import re
from dataclasses import replace

from profiler.readers.figures import Figure, Held
from profiler.readers.formats import Format
from profiler.readers.llama_bench import PACKED_DTYPE, chunks
from profiler.readers.values import Record, measured, whole_at, whole_of

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
_SETTINGS = (
    *("n_kv_max", "n_batch", "n_ubatch", "flash_attn", "is_pp_shared", "is_tg_separate", "n_gpu_layers"),
    *("n_threads", "n_threads_batch"),
)
# The line above a table.
_HEADER = re.compile(r"\b(n_\w+|flash_attn|is_\w+) = (-?\d+)")


def _figures(row: Record) -> list[Figure]:
    prompt, new = whole_of(row["pp"], "PP"), whole_of(row["tg"], "TG")
    batch = whole_at(row, "pl") or 1
    # A cache that is not unified has a copy of a shared prompt for each sequence.
    is_kept_once = batch > 1 and str(row.get("n_kv")) == str(prompt + batch * new)
    is_shared = is_kept_once or str(row.get("is_pp_shared")) == "1"
    # One sequence after the other: as many steps for each, at batch 1.
    is_separate = str(row.get("is_tg_separate", 0)) == "1"
    is_sweep = "pl" not in row
    cached = whole_of(row["n_kv"], "N_KV") if is_sweep else None
    layers = int(row.get("n_gpu_layers", -1))
    figure = Figure(
        covers="prefill",
        time=measured(row["t_pp"], "T_PP") if prompt else measured(row["t_tg"], "T_TG"),
        batch_size=1 if is_shared else batch,
        prompt_len=prompt or None,
        context_len=cached,
        new_tokens=new or None,
        held=Held(gpu_layers=layers if layers >= 0 else None),
        notes=("measured once",),
    )
    figure = replace(figure, time=replace(figure.time, repeats=1))
    figures = [replace(figure, notes=(*figure.notes, *chunks(row, prompt)))] if prompt else []
    if not new:
        return figures
    steps = new * (batch if is_separate else 1)
    # A sweep decodes before it adds the row's prompt to its cache.
    decode = replace(
        figure,
        covers="decode",
        time=replace(measured(row["t_tg"], "T_TG").times(1 / steps), repeats=1),
        batch_size=1 if is_separate else batch,
        prompt_len=None if is_sweep else figure.prompt_len,
        context_len=cached if is_sweep or prompt else 0,
        cached_once=prompt if is_kept_once else 0,
        notes=(*figure.notes, *(["all sequences share the prompt's cache"] if is_kept_once else [])),
    )
    return [*figures, decode]


_SWEEP = Format(
    tool="sweep-bench",
    has=("pp", "tg", "t_pp", "t_tg"),
    columns=_COLUMNS,
    known="|".join([*_COLUMNS.values(), *_SETTINGS]),
    records=lambda source: [{**dict(_HEADER.findall(source.text)), **record} for record in source.records],
    figures=_figures,
    settings={"threads" if name == "n_threads" else name: name for name in _SETTINGS},
    packed_dtype=PACKED_DTYPE,
)
LLAMA_BATCHED_BENCH = (replace(_SWEEP, tool="llama-batched-bench", has=(*_SWEEP.has, "pl")), _SWEEP)
