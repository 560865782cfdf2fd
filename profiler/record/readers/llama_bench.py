"""llama.cpp's llama-bench: json, jsonl, csv and md (tools/llama-bench/llama-bench.cpp)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from profiler.errors import RequestError
from profiler.record.readers.figures import (
    Covers,
    Figure,
    ForeignFile,
    figures_of,
    number_of,
    samples_of,
    texts,
    whole_of,
)

_TOOL = "llama-bench"
_TEST = re.compile(r"(?:pp(?P<prompt>\d+))?(?:\+?tg(?P<new>\d+))?(?: @ d(?P<depth>\d+))?")
_RATE = re.compile(r"(?P<rate>\d+\.?\d*)(?: ± (?P<spread>\d+\.?\d*))?")
_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_ITEMSIZES = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 1}
_DEFAULT_REPEATS = 5
_DEFAULT_CHUNK = 512


def read(records: Sequence[Mapping[str, Any]]) -> ForeignFile | None:
    """The figures of a file of llama-bench; None where it is another's. Raises RequestError for a broken one."""
    first = records[0] if records else {}
    if {"model_type", "n_prompt", "n_gen", "avg_ns"} <= first.keys():
        return _whole(records)
    if {"model", "test", "t/s"} <= first.keys():
        return _table(records)
    return None


def _whole(records: Sequence[Mapping[str, Any]]) -> ForeignFile:
    first = records[0]
    return ForeignFile(
        name="",
        tool=_TOOL,
        figures=figures_of(_figure(record) for record in records),
        created=str(first.get("test_time") or ""),
        settings=texts(
            {
                "model's name": first.get("model_filename"),
                "parameters": first.get("model_n_params"),
                "device": first.get("gpu_info") or first.get("cpu_info"),
                "precision": first["model_type"],
                "threads": first.get("n_threads"),
                "llama.cpp": first.get("build_commit"),
            }
        ),
    )


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
        chunk_tokens=whole_of(record.get("n_ubatch") or _DEFAULT_CHUNK, "n_ubatch", 1),
        kv_itemsize=_ITEMSIZES.get(str(record.get("type_k"))),
    )


def _of_test(
    prompt: int,
    new: int,
    depth: int,
    whole_s: float,
    spread_s: float,
    samples_s: tuple[float, ...] = (),
    **of_weights: Any,
) -> Figure:
    """A figure from a test's sizes and its time; `spread_s` is the standard deviation of its repetitions."""
    if not prompt and not new:
        raise RequestError("a row has neither a prompt nor generated tokens.")
    steps = new if new and not prompt else 1
    covers: Covers = "generate" if prompt and new else "prefill" if prompt else "decode"
    repeats = len(samples_s) or _DEFAULT_REPEATS
    notes = ["prompt and generation in one figure"] if covers == "generate" else []
    if not samples_s:
        notes.append(f"repetitions not told, taken for {_DEFAULT_REPEATS}")
    return Figure(
        covers=covers,
        seconds=whole_s / steps,
        batch_size=1,
        prompt_len=prompt or None,
        context_len=depth if depth or not prompt else None,
        new_tokens=new or None,
        samples_s=tuple(value / steps for value in samples_s),
        half_width_s=2 * spread_s / steps / repeats**0.5,
        repeats=repeats,
        notes=tuple(notes),
        **of_weights,
    )


def _table(records: Sequence[Mapping[str, Any]]) -> ForeignFile:
    first = records[0]
    return ForeignFile(
        name="",
        tool=_TOOL,
        figures=figures_of(_row(record) for record in records),
        settings=texts({"precision": first["model"], "threads": first.get("threads")}),
    )


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
        weight_bytes=size / params if size and params else None,
        chunk_tokens=_DEFAULT_CHUNK,
        kv_itemsize=2,
    )


def _scaled(text: object, units: Mapping[str, float]) -> float | None:
    """`92.10 MiB` or `134.52 M` as a number."""
    parts = str(text or "").split()
    if len(parts) != 2 or parts[1] not in units:
        return None
    return number_of(parts[0], "a size") * units[parts[1]]
