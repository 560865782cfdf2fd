"""Dispatch is measured engine by engine: what one cannot takes nothing from the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from machines import CPU

from profiler.engines.transformers import StaticEngine
from profiler.loading.catalog import resolve
from profiler.loading.config import load_config
from profiler.loading.load import load
from profiler.loading.request import ModelRequest
from profiler.machine.machine import machine_for
from profiler.probes import dispatch


@pytest.mark.slow
def test_an_engine_that_fails_leaves_the_others_their_samples(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(StaticEngine, "prefill", refuse)
    source = resolve(str(tiny_folder))
    config = load_config(source)
    loaded = load(ModelRequest(source, CPU, torch.float32), config)
    found = dispatch.measure_dispatch(loaded, config, machine_for(CPU), [1, 2], ["static", "eager"], 0.1)
    assert {(item.engine, item.phase, item.batch_size) for item in found} == {
        ("eager", phase, batch) for phase in ("prefill", "decode") for batch in (1, 2)
    }
