"""Dispatch speed of one host core: decode steps of a standard hollow twin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from profiler import effort
from profiler.device.clock import CoreClock, no_gc, time_calls
from profiler.device.machine import Machine
from profiler.facts.roofs import HostPace
from profiler.loading.cache_argument import argument_name, cache_of
from profiler.stats import undisturbed

HOST_PACE_STEPS = 32
_PROMPT = 8
# The layers of SmolLM2-135M, with widths that leave almost nothing to compute.
_TWIN = {
    "num_hidden_layers": 30,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "attn_implementation": "sdpa",
}


def measure_host_pace(machine: Machine, budget_s: float | None = None) -> HostPace:
    """Return the seconds of a decode step of the standard twin: a Llama of 30 narrow layers, float32, eager, batch 1.

    It takes `budget_s`, by default what a usual run takes.

    It runs on the CPU in one thread, whatever device and model are profiled. What is timed is Python, torch's
    dispatcher and the kernel calls, as CPU time of the thread. Each run of steps counts with its fastest quartile,
    since only other processes slow a step down.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    deadline_s = machine.now_s() + (effort.STANDARD.host_pace_s if budget_s is None else budget_s)
    runs: list[float] = []
    with torch_threads(1), torch.inference_mode(), no_gc():
        model = LlamaForCausalLM(LlamaConfig(**_TWIN)).eval()
        while not runs or machine.now_s() < deadline_s:
            runs.append(undisturbed(_steps(model)).quartile_s)
    return HostPace(undisturbed(runs).quartile_s, tuple(runs))


def _steps(model: Any) -> list[float]:
    """Seconds of consecutive decode steps."""
    first = model(input_ids=torch.zeros(1, _PROMPT, dtype=torch.long), use_cache=True, logits_to_keep=1)
    name, cache, token = argument_name(model), cache_of(first), first.logits[:, -1:].argmax(-1)

    def step() -> None:
        nonlocal token
        token = model(input_ids=token, use_cache=True, **{name: cache}).logits[:, -1:].argmax(-1)

    return time_calls(step, CoreClock(), HOST_PACE_STEPS)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Context manager: torch runs on `count` threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
