"""Dispatch is measured per engine, as the twin's own time while the model's weights are read."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from machines import CPU

from profiler.device.machine import machine_for
from profiler.facts.dispatch import dispatch_of
from profiler.loading.config import load_config
from profiler.loading.load import load
from profiler.loading.request import ModelRequest
from profiler.loading.source import resolve
from profiler.measure import dispatch


@pytest.mark.parametrize(("budget_s", "sizes"), [(0.0, {1}), (60.0, {1, 2, 4})])
def test_without_time_only_the_first_batch_size_has_a_turn(budget_s: float, sizes: set[int], tiny_folder: Path) -> None:
    """A prefill has one sequence at each batch size."""
    source = resolve(str(tiny_folder))
    config = load_config(source)
    loaded = load(ModelRequest(source, CPU, torch.float32), config)
    found = dispatch.measure_dispatch(loaded, config, machine_for(CPU), [1, 2, 4], ["eager"], budget_s)
    assert {item.batch_size for item in found if item.phase == "decode"} == sizes
    assert {item.batch_size for item in found if item.phase == "prefill"} == {1, 2, 4}


@pytest.mark.timing
@pytest.mark.slow
def test_weights_that_stream_by_are_taken_off_step_by_step(tiny_folder: Path) -> None:
    """Linears take 0 to 8 ms per call, 4 ms on average; the twin's own part does not depend on their sum in a step."""
    source = resolve(str(tiny_folder))
    config = load_config(source)
    loaded = load(ModelRequest(source, CPU, torch.float32), config)
    linears = [module for module in loaded.module.modules() if isinstance(module, torch.nn.Linear)]
    draw = random.Random(0)

    def stream(*_: object) -> None:
        until_s = time.perf_counter() + draw.uniform(0, 8e-3)
        while time.perf_counter() < until_s:
            pass

    for linear in linears:
        linear.register_forward_pre_hook(stream)
    machine = machine_for(CPU)
    decode = next(
        item
        for item in dispatch.measure_dispatch(loaded, config, machine, [1], ["eager"], 0.5)
        if item.phase == "decode"
    )
    streamed_s = 4e-3 * len(linears)
    found = dispatch_of(decode)
    assert 0 < found.in_kernels_s < found.step_s < 0.5 * streamed_s
