"""Names that run folders had before 0.5.0."""

from __future__ import annotations

from typing import Any

_KEYS = {
    "avoidable_bytes": "redundant_bytes",
    "avoidable_bytes_by_cause": "redundant_bytes_by_cause",
    "avoidable_flops_by_cause": "redundant_flops_by_cause",
    "avoidable_s": "redundant_s",
    "dispatch_s": "overhead_s",
    "levers": "changes",
    "roof": "ceiling",
    "roof_s": "ceiling_s",
    "visits": "repetitions",
}
"""Keys of run.json and samples.jsonl, and columns of the CSV files."""
_VALUES = {"kernel-bound": "slow-kernels"}


def key_now(name: str) -> str:
    """Return what a key or column is called now."""
    return _KEYS.get(name, name)


def content_now(content: Any) -> Any:
    """Return parsed JSON with the names of today."""
    if isinstance(content, dict):
        return {key_now(key): content_now(value) for key, value in content.items()}
    if isinstance(content, list):
        return [content_now(item) for item in content]
    return _VALUES.get(content, content) if isinstance(content, str) else content
