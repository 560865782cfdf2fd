"""torch's profiler (Kineto), without its output on the screen."""

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
    """Record what runs within as a `torch.profiler.profile`: on the host, and with `cuda` on the device too."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with _silent(), torch.profiler.profile(activities=activities) as profile:
        yield profile


@contextmanager
def _silent() -> Iterator[None]:
    """Discard stderr within, at the level of the file descriptor: Kineto bypasses Python's `sys.stderr`."""
    sys.stderr.flush()
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
