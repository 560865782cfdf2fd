"""Measure a device's ceilings, or reuse those of the last day; fixed work that shows its host's and its own speed."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from pydantic import TypeAdapter

from profiler import effort
from profiler.counting.operators import ModelWork
from profiler.data.ceiling_set import CeilingSet
from profiler.data.free_memory import idle_room_bytes
from profiler.device.clock import CoreClock, no_gc, time_calls
from profiler.device.device import resolve_device, software
from profiler.device.machine import Machine, machine_for
from profiler.errors import NoFreeMemoryError, RequestError
from profiler.facts.ceilings import (
    AGREE,
    COPY,
    GEMV,
    READ,
    TRIAD,
    Ceilings,
    CeilingsRemeasured,
    DriftReading,
    HostPace,
)
from profiler.loading.cache_argument import argument_name, cache_of
from profiler.loading.meta_model import quiet_libraries
from profiler.patching import switched
from profiler.roofs.bandwidth import measure_page_fault_s, measure_read, measure_streams, past_reported_cache
from profiler.roofs.gemm import measurable_dtypes, measure_gemm, measure_gemv, remeasure_gemm
from profiler.roofs.sampler import attempt, clocked
from profiler.stats import undisturbed
from profiler.units import scaled
from profiler.user_cache import RECENT_S, cache_path, read_recent, write_cache

# On a CPU, buffers next to the model of a script: few scripts have less memory to spare.
_SMALL_BYTES = 128 << 20
# Seconds for each check of a cached ceiling.
_CHECK_S = 0.3
# Shares of the time, in that of one dtype's matmuls.
_STREAMS, _MATMUL, _HOST = 3.0, 1.0, 1.0
# The least time of that, and the least of all that is worth a day's reuse.
_LEAST_S, KEPT_FROM_S = 0.1, 2.0


def measure(
    machine: Machine,
    dtypes: Sequence[str],
    *,
    model_dtype: str,
    budget_s: float | None = None,
    checks_known: bool = True,
    known: Ceilings | None = None,
    most_bytes: float = math.inf,
) -> Ceilings:
    """Measure the ceilings of a machine: matmuls of `dtypes`, streams, one row in `model_dtype`, and the host.

    `budget_s` is for all of them; none takes more than twice its share, if two calls do not. `missing` has the reason
    for a ceiling that cannot be measured. Buffers have at most `most_bytes`, and the host is then left out, as it needs
    a model of its own. Raises DeviceError for a lost device.

    Ceilings in `known` are reused, unless a stream is missing, or a short check is clearly faster: they were then
    measured on a busy device. Data are random, because a matmul of zeros draws less power and runs faster than any real
    one (Horace He, "Strangely, Matrix Multiplications on GPUs Run Faster When Given 'Predictable' Data!", 2024).
    """
    start_s = machine.now_s()
    shares = _STREAMS + _MATMUL + _HOST + len(dtypes)
    share_s = effort.STANDARD.ceiling_s if budget_s is None else max(_LEAST_S, budget_s / shares)
    if known is not None:
        # All ceilings that are independent of the dtype; without one of them all are measured again.
        is_whole = {READ, COPY, TRIAD} <= known.memory.keys() and bool(known.curve) and bool(known.launch)
        if not is_whole or (checks_known and _is_outdated(known, machine, most_bytes)):
            known = None
    ceilings = known or measure_streams(machine, _STREAMS * share_s, most_bytes)
    missing = {} if known else dict(ceilings.missing)
    page_fault_s, host = ceilings.page_fault_s, ceilings.host
    if not machine.is_cuda and not page_fault_s:
        with attempt("page faults", machine, missing):
            page_fault_s = measure_page_fault_s(machine)
    memory, compute = dict(ceilings.memory), dict(ceilings.compute)
    gemv = f"{GEMV} {model_dtype}"
    if model_dtype != "int8" and gemv not in memory:
        with attempt(gemv, machine, missing):
            nbytes = int(min(ceilings.stream_bytes, most_bytes))
            memory[gemv] = clocked(partial(measure_gemv, machine, model_dtype, nbytes, _MATMUL * share_s), machine)
    for dtype in dtypes:
        if dtype not in compute:
            with attempt(dtype, machine, missing):
                compute[dtype] = clocked(partial(measure_gemm, machine, dtype, share_s), machine)
    if host is None and most_bytes == math.inf:
        with attempt("the host's pace", machine, missing), quiet_libraries():
            host = measure_host_pace(machine, _HOST * share_s)
    return replace(
        ceilings,
        compute=compute,
        memory=memory,
        page_fault_s=page_fault_s,
        host=host,
        measured_s=ceilings.measured_s + machine.now_s() - start_s,
        missing=missing,
    )


def remeasure_ceilings(machine: Machine, ceilings: Ceilings, model_dtype: str, budget_s: float) -> CeilingsRemeasured:
    """Measure the ceilings of verdicts again, `budget_s` for each. Raises NoFreeMemoryError if buffers do not fit."""
    machine.release()
    if machine.available_bytes() < 2 * ceilings.stream_bytes:
        raise NoFreeMemoryError(f"there is no free memory for buffers of {scaled(2 * ceilings.stream_bytes, 'B')}")
    read, first = ceilings.memory.get(READ), ceilings.compute.get(model_dtype)
    memory, compute = {}, {}
    if read is not None and read.measured:
        memory[READ] = measure_read(machine, ceilings.stream_bytes, budget_s)
    if GEMV in ceilings.memory:
        memory[GEMV] = measure_gemv(machine, model_dtype, ceilings.stream_bytes, budget_s)
    if first is not None and first.measured:
        compute[model_dtype] = clocked(partial(remeasure_gemm, machine, model_dtype, first, budget_s), machine)
    return CeilingsRemeasured(memory, compute, machine.unix_s())


def _is_outdated(known: Ceilings, machine: Machine, most_bytes: float) -> bool:
    """Whether a short check is clearly faster than the cached ceilings. A check that fails leaves them as they are."""
    faster, outdated = 1 + AGREE, False
    with attempt("the cached ceilings", machine, {}):
        nbytes = int(min(known.stream_bytes, most_bytes))
        outdated = measure_read(machine, nbytes, _CHECK_S).per_s > faster * known.memory_bytes_per_s
        if (ceiling := known.compute.get("float32")) is not None and not outdated:
            outdated = remeasure_gemm(machine, "float32", ceiling, _CHECK_S).per_s > faster * ceiling.per_s
    return outdated


# To be increased whenever a ceiling is measured in another way: cached ceilings are then ignored.
_METHOD = 8
# Reported settings on which ceilings depend; they can differ between cards of one name, or on one card.
_SETTINGS = ("driver", "power_limit_w")
_CEILINGS = TypeAdapter(Ceilings)


def cached(
    measure: Callable[..., Ceilings], machine: Machine, *, fresh: bool = False, keeps: bool = True, small: bool = False
) -> Ceilings:
    """Return `measure(known=...)` of the cached ceilings of this device and software; cache the result if it `keeps`.

    `known` is None after a day or if `fresh`. An entry is for one card under one driver and power limit. What was
    measured with `small` buffers is an entry of its own, which only these use.
    """
    names = ("ceilings", "small-ceilings") if small else ("ceilings",)
    paths = [cache_path(name, {**circumstances(machine), "method": _METHOD}) for name in names]
    entries = (read_recent(path, _CEILINGS.validate_json) for path in paths)
    known = None if fresh else next(filter(None, entries), None)
    if known and time.time() - known.measured_at_unix_s > RECENT_S:  # each run writes the file
        known = None
    measured = measure(known=known)
    if keeps and measured.measured_s >= KEPT_FROM_S and not machine.source.failures:  # otherwise clocks are missing
        write_cache(paths[-1], _CEILINGS.dump_json(measured))
    return measured


def circumstances(machine: Machine) -> dict[str, Any]:
    """Return what distinguishes measurements of this device, under its settings and this software, from others."""
    settings = machine.source.facts()
    return {
        "device": {**asdict(machine.info), "datasheet": None},
        "settings": {name: settings.get(name) for name in _SETTINGS},
        "software": software(),
    }


def here_ceilings(work: ModelWork, dtype: str, *, small: bool = False) -> CeilingSet:
    """Return this device's ceilings, with `small` buffers next to a model. Raises RequestError if it cannot."""
    machine = machine_for(resolve_device("auto"))
    used = {operator.dtype_name for operator in work.operators if operator.dtype.itemsize > 0}
    dtypes = [name for name in measurable_dtypes(machine.device) if name in {*used, dtype, "float32"}]
    small_bytes = past_reported_cache(machine) if machine.is_cuda else _SMALL_BYTES
    measuring = partial(measure, machine, dtypes, model_dtype=dtype, most_bytes=small_bytes if small else math.inf)
    measured = cached(measuring, machine, small=small)
    ceilings = measured.only(dtypes, dtype, machine.info.datasheet)
    if not ceilings.judges:
        why = next(iter(measured.missing.values()))
        raise RequestError(f"--here: the ceilings of this device could not be measured ({why}); give --gpu GPU.")
    rates = {name: ceilings.compute_flops_per_s(name) for name in dtypes}
    room_bytes = idle_room_bytes(machine.info.kind, machine.info.memory_bytes)
    return CeilingSet(f"{machine.info.name}, measured", ceilings.memory_bytes_per_s, rates, room_bytes)


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
    with switched(torch.set_num_threads, 1, torch.get_num_threads()), torch.inference_mode(), no_gc():
        model = LlamaForCausalLM(LlamaConfig(**_OVERHEAD_MODEL)).eval()
        while len(runs) < _LEAST_RUNS or sorted(runs)[1] > (1 + _SETTLED) * min(runs):
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
_SETTLED = 0.02
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
            if abs(bursts[-1] / bursts[-2] - 1) < _SETTLED:
                break
        return bursts[-1]
