"""Older run.json files as this version would have written them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from profiler.errors import RunError

SCHEMA_VERSION = 3


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
    return {
        **content,
        "evidence": evidence,
        "engine": {"names": [engine.pop("name")], **engine},
        "ceilings": {**ceilings, "links": {"host": link} if link else {}},
        "model": {**model, "offloaded_bytes": {}},
        "grid": {**content["grid"], "context_lens": []},
    }


def _from_2(content: dict[str, Any]) -> dict[str, Any]:
    """Schema 2 counted what dequantising took among the kernels' losses, and did not say how far a term may be off."""
    return {**content, "evidence": [{"split_half_widths_s": {}, **item} for item in content.get("evidence", [])]}


# From which schema to the next one.
_MIGRATIONS = {1: _from_1, 2: _from_2}
# Columns that cells.csv of older schemas did not have, with what stands for them.
ADDED_SINCE_1: dict[str, str | float] = {
    "engine": "eager",
    "ttft_s": math.nan,
    "first_step_s": math.nan,
    "p90_s": math.nan,
    "p99_s": math.nan,
    "issue_s": math.nan,
    "joules_per_token": math.nan,
    "device_memory_bytes": math.nan,
    "stopped": "",
    "dequantise_s": 0.0,
}
