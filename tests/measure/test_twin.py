"""Dispatch is measured per engine, as the twin's own time while the model's weights are read."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from machines import HOST
from subjects import subject_of

from profiler.facts.dispatch import dispatch_of
from profiler.measure import dispatch


@pytest.mark.timing
@pytest.mark.slow
def test_weights_that_stream_by_are_taken_off_step_by_step(tiny_folder: Path) -> None:
    """Linears take 0 to 8 ms per call, 4 ms on average; the twin's own part does not depend on their sum in a step."""
    subject, config = subject_of(str(tiny_folder))
    linears = [module for module in subject.loaded.module.modules() if isinstance(module, torch.nn.Linear)]
    draw = random.Random(0)

    def stream(*_: object) -> None:
        until_s = time.perf_counter() + draw.uniform(0, 8e-3)
        while time.perf_counter() < until_s:
            pass

    for linear in linears:
        linear.register_forward_pre_hook(stream)
    measured = dispatch.measure_dispatch(subject.loaded, config, HOST, [1], ["eager"], 0.5)
    decode = next(item for item in measured if item.phase == "decode")
    streamed_s = 4e-3 * len(linears)
    found = dispatch_of(decode)
    assert 0 < found.in_kernels_s < found.step_s < 0.5 * streamed_s
