"""torch's profiler (kineto), without its output on the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity


@contextmanager
def recorded(*, cuda: bool) -> Iterator[Any]:
    """A torch.profiler.profile of what runs within, on the host and with `cuda` on the device too."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with _silent(), torch.profiler.profile(activities=activities) as profile:
        yield profile


@contextmanager
def _silent() -> Iterator[None]:
    """Kineto writes to the process's own error stream, past Python."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
