"""A new variant is one function: it is tried and stored without further edits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import torch
from hurry import with_effort

import profiler
from profiler.measure.subject import Subject
from profiler.measure.variants import VARIANTS, Variant


def in_double(subject: Subject) -> Iterator[Variant]:
    if subject.request.dtype is not torch.float64:
        yield Variant("a toy dtype", dtype=torch.float64, quant="none")


@pytest.mark.slow
def test_a_run_tries_and_stores_it(profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.measure.variants.VARIANTS", [in_double, *VARIANTS])
    with_effort(monkeypatch, trials_share=15.0)
    run = profile_tiny(no_levers=False)
    records = map(json.loads, (run.folder / "samples.jsonl").read_text().splitlines())
    trials = [record for record in records if record.get("form") == "a toy dtype"]
    assert {trial["phase"] for trial in trials} == {"prefill", "decode"}
