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
    with _silent(), _stopped(), torch.profiler.profile(activities=activities) as profile:
        yield profile


@contextmanager
def _stopped() -> Iterator[None]:
    """Stop a profiler that an error left on: its exit waits for the device before it stops.

    torch 2.13, autograd/profiler.py, `profile.__exit__`. Everything that follows would be recorded, and slower.
    """
    was_on = torch.autograd._profiler_enabled()
    try:
        yield
    finally:
        if torch.autograd._profiler_enabled() and not was_on:
            torch.autograd._disable_profiler()


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
