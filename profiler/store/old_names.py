"""Names that run folders had before 0.5.0."""

from typing import Any

from profiler.units import each_text, visible

_NAMES_NOW = {
    "above-roof": "above-ceiling",
    "avoidable_bytes": "redundant_bytes",
    "avoidable_bytes_by_cause": "redundant_bytes_by_cause",
    "avoidable_flops_by_cause": "redundant_flops_by_cause",
    "avoidable_s": "redundant_s",
    "dispatch_s": "overhead_s",
    "int32 matmuls": "int32 results",
    "int32 products": "int32 results",
    "kernel-bound": "slow-kernels",
    "levers": "changes",
    "roof": "ceiling",
    "roof_s": "ceiling_s",
    "visits": "repetitions",
}
"""Keys and values of run.json, samples.jsonl and operators.csv, and columns of the CSV files."""


def name_now(name: str) -> str:
    return _NAMES_NOW.get(name, name)


def content_now(content: Any) -> Any:
    """Return parsed JSON with the names of today, and with texts that are safe to show."""
    return each_text(content, lambda text: name_now(visible(text)))
