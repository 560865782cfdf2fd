"""Read the output of llama.cpp's llama-bench: json, jsonl, csv and md (tools/llama-bench/llama-bench.cpp).

Only JSON has each repetition (`samples_ns`). CSV and Markdown have their mean and standard deviation (of the sample, by
n - 1; 0 for a single one), but not their number. A sweep (-t 1,2,4) writes one row per value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from profiler.errors import RequestError
from profiler.readers.figures import LLAMA_CPP_PACKED_DTYPE, Covers, Figure, ForeignFile, shared_gpus, told_apart
from profiler.readers.sources import Source
from profiler.readers.values import BYTES, COUNTS, PER_SECOND, Measured, Record, measured, not_read, whole_of

_TEST = re.compile(r"(?:pp ?(?P<prompt>\d+))?(?:\+?tg ?(?P<new>\d+))?(?: @ d(?P<depth>\d+))?")
# Bytes per element. Blocks of 32 elements have a scale of 2 bytes; `_1` formats also have a minimum, and 5-bit formats
# store the fifth bits separately (ggml-common.h: block_q4_0 and the like).
_ITEMSIZES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q4_0": 18 / 32,
    "q4_1": 20 / 32,
    "q5_0": 22 / 32,
    "q5_1": 24 / 32,
    "iq4_nl": 18 / 32,
}
# Keys that are not settings: the test and its result. The model's size and the device are read separately.
_NOT_SETTINGS = {
    *("n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts"),
    *("samples_ns", "samples_ts", "cpu_info", "gpu_info", "test", "t/s"),
}
# Names of keys as a comparison uses them; Markdown shortens some (get_field_display_name).
_NAMES = {
    "model_filename": "model's name",
    "model_n_params": "parameters",
    "model_type": "precision",
    "model": "precision",
    "n_threads": "threads",
    "build_commit": "llama.cpp",
    "ngl": "n_gpu_layers",
    "sm": "split_mode",
    "mg": "main_gpu",
    "nkvo": "no_kv_offload",
    "fa": "flash_attn",
    "ts": "tensor_split",
    "ot": "tensor_buft_overrides",
    "embd": "embeddings",
    "nopo": "no_op_offload",
    "dev": "devices",
    "backend": "backends",
}
# All other columns of its tables and of its JSON (get_fields), with those of older versions and of ik_llama.cpp.
_OTHERS = re.compile(
    r"size|params|model_size|build_number|n_(batch|ubatch|depth|cpu_moe)|ncmoe|cpu_(mask|strict)|poll|type_[kv]|f16_kv"
    r"|(use_)?mmap|(use_direct_|d)io|no_?host|noh|load_mode|lazy_mode|use_mlock|low_vram|fit_target|fitt|fit_min_ctx"
    r"|fitc|cuda(_graphs)?|vulkan|kompute|metal|sycl|rpc|opencl|(gpu_)?blas|mul_mat_q|mmq|rtr|mla|fmoe|amb|ser|fdn|ger"
    r"|muge|mqkv|rcache|thp|repack|attn_max_batch"
)
# Tests of llama-benchy, which mean something else.
_NOT_ITS_OWN = re.compile(r"ctx_.*|.*\(c\d+\)")
_DEVICE = re.compile(r"^\s*Device (?P<number>\d+): (?P<name>.+?), (?:compute|gfx|VMM)", re.MULTILINE)
# Between the names of `gpu_info`: `/` in files until 2024, which is also in the names of some GPUs, before a digit.
_BETWEEN = re.compile(r", |/(?=[A-Z])")
_INTEGRATED = re.compile(r"Radeon(\(TM\))? (Graphics|\d{3}M)|UHD|Iris")
# In tokens. A batch runs in chunks, which are never longer than it (src/llama-context.cpp).
_DEFAULTS = {"n_batch": 2048, "n_ubatch": 512}


def read_llama_bench(source: Source) -> ForeignFile | None:
    """The figures of a file of llama-bench; None for another tool's file. Raises RequestError for a broken file."""
    records, first = source.records, source.records[0]
    is_table = {"test", "t/s"} <= first.keys() and first.keys() & {"model", "size", "params", "backend"}
    if is_table and any(_NOT_ITS_OWN.fullmatch(str(record["test"])) for record in records):
        return None
    if not is_table and not {"model_type", "n_prompt", "n_gen", "avg_ns"} <= first.keys():
        return None
    above: list[str] = []
    for found in _DEVICE.finditer(source.text):  # each run above a table numbers its GPUs from 0: the last one counts
        above = [*above[: int(found["number"])], found["name"]]
    figures, shared = told_apart(
        records,
        lambda record: _settings(record, above),
        lambda record: [_of_row(record) if is_table else _of_json(record)],
    )
    on_gpu = [record for record in records if _gpu_layers(record) != 0] or records[:1]
    gpus, stages = shared_gpus(_shared_by(record, len(_gpus(record, above))) for record in on_gpu)
    return ForeignFile(
        "llama-bench",
        figures,
        created=str(first.get("test_time") or ""),
        settings=shared,
        gpus=gpus,
        stages=stages,
        packed_dtype=LLAMA_CPP_PACKED_DTYPE,
        remarks=not_read((name for name in first if not _is_setting(name)), _NOT_SETTINGS),
    )


def _gpus(record: Record, above: Sequence[str]) -> list[str]:
    """The names of the GPUs that ran a row, of those `above` its table or in its `gpu_info`; empty where not known.

    By default all ran, but no integrated one beside others (src/llama.cpp). A GPU whose share in `tensor_split` is 0
    did not; shares that are left out at its end are 0, and a single 0 is the default.
    """
    listed = list(above) or [name for name in _BETWEEN.split(str(record.get("gpu_info") or "")) if name]
    if (named := _named(record)) == "auto":
        ran = [name for name in listed if not _INTEGRATED.search(name)] or listed
    else:
        numbers = [int(found[0]) if (found := re.search(r"\d+$", name)) else len(listed) for name in named.split("/")]
        ran = [listed[number] if number < len(listed) else "" for number in numbers]
    shares = [share.strip("0. ") for share in str(record.get("tensor_split") or record.get("ts") or "").split("/")]
    if any(shares):
        ran = [name for name, share in zip(ran, shares, strict=False) if share]
    if _split_mode(record) == "none":
        main = whole_of(record.get("main_gpu") or record.get("mg") or 0, "main_gpu")
        return ran[main : main + 1]
    return ran


def _named(record: Record) -> str:
    """The devices that the user named, such as `CUDA0/CUDA1` or `none`; `auto` without any."""
    return str(record.get("devices") or record.get("dev") or "auto")


def _split_mode(record: Record) -> str:
    return str(record.get("split_mode") or record.get("sm") or "layer")


def _shared_by(record: Record, count: int) -> tuple[int | None, int]:
    """(GPUs that shared each step of a row, GPUs that held layers in turn)."""
    in_turn = _split_mode(record) == "layer"
    return count if count > 1 and not in_turn else None, max(1, count) if in_turn else 1


def _is_setting(name: str) -> bool:
    is_known = name in _NAMES or name in _NAMES.values() or _OTHERS.fullmatch(name) is not None
    return is_known and name not in _NOT_SETTINGS


def _settings(record: Record, above: Sequence[str]) -> Mapping[str, object]:
    """The settings of a row, by the names that a comparison uses."""
    settings = {_NAMES.get(name, name): value for name, value in record.items() if _is_setting(name)}
    gpus = [] if _gpu_layers(record) == 0 else _gpus(record, above)
    device = ", ".join(filter(None, dict.fromkeys(gpus))) or record.get("cpu_info")
    return {**settings, "device": device} if device else settings


def _gpu_layers(record: Record) -> int | None:
    """Layers on the GPU of a machine that has one; Markdown has the column only on such a machine."""
    if _named(record) == "none":
        return 0
    layers = str(record.get("n_gpu_layers" if record.get("gpu_info") else "ngl"))
    return int(layers) if layers.isdecimal() else None


def _of_json(record: Record) -> Figure:
    shape = [whole_of(record.get(name) or 0, name) for name in ("n_prompt", "n_gen", "n_depth")]
    samples, spread = record.get("samples_ns"), record.get("stddev_ns")
    time_s = measured(record["avg_ns"], "avg_ns", values=samples, spread=spread).times(1e-9)
    size, params = record.get("model_size"), record.get("model_n_params")
    # A whole number of nanoseconds is rounded by far less than it varies.
    return _figure(record, shape, replace(time_s, rounding=0.0), size, params)


def _of_row(record: Record) -> Figure:
    test = _TEST.fullmatch(str(record["test"]))
    if test is None:
        raise RequestError(f"a row of llama-bench cannot be read: {record['test']!r}, {record['t/s']!r}.")
    shape = [whole_of(test[name] or 0, "test") for name in ("prompt", "new", "depth")]
    time_s = measured(record["t/s"], "t/s", PER_SECOND).of(shape[0] + shape[1])
    return _figure(record, shape, time_s, record.get("size"), record.get("params"))


def _figure(record: Record, shape: Sequence[int], time_s: Measured, size: object, params: object) -> Figure:
    """The figure of a test of (prompt, new tokens, tokens before) from the time of all of them."""
    prompt, new, depth = shape
    if not prompt and not new:
        raise RequestError("a row has neither a prompt nor generated tokens.")
    covers: Covers = "generate" if prompt and new else "prefill" if prompt else "decode"
    notes = ["prompt and generation in one figure"] if covers == "generate" else []
    # Averaged over keys and values.
    itemsizes = [_ITEMSIZES.get(str(record.get(name) or "f16")) for name in ("type_k", "type_v")]
    kv_itemsize = None if None in itemsizes else sum(filter(None, itemsizes)) / len(itemsizes)
    if kv_itemsize is None:
        notes.append("the type of its cache is unknown: counted with the bytes of the model's dtype")
    count = measured(params, "params", COUNTS).value if params else None
    figure = Figure(
        covers=covers,
        batch_size=1,
        prompt_len=prompt or None,
        context_len=depth if depth or not prompt else None,
        new_tokens=new or None,
        prefill_makes_token=False,  # test_gen decodes a token for each of n_gen, and samples none
        chunk_tokens=min(whole_of(record.get(name) or default, name, 1) for name, default in _DEFAULTS.items()),
        weight_bytes=measured(size, "size", BYTES).value / count if size and count else None,
        params=round(count) if count else None,
        kv_itemsize=kv_itemsize,
        gpu_layers=_gpu_layers(record),
        weights_on_host=_is_set(record, "n_cpu_moe", "ncmoe")
        or "CPU" in str(record.get("tensor_buft_overrides") or record.get("ot")),
        cache_on_host=_is_set(record, "no_kv_offload", "nkvo"),
        notes=tuple(notes),
    )
    return figure.timed(time_s.times(1 / new) if covers == "decode" else time_s)


def _is_set(record: Record, *names: str) -> bool:
    """Whether a number or a switch is neither 0 nor false, by one of its names."""
    return any(str(record.get(name) or "0") != "0" for name in names)
