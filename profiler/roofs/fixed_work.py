"""Fixed work that shows a machine's speed: steps of a standard overhead model for the host, and the drift probe."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from profiler import effort
from profiler.device.clock import CoreClock, no_gc, time_calls
from profiler.device.machine import Machine
from profiler.facts.ceilings import DriftReading, HostPace
from profiler.loading.cache_argument import argument_name, cache_of
from profiler.patching import switched
from profiler.stats import undisturbed

HOST_PACE_STEPS = 32
_LEAST_RUNS = 3
_PROMPT = 8
# The layers of SmolLM2-135M, with widths that leave almost nothing to compute.
_OVERHEAD_MODEL = {
    "num_hidden_layers": 30, "hidden_size": 48, "intermediate_size": 48, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 256, "max_position_embeddings": 256,
    "attn_implementation": "sdpa",
}  # fmt: skip


def measure_host_pace(machine: Machine, budget_s: float) -> HostPace:
    """Return the seconds of an eager decode step of a standard overhead model: a float32 Llama of 30 narrow layers.

    It ends after `budget_s`, or when the two fastest runs agree. It is the CPU time of one thread, whatever the device:
    Python, torch's dispatcher and kernel calls. A run counts with its fastest quartile, since others only slow it down.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    deadline_s = machine.now_s() + budget_s
    runs: list[float] = []
    one_thread = switched(torch.set_num_threads, 1, torch.get_num_threads())
    with one_thread, torch.inference_mode(), no_gc():
        model = LlamaForCausalLM(LlamaConfig(**_OVERHEAD_MODEL)).eval()
        while len(runs) < _LEAST_RUNS or sorted(runs)[1] > (1 + _AGREE) * min(runs):
            if runs and machine.now_s() > deadline_s:
                break
            runs.append(undisturbed(_steps(model)).quartile_s)
    return HostPace(undisturbed(runs).quartile_s, tuple(runs))


def _steps(model: Any) -> list[float]:
    first = model(input_ids=torch.zeros(1, _PROMPT, dtype=torch.long), use_cache=True, logits_to_keep=1)
    name, cache, token = argument_name(model), cache_of(first), first.logits[:, -1:].argmax(-1)

    def step() -> None:
        nonlocal token
        token = model(input_ids=token, use_cache=True, **{name: cache}).logits[:, -1:].argmax(-1)

    return time_calls(step, CoreClock(), HOST_PACE_STEPS)


PROBE_BYTES = 256 << 20
_SIDE = 1024
_AGREE = 0.02
# Limit in seconds for each kind of work in one reading; only a busy machine reaches it.
_MOST_S = 1.0


class DriftProbe:
    """Times reads and a matmul, to detect changes in the machine's speed, in bursts until two agree."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._buffer = torch.rand(PROBE_BYTES // 4, device=machine.device)
        self._left, self._right = (torch.rand(_SIDE, _SIDE, device=machine.device) for _ in range(2))

    def look(self) -> DriftReading:
        """Return the median seconds of one buffer read and of one matmul, after they have settled."""
        with torch.inference_mode():
            memory_s, compute_s = self._settled_s(self._buffer.sum), self._settled_s(lambda: self._left @ self._right)
        # The last two bursts agree, so the clock is still that of the matmul.
        clock_hz = self._machine.source.read().clock_hz if self._machine.is_cuda else None
        return DriftReading(memory_s, compute_s, self._machine.unix_s(), clock_hz)

    def _settled_s(self, call: Callable[[], object]) -> float:
        deadline_s = self._machine.now_s() + _MOST_S
        [first_s] = time_calls(call, self._machine.clock, 1)
        calls = effort.STANDARD.drift_calls
        if first_s > 0:
            calls = max(1, min(calls, int(_MOST_S / first_s)))
        bursts = [statistics.median(time_calls(call, self._machine.clock, calls))]
        while len(bursts) < effort.STANDARD.drift_bursts and self._machine.now_s() < deadline_s:
            bursts.append(statistics.median(time_calls(call, self._machine.clock, calls)))
            if abs(bursts[-1] / bursts[-2] - 1) < _AGREE:
                break
        return bursts[-1]
