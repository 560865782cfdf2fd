"""The parts of `generate`: a planted delay is found where it was planted, and reads of the device are counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import profiler
from profiler.judge.breakdown import TERMS
from profiler.judge.engine_differences import PART_NAMES
from profiler.measure.generate import count_reads
from profiler.report.engines import generate

_DELAY_S = 0.02


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_reads_of_values_are_counted(mode: Any) -> None:
    values = torch.arange(4)

    def read() -> None:
        values.sum().item()
        bool(values.max() == 0)
        float(values[0])
        values + values  # no read

    with mode():
        assert count_reads(read) == 3


@pytest.mark.slow
def test_the_tax_is_found_where_it_was_planted(
    profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check of the stopping criteria waits 20 ms; our own loop has no such check."""
    from transformers.generation.stopping_criteria import StoppingCriteriaList

    asked = StoppingCriteriaList.__call__

    def slowly(self: Any, *args: Any, **named: Any) -> Any:
        time.sleep(_DELAY_S)
        return asked(self, *args, **named)

    monkeypatch.setattr(StoppingCriteriaList, "__call__", slowly)
    run = profile_tiny(batch_sizes=[2], new_tokens=5, engine="generate", budget_s=2)
    assert run.document.asked.engines == ("eager", "generate")
    tax, once = sorted(run.document.generate, key=lambda item: item.phase)
    assert tax.tax_s > _DELAY_S / 2 < once.tax_s
    assert set(tax.parts_s) == set(PART_NAMES)
    assert sum(tax.parts_s.values()) == pytest.approx(tax.tax_s)
    assert max(tax.parts_s, key=lambda name: tax.parts_s[name]) == "stopping"
    assert tax.parts_s["stopping"] >= _DELAY_S
    assert tax.reads_a_token is not None
    assert tax.reads_a_token >= 1  # the read of whether all sequences are done
    [row] = [row for row in run.results if row.engine == "generate" and row.phase == "decode"]
    assert row.generate_s == tax.tax_s
    assert sum(getattr(row, term) for term in TERMS) == pytest.approx(row.latency_s, rel=1e-9)
    [own] = [row for row in run.results if row.engine == "eager" and row.phase == "decode"]
    assert own.generate_s == 0
    claimed = replace(run.document, generate=(replace(tax, visits=2, low_s=tax.tax_s / 2, high_s=2 * tax.tax_s),))
    [line] = generate(replace(run, document=claimed)).blocks[0].lines
    assert f"transformers {run.document.software['transformers']}'s generate adds" in line
    assert "stopping criteria 2" in line
