"""Migrate run.json and samples of older schema versions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiler.errors import RunError

SCHEMA_VERSION = 6

ADDED_COLUMNS = {
    "engine": "eager",
    "dequantise_s": "0",
    "link_s": "0",
    "generate_s": "0",
    "engine_s": "0",
    "padding_s": "0",
    **dict.fromkeys(
        (
            "ttft_s", "first_step_s", "p90_s", "p99_s", "issue_s", "joules_per_token", "device_memory_bytes", "stopped",
            "visits", "padding", "mask_s", "waiting_s", "ttft_p90_s", "ttft_p99_s",
        ),
        "",
    ),
}  # fmt: skip
"""Columns that cells.csv of older schemas lacks, with the text to read in their place."""

_MISSING_FACTS = ("operators.csv", "config.json", "samples of roofs, dispatch and replays")
_READINGS = (
    "readings", "clock_hz", "power_w", "sm_active", "memory_active", "temperature_c", "busy_cores_elsewhere",
    "other_processes", "throttle",
)  # fmt: skip


def migrated(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The content of a run.json, migrated to the current schema. Raises RunError for a newer schema."""
    version = content.get("schema_version", 0)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RunError(f"{folder} was written by a newer roofscope (schema {version}); upgrade to read it.")
    for old_version, migrate in sorted(_MIGRATIONS.items()):
        if version == old_version:
            version = old_version + 1
            content = {**migrate(content), "schema_version": version}
    return content


def _from_1(content: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 had one engine per run, no context lengths, and one link for offloaded weights."""
    engine, ceilings, model = dict(content["engine"]), dict(content["ceilings"]), dict(content["model"])
    link = ceilings.pop("host_link", None)
    model.pop("offloaded", None)
    evidence = [{"context_len": 0, "engine": engine["name"], **item} for item in content.get("evidence", [])]
    dispatch = ceilings.get("dispatch_s", {})
    name = engine.pop("name")
    return {
        **content,
        "evidence": evidence,
        "engine": {"names": [name], **engine},
        "ceilings": {
            **ceilings,
            "links": {"host": link} if link else {},
            "dispatch_s": dispatch if name in dispatch else {name: dispatch},
        },
        "model": {**model, "offloaded_bytes": {}},
        "grid": {**content["grid"], "context_lens": []},
    }


def _from_2(content: dict[str, Any]) -> dict[str, Any]:
    """Schema 2 counted dequantisation as kernel loss, and had no intervals of the terms."""
    return {**content, "evidence": [{"split_half_widths_s": {}, **item} for item in content.get("evidence", [])]}


def _from_3(content: dict[str, Any]) -> dict[str, Any]:
    """Schema 3 had only sums of replays, dispatch and roofs; a cell's key lacked the new tokens."""
    new_tokens = {"new_tokens": content["grid"]["new_tokens"]}
    model, engine, health = dict(content["model"]), dict(content["engine"]), dict(content.get("health", {}))

    def keyed(items: Any) -> list[dict[str, Any]]:
        return [{**new_tokens, **item} for item in items]

    evidence = keyed(content.get("evidence", []))
    for item in evidence:
        item["noise_reasons"] = item.get("noise_reasons", [])
        item["predicted_peak_memory_bytes"] = item.get("predicted_peak_memory_bytes", 0)
    readings = {name: health.pop(name, None) for name in _READINGS}
    return {
        **content,
        "model": {
            "double_quant": False,
            "compute_dtype": model["dtype"],
            "first_call_s": 0.0,
            "unpacked_from": None,
            "placement": None,
            "load_s": 0.0,
            **model,
        },
        "engine": {**engine, "differences": keyed(engine.get("differences", []))},
        "counting": {"coverage": 1.0, **content.get("counting", {})},
        "evidence": evidence,
        "breakdown": keyed(content.get("breakdown", [])),
        "activity": keyed(content.get("activity", [])),
        "quality": content.get("quality") or None,
        "health": {
            "readings": readings if readings["readings"] is not None else None,
            "not_seen": health.pop("not_seen", []),
            "idle_power_w": health.pop("idle_power_w", None),
            "settings": health,
        },
        "missing_facts": list(_MISSING_FACTS),
    }


def _from_4(content: dict[str, Any]) -> dict[str, Any]:
    """Schema 4 differs only in the samples of dispatch, which `dispatch_within` migrates."""
    return content


def _from_5(content: dict[str, Any]) -> dict[str, Any]:
    """Schema 5 lacks the columns `ttft_p90_s` and `ttft_p99_s`; p90_s and p99_s were those of any number of samples."""
    return content


_MIGRATIONS = {1: _from_1, 2: _from_2, 3: _from_3, 4: _from_4, 5: _from_5}
"""By the schema that each migrates to the next."""


def dispatch_within(record: dict[str, Any]) -> dict[str, Any]:
    """A record of dispatch samples, migrated to the current schema.

    Up to schema 4 a timed step included the model's linears, which were timed in turn with the steps. Dispatch is the
    difference between a step and the linears of the same turn, so a slow minute of the machine affects both. If the
    linears were timed only once, no sample is kept: a difference of 20 ms between two times of a second is noise. A
    difference may be too low as well as too high, so each is raised to at least their median.
    """
    if "linears_s" not in record:
        return record
    values = dict(record)
    steps_s, linears_s, with_bare_s = (values.pop(name) for name in ("among_s", "linears_s", "with_bare_s"))
    turns = math.gcd(len(steps_s), len(linears_s))

    def beyond_linears_s(samples_s: Sequence[float]) -> list[float]:
        pairs = zip(_medians(samples_s, turns), _medians(linears_s, turns), strict=True)
        return [whole_s - part_s for whole_s, part_s in pairs]

    calls_s, rests_s = beyond_linears_s(with_bare_s), beyond_linears_s(steps_s)
    bare_s = max(0.0, statistics.median(calls_s)) if calls_s else 0.0
    median_s = statistics.median(rests_s) if rests_s else 0.0
    among_s = [max(rest_s, median_s) + bare_s for rest_s in rests_s] if len(linears_s) > 1 else []
    return {**values, "among_s": among_s, "bare_s": [bare_s] if calls_s else []}


def _medians(values: Sequence[float], turns: int) -> list[float]:
    """The median of each turn, where `values` has the same number of consecutive values for each."""
    size = len(values) // turns if turns else 0
    return [statistics.median(values[turn * size : (turn + 1) * size]) for turn in range(turns)]
