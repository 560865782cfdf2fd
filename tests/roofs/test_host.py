"""The host's pace: one core, the same steps on every machine, cached with the roofs."""

from __future__ import annotations

import time

import pytest
import torch
from machines import HOST
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.roofs.fixed_work import measure_host_pace


class Threads(TorchDispatchMode):
    """The numbers of threads of the calls that reach torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_it_steps_in_one_thread() -> None:
    before = torch.get_num_threads()
    with Threads() as threads:
        pace = measure_host_pace(HOST, 0.0)
    assert (threads.seen, torch.get_num_threads(), len(pace.seconds)) == ({1}, before, 1)


@pytest.mark.timing
def test_it_is_what_a_plain_loop_takes() -> None:
    """The pace is near the fastest quartile of a user's loop, which excludes disturbances."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 30, "head_dim": 8, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2)).eval()
    token, cache, taken, threads = torch.zeros(1, 8, dtype=torch.long), None, [], torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for _ in range(100):
            before = time.thread_time()
            output = model(input_ids=token, past_key_values=cache, use_cache=True)
            token, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            taken.append(time.thread_time() - before)
    torch.set_num_threads(threads)
    assert 0.5 < measure_host_pace(HOST, 1.0).step_s / sorted(taken)[25] < 2
