"""Comparison of the profiler's figures for a scenario with the truth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profiler.facts.measurements import COMPILED, GRAPHED
from profiler.store.folder import Run

from .oracle import Phase, pairs
from .scenario import Scenario, so
from .truth import Truth

ROOFS = 0.03
REST = 0.05
PROMPT_S = 100e-6
"""Time to copy a prompt to the card and a token back: two copies over the link, with their waits."""


def held(scenario: Scenario, truth: Truth, run: Run, parent: Path) -> Iterator[tuple[Phase, dict[str, Any]]]:
    """Yield each cell's truth and its row, after checking the rules that hold for every scenario.

    In compiled code, the loss of small kernels is known only together with the unexplained rest.
    """
    ceilings = run.document.ceilings
    assert ceilings.memory_bytes_per_s == pytest.approx(truth.bytes_per_s, rel=ROOFS)
    for dtype, roof in ceilings.compute.items():
        assert roof.per_s == pytest.approx(truth.flops_per_s[dtype], rel=ROOFS), dtype
    assert ceilings.launch["submit_s"] == pytest.approx(truth.launch_s, rel=REST)
    for phase, row in pairs(so(scenario, truth, parent), run.cells):
        cell = f"{phase.engine} {phase.phase} {phase.batch_size} x {phase.prompt_len}"
        for name, true in (("latency_s", phase.latency_s), ("peak_memory_bytes", phase.peak_bytes)):
            assert row[name] == pytest.approx(true, rel=REST), f"{cell}: {name} is {true}, reported {row[name]}"
        if phase.phase == "prefill":
            beside_s = row["ttft_s"] - phase.latency_s
            assert 0 <= beside_s < REST * phase.latency_s + PROMPT_S, f"{cell}: time to first token is {row['ttft_s']}"
        terms = {name: row[name] for name in ("weights_s", "kv_s", "compute_s", "dequantise_s", "link_s", "dispatch_s")}
        unknown_s = row["unexplained_s"] if (phase.engine, phase.phase) == ("compile", "decode") else 0.0
        terms["beside_s"] = row["kernel_s"] + row["avoidable_s"] + row["dequantise_s"] + unknown_s
        for name, told_s in terms.items():
            true_s = getattr(phase, {"dispatch_s": "exposed_dispatch_s"}.get(name, name))
            assert abs(told_s - true_s) < REST * phase.latency_s, f"{cell}: {name} is {true_s}, reported {told_s}"
        left_s = row["unexplained_s"] - unknown_s
        assert abs(left_s) < REST * phase.latency_s, f"{cell}: {left_s} of {phase.latency_s} unexplained"
        yield phase, row


SAVE_THE_HOST = {GRAPHED, COMPILED, "fewer launches in the prefill (torch.compile)"}
"""Changes that save what the host adds; a compiled step saves small kernels too."""


def first_lever(run: Run, row: dict[str, Any]) -> str:
    """Return the change that saves the most in a cell, as printed."""
    keys = ("engine", "phase", "batch_size", "prompt_len")
    [item] = [item for item in run.document.evidence if all(getattr(item, key) == row[key] for key in keys)]
    return item.levers[0].change
