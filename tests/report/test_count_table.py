"""What `roofscope count` prints of a document, cards that cannot hold the step among it."""

from __future__ import annotations

from typing import Any

import pytest

from profiler.report.console import screen
from profiler.report.count import count_csv, print_count


@pytest.fixture
def document() -> dict[str, Any]:
    """A decode step of one linear of 70 billion bfloat16 weights."""
    head = {
        "name": "head",
        "group": "head",
        "count": 1,
        "dtype": "bfloat16",
        "model_flops": 140_000_000_000,
        "executed_flops": 140_000_000_000,
        "model_bytes": 140_000_000_000,
        "executed_bytes": 140_000_000_000,
    }
    return {
        "model": "big",
        "params": 70_000_000_000,
        "dtype": "bfloat16",
        "quant": "none",
        "published": None,
        "gguf": None,
        "note": "",
        "phase": "decode",
        "batch": 1,
        "query_tokens": 1,
        "context_tokens": 512,
        "model_flops": 140_000_000_000,
        "executed_flops": 140_000_000_000,
        "bytes": {"weights": 140_000_000_000, "activations": 0, "total": 140_000_000_000},
        "executed_bytes": {"avoidable": {"cache copies": 1_000_000}, "total": 140_001_000_000},
        "intensity": 1.0,
        "coverage": 1.0,
        "unknown": [],
        "operators": [head],
        "gpus": [
            {
                "gpu": "T4",
                "dtype": "float16",
                "ridge_flops_per_byte": 203.1,
                "floor_s": None,
                "bound": None,
                "refusal": "T4: does not fit; the step needs 141 GB, the card has 17.2 GB",
            },
            {
                "gpu": "H200 SXM",
                "dtype": "bfloat16",
                "ridge_flops_per_byte": 206.0,
                "floor_s": 0.0292,
                "bound": "memory",
                "refusal": None,
            },
        ],
    }


def test_a_card_that_cannot_hold_it_gets_a_line_and_no_floor(
    document: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    print_count(document, screen())
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "T4: does not fit; the step needs 141 GB, the card has 17.2 GB" in lines
    assert sum("T4" in line for line in lines) == 1
    assert any(line.split() == ["H200", "SXM", "206", "29.2", "ms", "memory"] for line in lines)
    assert max(map(len, lines)) <= 100


def test_no_table_where_no_card_can(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_count({**document, "gpus": document["gpus"][:1]}, screen())
    out = capsys.readouterr().out
    assert "ridge" not in out
    assert "T4: does not fit" in out


def test_numbers_are_whole(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_count(document, screen())
    out = capsys.readouterr().out
    assert "140,000,000,000 FLOPs over 140,000,000,000 bytes, intensity 1.000 FLOP/byte" in out
    assert "cache copies 1.00 MB" in out
    assert count_csv(document).splitlines()[1].startswith("head,head,1,bfloat16,140000000000")
