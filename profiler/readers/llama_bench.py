"""llama.cpp's llama-bench: json, jsonl, csv and md (tools/llama-bench/llama-bench.cpp).

JSON alone keeps each repetition (`samples_ns`); CSV and Markdown give their mean and their standard deviation (of the
sample, by n - 1; 0 for a single one) and never how many there were. A sweep (-t 1,2,4) gives a row each of one test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from profiler.errors import RequestError
from profiler.readers.figures import (
    Covers,
    Figure,
    ForeignFile,
    Settings,
    apart,
    figures_of,
    half_a_unit,
    number_of,
    samples_of,
    whole_of,
)

_TOOL = "llama-bench"
_TEST = re.compile(r"(?:pp(?P<prompt>\d+))?(?:\+?tg(?P<new>\d+))?(?: @ d(?P<depth>\d+))?")
_RATE = re.compile(r"(?P<rate>\d+\.?\d*)(?: ± (?P<spread>\d+\.?\d*))?")
# What a model is told by, the words before the numbers and the path.
_OF_MODEL = ("precision", "model's name", "size", "params", "model_size", "parameters")
_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# Bytes an element: blocks of 32 with a scale of 2 bytes, those of kind 1 with a minimum beside it, and those of 5 bits
# with their fifth bits apart (ggml-common.h: block_q4_0 and the like).
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
# What is no setting: the test, and what came of it; sizes and names of devices are told in their own words.
_NO_SETTINGS = {
    *("n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts"),
    *("samples_ns", "samples_ts", "cpu_info", "gpu_info", "test", "t/s"),
}
# Columns by the names that a comparison uses; Markdown shortens them (get_field_display_name).
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
_DEFAULT_CHUNK = 512
# A 95 % interval of one repetition is two of their standard deviations wide on each side.
_COVERAGE = 2.0


def read_llama_bench(records: Sequence[Mapping[str, Any]]) -> ForeignFile | None:
    """The figures of a file of llama-bench; None where it is another's. Raises RequestError for a broken one."""
    first = records[0] if records else {}
    if {"model_type", "n_prompt", "n_gen", "avg_ns"} <= first.keys():
        return _whole(records)
    if {"model", "test", "t/s"} <= first.keys():
        return _table(records)
    return None


def _whole(records: Sequence[Mapping[str, Any]]) -> ForeignFile:
    return _file(records, _figure, created=str(records[0].get("test_time") or ""))


def _file(
    records: Sequence[Mapping[str, Any]], figure: Callable[[Mapping[str, Any]], Figure], created: str = ""
) -> ForeignFile:
    settings, each = apart([_settings(record) for record in records])
    needless = _needless(each)
    told = [tuple(item for item in own if item[0] not in needless) for own in each]
    figures = (replace(figure(record), settings=own) for record, own in zip(records, told, strict=True))
    return ForeignFile("", _TOOL, figures_of(figures), created, settings)


def _needless(each: Sequence[Settings]) -> set[str]:
    """What follows of several models from the first that tells them apart."""
    rows = {tuple((name, value) for name, value in own if name in _OF_MODEL) for own in each}
    names = sorted({name for row in rows for name, _ in row}, key=_OF_MODEL.index)
    for name in names:
        if len({dict(row)[name] for row in rows}) == len(rows):
            return {*names} - {name}
    return set()


def _settings(record: Mapping[str, Any]) -> dict[str, object]:
    """All that a row tells of how it was measured."""
    told = {_NAMES.get(name, name): value for name, value in record.items() if name not in _NO_SETTINGS}
    card = None if _on_host(record) else record.get("gpu_info")
    device = card or record.get("cpu_info")
    return {**told, "device": device} if device else told


def _on_host(record: Mapping[str, Any]) -> bool:
    """Whether there is a card and no layer lies on it; Markdown has that column beside a card alone."""
    return str(record.get("n_gpu_layers" if record.get("gpu_info") else "ngl")) == "0"


def _figure(record: Mapping[str, Any]) -> Figure:
    prompt, new = whole_of(record["n_prompt"], "n_prompt"), whole_of(record["n_gen"], "n_gen")
    depth = whole_of(record.get("n_depth") or 0, "n_depth")
    whole_s = number_of(record["avg_ns"], "avg_ns") / 1e9
    samples_s = samples_of(record.get("samples_ns"), "samples_ns", 1e-9)
    spread_s = float(record.get("stddev_ns") or 0) / 1e9
    size, params = record.get("model_size"), record.get("model_n_params")
    return _of_test(
        prompt,
        new,
        depth,
        whole_s,
        spread_s,
        samples_s,
        weight_bytes=number_of(size, "model_size") / number_of(params, "model_n_params") if size and params else None,
        params=whole_of(params, "model_n_params", 1) if params else None,
        **_of_row(record),
    )


def _of_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """What every format tells in one way, Markdown where it is not the default."""
    return {
        "chunk_tokens": whole_of(record.get("n_ubatch") or _DEFAULT_CHUNK, "n_ubatch", 1),
        "kv_itemsize": _kv_itemsize(record),
        "on_host": _on_host(record),
    }


def _kv_itemsize(record: Mapping[str, Any]) -> float | None:
    """Keys and values are as many, each of their own type; None for a type that is not known."""
    sizes = [_ITEMSIZES.get(str(record.get(name) or "f16")) for name in ("type_k", "type_v")]
    return None if None in sizes else sum(filter(None, sizes)) / len(sizes)


def _of_test(
    prompt: int,
    new: int,
    depth: int,
    whole_s: float,
    spread_s: float,
    samples_s: tuple[float, ...] = (),
    rounding_s: float = 0.0,
    **of_row: Any,
) -> Figure:
    """A figure from a test's sizes and its time; `spread_s` is the standard deviation of its repetitions.

    Without those one by one nobody knows how many there were, nor so how well their mean is known.
    """
    if not prompt and not new:
        raise RequestError("a row has neither a prompt nor generated tokens.")
    steps = new if new and not prompt else 1
    covers: Covers = "generate" if prompt and new else "prefill" if prompt else "decode"
    notes = ["prompt and generation in one figure"] if covers == "generate" else []
    if of_row["kv_itemsize"] is None:
        notes.append("its cache's type is not known here: counted with the model's own bytes")
    if not samples_s:
        notes.append("repetitions not told: nothing is claimed of its spread")
    return Figure(
        covers=covers,
        seconds=whole_s / steps,
        batch_size=1,
        prompt_len=prompt or None,
        context_len=depth if depth or not prompt else None,
        new_tokens=new or None,
        samples_s=tuple(value / steps for value in samples_s),
        half_width_s=0.0 if samples_s else _COVERAGE * spread_s / steps,
        rounding_s=rounding_s / steps,
        repeats=len(samples_s),
        notes=tuple(notes),
        **of_row,
    )


def _table(records: Sequence[Mapping[str, Any]]) -> ForeignFile:
    return _file(records, _row)


def _row(record: Mapping[str, Any]) -> Figure:
    test, rate = _TEST.fullmatch(str(record["test"])), _RATE.fullmatch(str(record["t/s"]))
    if test is None or rate is None:
        raise RequestError(f"a row of llama-bench cannot be read: {record['test']!r}, {record['t/s']!r}.")
    prompt, new, depth = (whole_of(test[name] or 0, "test") for name in ("prompt", "new", "depth"))
    per_s, spread = number_of(rate["rate"], "t/s"), float(rate["spread"] or 0)
    size, params = _scaled(record.get("size"), _SIZES), _scaled(record.get("params"), _COUNTS)
    whole_s = (prompt + new) / per_s
    return _of_test(
        prompt,
        new,
        depth,
        whole_s,
        whole_s * spread / per_s,
        rounding_s=whole_s * half_a_unit(rate["rate"]) / per_s,
        weight_bytes=size / params if size and params else None,
        **_of_row(record),
    )


def _scaled(text: object, units: Mapping[str, float]) -> float | None:
    """`92.10 MiB` or `134.52 M` as a number."""
    parts = str(text or "").split()
    if len(parts) != 2 or parts[1] not in units:
        return None
    return number_of(parts[0], "a size") * units[parts[1]]
