"""Tables whose rows need more than paths of keys: of llama.cpp's benchmarks, of llama-benchy, and of any other tool.

llama.cpp's are those of tools/llama-bench/llama-bench.cpp and tools/batched-bench/batched-bench.cpp, and their JSON. Of
llama-bench only JSON has each repetition (`samples_ns`). CSV and Markdown have their mean and standard deviation (of
the sample, by n - 1; 0 for a single one), but not their number. A sweep (-t 1,2,4) writes one row per value.

llama-benchy's (github.com/eugr/llama-benchy, results.py) have llama-bench's test names with another meaning:
`pp2048 @ d32768` is a prompt of 34,816 tokens, unless prefix caching is on, when a row `ctx_pp` fills the cache first.
Rates count the tokens that were prefilled, which tells the two apart in a table that lacks such rows. Standard
deviations divide by n. At several requests at a time (`c4`), a prefill's time is that of all of them, by the total
rate.

A table of any other tool has batch_size, prompt_len, new_tokens and tokens_per_s. Optional are phase, context_len and
latency_s; `gpu`, `model` and `quant`; `samples_s`, the seconds of each repetition, separated by semicolons, or
`repeats`; `bits_per_weight` as stored, and `tokens_per_step` or `acceptance_length` of speculative decoding.
`context_len` is that of cells.csv: cached tokens before a prefill, and at the middle step of a decode.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from profiler.errors import RequestError
from profiler.readers.figures import Covers, Figure, Shape
from profiler.readers.formats import Format, batches, seconds_at
from profiler.readers.printed import gpus_in, used_of
from profiler.readers.sources import Source
from profiler.readers.values import (
    Measured,
    Record,
    escaped,
    first_of,
    measured,
    number_at,
    number_of,
    whole_at,
    whole_of,
)

_TEST = re.compile(r"(?:pp ?(?P<prompt>\d+))?(?:\+?tg ?(?P<new>\d+))?(?: @ d(?P<depth>\d+))?")
# Bytes of 32 elements, which are a block. Blocks have a scale of 2 bytes; `_1` formats also have a minimum, and 5-bit
# formats store the fifth bits separately (ggml-common.h: block_q4_0 and the like).
_BLOCK_BYTES = {
    "f32": 128,
    "f16": 64,
    "bf16": 64,
    "q8_0": 34,
    "q4_0": 18,
    "iq4_nl": 18,
    "q4_1": 20,
    "q5_0": 22,
    "q5_1": 24,
}
_UNITS = {"": 1.0, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# The names that a comparison uses. Markdown shortens those of some columns (get_field_display_name).
_COLUMNS = {
    "model": "precision",
    "model_type": "precision",
    "model_filename": "model's name",
    "model_n_params": "parameters",
    "build_commit": "llama.cpp",
    "n_threads": "threads",
    "ngl": "n_gpu_layers",
    "ncmoe": "n_cpu_moe",
    "sm": "split_mode",
    "mg": "main_gpu",
    "nkvo": "no_kv_offload",
    "fa": "flash_attn",
    "ts": "tensor_split",
    "ot": "tensor_buft_overrides",
    "dev": "devices",
    "backend": "backends",
}
# All others are settings.
_RESULTS = re.compile(r"n_prompt|n_gen|n_depth|test_time|(avg|stddev|samples)_[nt]s|[cg]pu_info|test|t/s|")


def _of_machine(source: Source) -> Iterator[Record]:
    """The rows with their settings, and the layers and GPUs that ran them."""
    above = gpus_in(source.text)
    for row in ({_COLUMNS.get(name, name): value for name, value in row.items()} for row in source.records):
        # Only a machine with a GPU has the column in its Markdown, and a name in its JSON.
        layers = str(row.get("n_gpu_layers")) if row.get("gpu_info") or "test" in row else ""
        is_host = row.get("devices") == "none" or {*str(row.get("backends")).split(",")} <= {"CPU", "BLAS"}
        gpu_layers = 0 if is_host else int(layers) if layers.isdecimal() else None
        gpus, in_turn = _gpus(row, above), str(row.get("split_mode") or "layer") == "layer"
        settings = {name: value for name, value in row.items() if not _RESULTS.fullmatch(name)}
        names = dict.fromkeys(gpu.removesuffix(" uma: 1") for gpu in gpus if gpu_layers != 0)
        yield {
            **row,
            "settings": {**settings, "device": ", ".join(names) or row.get("cpu_info")},
            "gpu_layers": gpu_layers,
            "gpus": len(gpus) if len(gpus) > 1 and not in_turn else None,
            "stages": len(gpus) or None if in_turn else 1,
        }


def _gpus(row: Record, above: Sequence[str]) -> list[str]:
    """The names of the GPUs that ran a row, of those `above` its table or in its `gpu_info`; empty names are not known.

    A GPU whose share in `tensor_split` is 0 did not run; shares that are left out at its end are 0, and a single 0 is
    the default.
    """
    # Until 2024 names had `/` between them, which is also in the names of some GPUs, before a digit.
    listed = list(above) or [name for name in re.split(r", |/(?=[A-Z])", str(row.get("gpu_info") or "")) if name]
    if (named := str(row.get("devices") or "auto")) == "auto":
        ran = used_of(listed)
    else:
        ran = [dict(enumerate(listed)).get(int(at), "") for at in re.findall(r"\d+(?=/|$)", named)]
    shares = [share.strip("0. ") for share in str(row.get("tensor_split") or "").split("/")]
    if any(shares):
        ran = [name for name, share in zip(ran or [""] * len(shares), shares, strict=False) if share]
    main = whole_at(row, "main_gpu", 0) or 0
    return ran[main : main + 1] if row.get("split_mode") == "none" else ran


def _figures(row: Record) -> Iterator[Figure]:
    if "test" in row:
        test = _TEST.fullmatch(str(row["test"]))
        if test is None:
            raise RequestError(f"a row of llama-bench cannot be read: {row['test']!r}, {row['t/s']!r}.")
        prompt, new, depth = (whole_of(test[name] or 0, "test") for name in ("prompt", "new", "depth"))
        time_s = measured(row["t/s"], "t/s").of(prompt + new)
    else:
        prompt, new, depth = (whole_of(row.get(name) or 0, name) for name in ("n_prompt", "n_gen", "n_depth"))
        each, spread = row.get("samples_ns"), row.get("stddev_ns")
        # A whole number of nanoseconds is rounded by far less than it varies.
        time_s = replace(measured(row["avg_ns"], "avg_ns", values=each, spread=spread), rounding=0.0).times(1e-9)
    if not prompt and not new:
        raise RequestError("a row has neither a prompt nor generated tokens.")
    # Averaged over keys and values.
    kv_bytes = sum(_BLOCK_BYTES.get(str(row.get(name) or "f16"), math.nan) / 64 for name in ("type_k", "type_v"))
    notes = ["prompt and generation in one figure"] if prompt and new else []
    if math.isnan(kv_bytes):
        notes.append("the type of its cache is unknown: counted with the bytes of the model's dtype")
    notes += _chunks(row, prompt) if not new else []
    size, params = (_amount(first_of(row, paths)) for paths in ("model_size | size", "parameters | params"))
    covers: Covers = "generate" if prompt and new else "prefill" if prompt else "decode"
    shape = Shape(1, prompt or None, depth if depth or not prompt else None, new or None)
    yield Figure(
        covers,
        shape,
        time_s if prompt else time_s.times(1 / new),
        tokens_of_prefill=0,  # test_gen decodes a token for each of n_gen, and samples none
        weight_bytes=size / params if size and params else None,
        params=round(params) if params else None,
        kv_itemsize=None if math.isnan(kv_bytes) else kv_bytes,
        gpu_layers=row["gpu_layers"],
        weights_on_host=str(row.get("n_cpu_moe") or 0) != "0" or "CPU" in str(row.get("tensor_buft_overrides") or ""),
        cache_on_host=str(row.get("no_kv_offload") or 0) != "0",
        notes=tuple(notes),
    )


def _amount(value: object) -> float | None:
    """A number, or a text such as `11.27 GiB`."""
    number, _, unit = str(value).partition(" ")
    return None if value is None else number_of(number, "the model's size") * _UNITS[unit]


def _chunks(row: Record, prompt: int) -> list[str]:
    """A note if a prompt ran in several chunks, which are never longer than a batch (src/llama-context.cpp)."""
    chunk = min(whole_of(row.get(name) or usual, name, 1) for name, usual in (("n_batch", 2048), ("n_ubatch", 512)))
    count = math.ceil(prompt / chunk)
    return [f"the prompt ran in {count} chunks of {chunk}: weights were read {count} times"] if count > 1 else []


# llama.cpp rounds activations to 8 bits, and multiplies packed weights on units for int8 (ggml-cuda/mmq.cu).
_BENCH = Format(
    tool="llama-bench",
    has=("model_type", "n_prompt", "n_gen", "avg_ns"),
    records=_of_machine,
    figures=_figures,
    settings={"settings": "settings"},
    packed_dtype="int8",
)

_SETTING = r"n_(?!kv\b)\w+|flash_attn|is_\w+"
# The line above a table.
_HEADER = re.compile(rf"\b({_SETTING}) = (-?\d+)")


def _with_header(source: Source) -> list[Record]:
    records = [{**dict(_HEADER.findall(source.text)), **record} for record in source.records]
    names = [name for name in records[0] if re.fullmatch(_SETTING, name)]
    return [{**row, "settings": {_COLUMNS.get(name, name): row.get(name) for name in names}} for row in records]


def _of_batches(row: Record) -> Record:
    """What ran at a time. If B sequences share one prompt and its cache, N_KV is PP + B x TG (n_ctx_req)."""
    prompt, new, size = (whole_at(row, paths, 0) or 0 for paths in ("pp | PP", "tg | TG", "n_kv | N_KV"))
    batch = whole_at(row, "pl | B") or 1
    # A cache that is not unified has a copy of a shared prompt for each sequence.
    is_kept_once = batch > 1 and size == prompt + batch * new
    # With -sgs one sequence after the other: as many steps for each, at batch 1.
    together = 1 if str(row.get("is_tg_separate")) == "1" else batch
    return {
        "prompt_len": prompt or None,
        "new_tokens": new or None,
        "cached": None if prompt else 0,
        "cached_once": prompt if is_kept_once else 0,
        "prompts": 1 if is_kept_once or str(row.get("is_pp_shared")) == "1" else batch,
        "batch_size": together,
        "loop": new * batch / together,
        "n_gpu_layers": None if int(row.get("n_gpu_layers", -1)) < 0 else row["n_gpu_layers"],
        "notes": {
            "prefill": _chunks(row, prompt),
            "decode": ["all sequences share the prompt's cache"] * is_kept_once,
        },
    }


_BATCHED_BENCH = replace(
    _BENCH,
    tool="llama-batched-bench",
    has=("pp | PP", "tg | TG", "t_pp | T_PP s", "t_tg | T_TG s", "pl | B"),
    records=_with_header,
    more=_of_batches,
    figures=batches,
    notes={"prefill": ("measured once",), "decode": ("measured once",)},
)


_BENCHY_TEST = re.compile(
    r"(?P<context>ctx_)?(?P<kind>pp|tg)(?P<size>\d*)(?: @ d(?P<depth>\d+))?(?: \(c(?P<many>\d+)\))?"
)
_HTTP = "measured over HTTP, less a measured latency"


def _as_table(source: Source) -> Iterator[Record]:
    """The rows of the table for the runs of the JSON: each has a prefill and a decode."""
    rows = []
    for run in source.only["benchmarks"]:
        context = "ctx_" if run.get("is_context_prefill_phase") else ""
        after = f" @ d{run.get('context_size') or 0} (c{run.get('concurrency') or 1})"
        for kind, size in (("pp", "prompt_size"), ("tg", "response_size")):
            row = {"test": f"{context}{kind}{run[size]}{after}", "t/s": run.get(f"{kind}_throughput")}
            row |= {"t/s (req)": run.get(f"{kind}_req_throughput")}
            rows.append({**source.only, **row, "est_ppt (ms)": run.get("est_ppt"), "ttfr (ms)": run.get("ttfr")})
    return _tests(rows, is_cached=bool(source.only.get("prefix_caching_enabled")))


def _tests(rows: Sequence[Record], *, is_cached: bool) -> Iterator[Record]:
    """The rows with their shape and time. A decode does not name its prompt, which is that of the row before it."""
    prompts: dict[tuple[object, ...], tuple[int, int]] = {}
    for row in rows:
        found = _BENCHY_TEST.fullmatch(str(row["test"]).strip())
        if found is None:
            raise RequestError(f"a row of llama-benchy cannot be read: {row['test']!r}.")
        size, depth = (whole_of(found[name] or 0, "test") for name in ("size", "depth"))
        many, is_prefill = whole_of(found["many"] or 1, "test", 1), found["kind"] == "pp"
        total, wait = _cell(row, "t/s (total)", "t/s"), _cell(row, "est_ppt (ms)", "ttfr (ms)")
        each = _cell(row, "t/s (req)") or (total if many == 1 else None)
        key = (depth, many, found["context"])
        if is_prefill and (found["context"] or not depth):
            prompts[key] = (depth or size, 0)
        elif is_prefill:
            if each and wait and many == 1:  # the rate times its time are the tokens that the tool counted
                tokens = each.value * wait.value / 1e3
                is_cached = abs(math.log(tokens / size)) < abs(math.log(tokens / (size + depth)))
            prompts[key] = (size, depth) if is_cached else (size + depth, 0)
        prompt, context = prompts.get(key, (0, depth))
        after, new = context if context or not prompt else None, None if is_prefill else size or None
        shape = Shape(many, prompt or None, after, new)
        if is_prefill:
            time_s = total.of(many * prompt) if many > 1 and total else wait and wait.times(1e-3)
            notes = (_HTTP, "until the last first token") if many > 1 else (_HTTP,)
            figure = time_s and Figure("prefill", shape, time_s, notes=notes)
        else:
            time_s = each.of(1) if each else total and total.of(many)
            figure = time_s and Figure("decode", shape, time_s, None, notes=(_HTTP,))
        if figure:
            yield {**row, "figure": figure}


def _cell(row: Record, *names: str) -> Measured | None:
    """A cell such as `8521.08 ± 69.61`, or a metric of the JSON; None without a number."""
    for name in names:
        value = row.get(name)
        metric = value if isinstance(value, dict) else {"mean": value}
        if re.search("[1-9]", str(metric.get("mean"))):
            return measured(metric["mean"], name, values=metric.get("values"), spread=metric.get("std"))
    return None


_BENCHY = Format(
    tool="llama-benchy",
    has=("test", "ttfr (ms) | est_ppt (ms) | t/s (total)"),
    records=lambda source: _tests(source.records, is_cached="ctx_" in str([row["test"] for row in source.records])),
    settings={"model's name": "model"},
)
TABLES = (
    _BENCHY,
    replace(_BENCHY, has=("latency_mode", "benchmarks"), records=_as_table),
    _BENCH,
    replace(_BENCH, has=("test", "t/s", "model | size | params | backend")),
    _BATCHED_BENCH,
)

_KNOWN = {
    *("status", "phase", "batch_size", "prompt_len", "context_len", "new_tokens", "latency_s", "tokens_per_s"),
    *("repeats", "samples_s", "bits_per_weight", "tokens_per_step", "acceptance_length", "gpu", "model", "quant"),
}
_COVERS: Mapping[str, Covers] = {"prefill": "prefill", "decode": "decode", "generate": "generate"}


def _csv_figure(row: Record) -> Figure:
    phase, new, context = str(row.get("phase") or ""), whole_at(row, "new_tokens", 0), whole_at(row, "context_len", 0)
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
    time_s = seconds_at(row, "latency_s | tokens_per_s:/s", tokens)
    if time_s is None:
        raise RequestError("tokens_per_s is missing.")
    samples = tuple(number_of(text, "samples_s") for text in str(row.get("samples_s") or "").split(";") if text)
    if covers == "decode" and context is not None:
        context = max(0, context - (prompt or 0) - (new or 0) // 2)
    time_s = replace(time_s, values=samples, repeats=len(samples) or whole_at(row, "repeats") or 0)
    bits = number_at(row, "bits_per_weight")
    notes = ("no phase named: read as decode steps only",) if new and not phase else ()
    shape, weight_bytes = Shape(batch, prompt or None, context, new or None), bits and bits / 8
    return Figure(covers, shape, time_s, named, per_step, weight_bytes=weight_bytes, notes=notes)


def _csv_records(source: Source) -> Iterator[Record]:
    """The rows that did not fail, each with its figure."""
    unknown = [escaped(name) for name in source.records[0] if name not in _KNOWN]
    remark = f"columns that are not read: {', '.join(unknown)}." if unknown else ""
    for number, row in enumerate(source.records, 1):
        try:
            if row.get("status") in (None, "", "ok"):
                yield {**row, "remark": remark, "figure": _csv_figure(row)}
        except RequestError as error:
            raise RequestError(f"row {number}: {error}") from None


CSV_TABLE = Format(
    tool="table",
    has=("batch_size", "prompt_len", "latency_s | tokens_per_s"),
    records=_csv_records,
    settings={"bits per weight": "bits_per_weight", "device": "gpu", "model's name": "model", "quantization": "quant"},
)
