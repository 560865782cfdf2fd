"""Migrate run.json and samples of older schema versions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiler.errors import RunError

SCHEMA_VERSION = 5

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
            "visits", "padding", "mask_s", "waiting_s",
        ),
        "",
    ),
}  # fmt: skip
"""Columns that cells.csv of older schemas did not have, with the text that stands for them."""

_NOT_KEPT = ("operators.csv", "config.json", "samples of roofs, dispatch and replays")
_READINGS = (
    "readings",
    "clock_hz",
    "power_w",
    "sm_active",
    "memory_active",
    "temperature_c",
    "busy_cores_elsewhere",
    "other_processes",
    "throttle",
)


def migrated(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """A run.json of an older version as this one would have written it. Raises RunError for a newer one."""
    version = content.get("schema_version", 0)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RunError(f"{folder} was written by a newer roofscope (schema {version}); upgrade to read it.")
    for known, migrate in sorted(_MIGRATIONS.items()):
        if version == known:
            content = {**migrate(content), "schema_version": known + 1}
            version = known + 1
    return content


def _from_1(content: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 knew one engine a run, no context lengths, and one link that offloaded weights cross."""
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
    """Schema 2 counted what dequantising took among the kernels' losses, and did not say how far a term may be off."""
    return {**content, "evidence": [{"split_half_widths_s": {}, **item} for item in content.get("evidence", [])]}


def _from_3(content: dict[str, Any]) -> dict[str, Any]:
    """Schema 3 kept replays, dispatch and roofs as sums alone; what told cells apart lacked the new tokens."""
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
        "missing_facts": list(_NOT_KEPT),
    }


def _from_4(content: dict[str, Any]) -> dict[str, Any]:
    """Schema 4 kept samples of dispatch in another way: `dispatch_within`."""
    return content


# From which schema to the next one.
_MIGRATIONS = {1: _from_1, 2: _from_2, 3: _from_3, 4: _from_4}


def dispatch_within(record: dict[str, Any]) -> dict[str, Any]:
    """A record of dispatch, whose steps up to schema 4 held the model's linears, timed beside them turn by turn.

    Neighbours in time are held together, so that a minute in which the machine was slower falls on both. Of steps whose
    linears were timed once nothing is kept: 20 ms between two times of a second are the machine's, not the model's. A
    difference may lie on either side of the truth: nothing below their median counts as undisturbed.
    """
    if "linears_s" not in record:
        return record
    values = dict(record)
    steps, linears, with_bare = (values.pop(name) for name in ("among_s", "linears_s", "with_bare_s"))
    turns = math.gcd(len(steps), len(linears))
    calls = [whole - part for whole, part in zip(_medians(with_bare, turns), _medians(linears, turns), strict=True)]
    bare_s = max(0.0, statistics.median(calls)) if calls else 0.0
    besides = [whole - part for whole, part in zip(_medians(steps, turns), _medians(linears, turns), strict=True)]
    median_s = statistics.median(besides) if besides else 0.0
    among = [max(seconds, median_s) + bare_s for seconds in besides] if len(linears) > 1 else []
    return {**values, "among_s": among, "bare_s": [bare_s] if calls else []}


def _medians(values: Sequence[float], turns: int) -> list[float]:
    size = len(values) // turns if turns else 0
    return [statistics.median(values[turn * size : (turn + 1) * size]) for turn in range(turns)]
