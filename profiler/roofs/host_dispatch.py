"""How fast one core of the host dispatches: the steps of a standard hollow twin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from profiler.device.clock import CoreClock, no_gc, time_calls
from profiler.device.machine import Machine
from profiler.effort import STANDARD
from profiler.facts.roofs import HostPace
from profiler.loading.cache_argument import argument_name, cache_of
from profiler.stats import undisturbed

HOST_PACE_STEPS = 32
_PROMPT = 8
# SmolLM2-135M's layers, at widths that leave next to nothing to compute.
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


def measure_host_pace(machine: Machine, budget_s: float = STANDARD.host_pace_s) -> HostPace:
    """Seconds of a decode step of the standard twin: a Llama of 30 narrow layers, float32, eager, batch 1.

    It steps on the CPU in one thread, whatever `machine` computes with and whatever model is profiled: Python, torch's
    dispatcher and the calls of kernels are what is timed, by the time that the thread had its core for. Of each run of
    steps the fastest quartile is kept, since what slows a step down is others' work.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    deadline_s = machine.now_s() + budget_s
    runs: list[float] = []
    with _one_thread(), torch.inference_mode(), no_gc():
        model = LlamaForCausalLM(LlamaConfig(**_TWIN)).eval()
        while not runs or machine.now_s() < deadline_s:
            runs.append(undisturbed(_steps(model)).quartile_s)
    return HostPace(undisturbed(runs).quartile_s, tuple(runs))


def _steps(model: Any) -> list[float]:
    """Seconds of decode steps in a row."""
    first = model(input_ids=torch.zeros(1, _PROMPT, dtype=torch.long), use_cache=True, logits_to_keep=1)
    name, cache, token = argument_name(model), cache_of(first), first.logits[:, -1:].argmax(-1)

    def step() -> None:
        nonlocal token
        token = model(input_ids=token, use_cache=True, **{name: cache}).logits[:, -1:].argmax(-1)

    return time_calls(step, CoreClock(), HOST_PACE_STEPS)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
