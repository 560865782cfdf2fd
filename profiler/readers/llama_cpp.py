"""The output of llama.cpp's llama-bench and llama-batched-bench.

Formats: tools/llama-bench/llama-bench.cpp, tools/batched-bench/batched-bench.cpp.
Of llama-bench only JSON has each repetition (`samples_ns`). CSV and Markdown have their mean and standard deviation (of
the sample, by n - 1; 0 for a single one), but not their number. A sweep (-t 1,2,4) writes one row per value.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from profiler.errors import RequestError
from profiler.readers.figures import Covers, Figure, Held, Shape, Tokens
from profiler.readers.formats import Format, batches
from profiler.readers.printed import gpus_in, used_of
from profiler.readers.sources import Source
from profiler.readers.values import Record, first_of, measured, number_of, whole_at, whole_of

_PACKED_DTYPE = "int8"
"""llama.cpp rounds activations to 8 bits, and multiplies packed weights on units for int8 (ggml-cuda/mmq.cu)."""

_TEST = re.compile(r"(?:pp ?(?P<prompt>\d+))?(?:\+?tg ?(?P<new>\d+))?(?: @ d(?P<depth>\d+))?")
# Bytes of 32 elements, which are a block. Blocks have a scale of 2 bytes; `_1` formats also have a minimum, and 5-bit
# formats store the fifth bits separately (ggml-common.h: block_q4_0 and the like).
_BLOCK_BYTES = {"f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24}
_BLOCK_BYTES["iq4_nl"] = 18
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


def _figures(row: Record) -> list[Figure]:
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
    held = Held(
        weight_bytes=size / params if size and params else None,
        params=round(params) if params else None,
        kv_itemsize=None if math.isnan(kv_bytes) else kv_bytes,
        gpu_layers=row["gpu_layers"],
        weights_on_host=str(row.get("n_cpu_moe") or 0) != "0" or "CPU" in str(row.get("tensor_buft_overrides") or ""),
        cache_on_host=str(row.get("no_kv_offload") or 0) != "0",
    )
    tokens = Tokens(first=0)  # test_gen decodes a token for each of n_gen, and samples none
    time_s = time_s if prompt else time_s.times(1 / new)
    return [Figure(covers, shape, time_s, tokens, held, notes=tuple(notes))]


def _amount(value: object) -> float | None:
    """A number, or a text such as `11.27 GiB`."""
    number, _, unit = str(value).partition(" ")
    return None if value is None else number_of(number, "the model's size") * _UNITS[unit]


def _chunks(row: Record, prompt: int) -> list[str]:
    """A note if a prompt ran in several chunks, which are never longer than a batch (src/llama-context.cpp)."""
    chunk = min(whole_of(row.get(name) or usual, name, 1) for name, usual in (("n_batch", 2048), ("n_ubatch", 512)))
    count = math.ceil(prompt / chunk)
    return [f"the prompt ran in {count} chunks of {chunk}: weights were read {count} times"] if count > 1 else []


_JSON = Format(
    tool="llama-bench",
    has=("model_type", "n_prompt", "n_gen", "avg_ns"),
    records=_of_machine,
    figures=_figures,
    settings={"settings": "settings"},
    packed_dtype=_PACKED_DTYPE,
)
LLAMA_BENCH = (_JSON, replace(_JSON, has=("test", "t/s", "model | size | params | backend")))

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


LLAMA_BATCHED_BENCH = Format(
    tool="llama-batched-bench",
    has=("pp | PP", "tg | TG", "t_pp | T_PP s", "t_tg | T_TG s", "pl | B"),
    records=_with_header,
    more=_of_batches,
    figures=batches,
    notes={"prefill": ("measured once",), "decode": ("measured once",)},
    settings={"settings": "settings"},
    packed_dtype=_PACKED_DTYPE,
)
