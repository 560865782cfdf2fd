"""Read the output of llama.cpp's llama-bench: json, jsonl, csv and md (tools/llama-bench/llama-bench.cpp).

Only JSON has each repetition (`samples_ns`). CSV and Markdown have their mean and standard deviation (of the sample, by
n - 1; 0 for a single one), but not their number. A sweep (-t 1,2,4) writes one row per value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from profiler.errors import RequestError
from profiler.readers.figures import Covers, Figure, ForeignFile, with_settings
from profiler.readers.sources import Source
from profiler.readers.values import Record, Settings, apart, escaped, half_a_unit, number_of, samples_of, whole_of

_TOOL = "llama-bench"
_TEST = re.compile(r"(?:pp ?(?P<prompt>\d+))?(?:\+?tg ?(?P<new>\d+))?(?: @ d(?P<depth>\d+))?")
_RATE = re.compile(r"(?P<rate>\d[\d,]*\.?\d*)(?:\s*(?:±|\+/?-)\s*(?P<spread>\d[\d,]*\.?\d*))?")
# Settings that identify a model, in order of preference.
_MODEL_SETTINGS = ("precision", "model's name", "size", "params", "model_size", "parameters")
_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
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
# Columns of llama-benchy, whose test names mean something else.
_NOT_ITS_OWN = re.compile(r"ctx_.*|.*\(c\d+\)")
_DEVICES = re.compile(r"^\s*Device \d+: (.+?), (?:compute|gfx|VMM)", re.MULTILINE)
_DEFAULT_CHUNK = 512
# The 95 % interval of one repetition, in standard deviations on each side.
_COVERAGE = 2.0


def read_llama_bench(source: Source) -> ForeignFile | None:
    """The figures of a file of llama-bench; None for another tool's file. Raises RequestError for a broken file."""
    records = source.records
    first = records[0]
    if {"model_type", "n_prompt", "n_gen", "avg_ns"} <= first.keys():
        return _file(source, _figure, created=str(first.get("test_time") or ""))
    is_table = {"test", "t/s"} <= first.keys() and first.keys() & {"model", "size", "params", "backend"}
    if not is_table or any(_NOT_ITS_OWN.fullmatch(str(record["test"])) for record in records):
        return None
    return _file(source, _markdown_figure)


def _file(source: Source, figure: Callable[[Record], Figure], created: str = "") -> ForeignFile:
    records = source.records
    unknown = [escaped(name) for name in records[0] if not _is_known(name) and name not in _NOT_SETTINGS]
    shared, differing = apart([_settings(record) for record in records])
    devices = _DEVICES.findall(source.text) or (shared.get("device") or "").split(", ")
    if len(set(devices)) == 1 and devices[0]:
        shared["device"] = escaped(devices[0])
    redundant = _redundant(differing)
    settings = [tuple(item for item in own if item[0] not in redundant) for own in differing]
    figures = with_settings(records, settings, lambda record: [figure(record)])
    if shared.get("split_mode") == "none":
        del devices[1:]
    splits_layers = len(devices) > 1 and shared.get("split_mode", "layer") == "layer"
    remarks = [f"columns that are not read: {', '.join(unknown)}."] if unknown else []
    if splits_layers:
        remarks.append(f"it ran on {len(devices)} GPUs that hold layers in turn: the roofs are those of one.")
    return ForeignFile(
        "",
        _TOOL,
        figures,
        created,
        shared,
        gpus=len(devices) if len(devices) > 1 else None,
        splits_layers=splits_layers,
        remarks=tuple(remarks),
    )


def _redundant(settings: Sequence[Settings]) -> set[str]:
    """The settings of a model that follow from the first one that distinguishes all models of the file."""
    rows = {tuple((name, value) for name, value in own if name in _MODEL_SETTINGS) for own in settings}
    names = sorted({name for row in rows for name, _ in row}, key=_MODEL_SETTINGS.index)
    for name in names:
        if len({dict(row)[name] for row in rows}) == len(rows):
            return {*names} - {name}
    return set()


def _settings(record: Record) -> dict[str, object]:
    """The settings of a row, by the names that a comparison uses."""
    settings = {
        _NAMES.get(name, name): value for name, value in record.items() if _is_known(name) and name not in _NOT_SETTINGS
    }
    gpu = None if _gpu_layers(record) == 0 else record.get("gpu_info")
    device = gpu or record.get("cpu_info")
    return {**settings, "device": device} if device else settings


def _is_known(name: str) -> bool:
    return name in _NAMES or name in _NAMES.values() or _OTHERS.fullmatch(name) is not None


def _gpu_layers(record: Record) -> int | None:
    """Layers on the GPU of a machine that has one; Markdown has the column only on such a machine."""
    layers = str(record.get("n_gpu_layers" if record.get("gpu_info") else "ngl"))
    return int(layers) if layers.isdecimal() else None


def _figure(record: Record) -> Figure:
    prompt, new = whole_of(record["n_prompt"], "n_prompt"), whole_of(record["n_gen"], "n_gen")
    depth = whole_of(record.get("n_depth") or 0, "n_depth")
    test_s = number_of(record["avg_ns"], "avg_ns") / 1e9
    samples_s = samples_of(record.get("samples_ns"), "samples_ns", 1e-9)
    spread_s = float(record.get("stddev_ns") or 0) / 1e9
    size, params = record.get("model_size"), record.get("model_n_params")
    return _of_test(
        prompt,
        new,
        depth,
        test_s,
        spread_s,
        samples_s,
        weight_bytes=number_of(size, "model_size") / number_of(params, "model_n_params") if size and params else None,
        params=whole_of(params, "model_n_params", 1) if params else None,
        **_common(record),
    )


def _common(record: Record) -> dict[str, Any]:
    """Fields of a figure that all formats write alike; Markdown omits default values."""
    return {
        "chunk_tokens": whole_of(record.get("n_ubatch") or _DEFAULT_CHUNK, "n_ubatch", 1),
        "kv_itemsize": _kv_itemsize(record),
        "gpu_layers": _gpu_layers(record),
        "weights_on_host": any(str(record.get(name) or "0") != "0" for name in ("n_cpu_moe", "ncmoe"))
        or "CPU" in str(record.get("tensor_buft_overrides") or record.get("ot")),
    }


def _kv_itemsize(record: Record) -> float | None:
    """Bytes per element of the cache, averaged over keys and values; None for an unknown type."""
    sizes = [_ITEMSIZES.get(str(record.get(name) or "f16")) for name in ("type_k", "type_v")]
    return None if None in sizes else sum(filter(None, sizes)) / len(sizes)


def _of_test(
    prompt: int,
    new: int,
    depth: int,
    test_s: float,
    spread_s: float,
    samples_s: tuple[float, ...] = (),
    rounding_s: float = 0.0,
    **common: Any,
) -> Figure:
    """A figure from a test's sizes and its time; `spread_s` is the standard deviation of its repetitions.

    Without samples their number is unknown, and so is the precision of their mean.
    """
    if not prompt and not new:
        raise RequestError("a row has neither a prompt nor generated tokens.")
    steps = new if new and not prompt else 1
    covers: Covers = "generate" if prompt and new else "prefill" if prompt else "decode"
    notes = ["prompt and generation in one figure"] if covers == "generate" else []
    if common["kv_itemsize"] is None:
        notes.append("the type of its cache is unknown: counted with the bytes of the model's dtype")
    if not samples_s:
        notes.append("number of repetitions unknown: no interval of the mean")
    return Figure(
        covers=covers,
        seconds=test_s / steps,
        batch_size=1,
        prompt_len=prompt or None,
        context_len=depth if depth or not prompt else None,
        new_tokens=new or None,
        samples_s=tuple(value / steps for value in samples_s),
        half_width_s=0.0 if samples_s else _COVERAGE * spread_s / steps,
        rounding_s=rounding_s / steps,
        repeats=len(samples_s),
        notes=tuple(notes),
        **common,
    )


def _markdown_figure(record: Record) -> Figure:
    test, rate = _TEST.fullmatch(str(record["test"])), _RATE.fullmatch(str(record["t/s"]))
    if test is None or rate is None:
        raise RequestError(f"a row of llama-bench cannot be read: {record['test']!r}, {record['t/s']!r}.")
    prompt, new, depth = (whole_of(test[name] or 0, "test") for name in ("prompt", "new", "depth"))
    per_s, spread = number_of(rate["rate"], "t/s"), float((rate["spread"] or "0").replace(",", ""))
    size, params = _scaled(record.get("size"), _SIZES), _scaled(record.get("params"), _COUNTS)
    test_s = (prompt + new) / per_s
    return _of_test(
        prompt,
        new,
        depth,
        test_s,
        test_s * spread / per_s,
        rounding_s=test_s * half_a_unit(rate["rate"]) / per_s,
        weight_bytes=size / params if size and params else None,
        params=round(params) if params else None,
        **_common(record),
    )


def _scaled(text: object, units: Mapping[str, float]) -> float | None:
    """`92.10 MiB` or `134.52 M` as a number; None for anything else."""
    parts = str(text or "").split()
    if len(parts) != 2 or parts[1] not in units:
        return None
    return number_of(parts[0], "a size") * units[parts[1]]
