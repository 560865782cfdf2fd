"""The probes of the ceilings: with a fake clock, over memories with known caches, and once with a real clock."""

import itertools
import json
import math
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from docs.schemas import assert_follows
from hurry import with_effort
from machines import CPU, HOST, FakeClock, SimulatedMachine, SimulatedMemory, ceiling, small
from torch import nn

from profiler.device.device import Device
from profiler.device.machine import Machine
from profiler.device.memory import page_faults, storage_bytes
from profiler.errors import NoFreeMemoryError
from profiler.facts.ceilings import Ceiling, Ceilings, CurvePoint, DriftReading, WeightReadCeiling, drift, swing
from profiler.facts.telemetry import Reading
from profiler.judge.demand import moved
from profiler.roofs import gemm as matmuls
from profiler.roofs.bandwidth import measure_page_fault_s, measure_streams, measure_weights
from profiler.roofs.measure import DriftProbe, cached, measure, measure_host_pace, remeasure_ceilings
from profiler.roofs.sampler import clocked, sample
from profiler.run.warnings import ceiling_warnings


@pytest.fixture(scope="module")
def of_fake_clock() -> Ceilings:
    return measure(small(clock=FakeClock()), ["float32"], model_dtype="float32", budget_s=0.3)


def test_a_cpus_ceiling_has_no_clock() -> None:
    """Its cells are judged at no clock of their own, so a later ceiling must not be corrected by one."""
    source = Mock(read=Mock(return_value=Reading(clock_hz=3e9)))
    assert clocked(lambda: Ceiling(1e9, 1e9, 1e9, 3, "copy"), Machine(CPU, source=source)).clock_hz is None


def test_rates_are_work_over_the_clocks_time(of_fake_clock: Ceilings) -> None:
    ceilings = of_fake_clock
    # A fake call takes 1 s, so a rate is the work of one call: 2 n^3 FLOPs, and the buffer's bytes.
    size = int(ceilings.compute["float32"].method.split("x")[0])
    assert ceilings.compute["float32"].per_s == 2 * size**3
    assert ceilings.memory["read"].per_s == ceilings.stream_bytes
    assert ceilings.memory["copy"].per_s == ceilings.stream_bytes
    assert ceilings.memory["triad"].per_s == pytest.approx(ceilings.stream_bytes, rel=1e-6)
    assert ceilings.beyond_cache


@pytest.mark.parametrize(
    ("calls_s", "budget_s", "least", "samples", "ends_s"),
    [
        # A hundred samples of a millisecond would take a tenth of a second: too short for a GPU's clock to settle.
        ((100e-6,), 1.5, {"least_s": 0.2}, 10, (0.18, 0.22)),
        ((100e-6,), 0.5, {"least_s": math.inf}, 10, (0.45, 0.55)),
        ((100e-6,), 1.5, {"least_s": math.inf}, 10, (0.9, 1.1)),
        # A call that scatters has an interval of 0.5 % after 500 samples; there is time for 70.
        ((20e-3, 22e-3, 21e-3), 1.5, {}, 50, (1.47, 1.53)),
        # A long call takes at most twice its time, or is made once.
        ((0.1,), 0.5, {}, 5, (0.5, 1.0)), ((0.3,), 0.5, {}, 2, (0.5, 1.0)),
        ((0.6,), 0.5, {}, 1, (0.5, 1.0)), ((5.0,), 0.5, {}, 1, (5.0, 5.0)),
    ],
)  # fmt: skip
def test_a_call_is_sampled_until_its_time_is_known_or_over(
    calls_s: tuple[float, ...], budget_s: float, least: dict[str, float], samples: int, ends_s: tuple[float, float]
) -> None:
    each_s = itertools.cycle(calls_s)
    with SimulatedMemory(lambda nbytes: nbytes / next(each_s)) as memory:
        seconds = sample(torch.empty(4).sum, SimulatedMachine(memory), budget_s, **least)
    assert ends_s[0] - 1e-9 <= memory.now_s <= ends_s[1] + 1e-9
    assert len(seconds) >= samples
    assert {min(calls_s, key=lambda call_s: abs(call_s - found_s)) for found_s in seconds} == {*calls_s}
    assert all(any(found_s == pytest.approx(call_s) for call_s in calls_s) for found_s in seconds)


@pytest.mark.parametrize("slower", [1, 20])
def test_all_ceilings_together_take_at_most_twice_their_time(slower: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours come after half a second, and make each call longer."""
    monkeypatch.setattr("profiler.roofs.measure.measure_host_pace", lambda *_: None)
    memory = SimulatedMemory(lambda _: 4e9 / (slower if memory.now_s > 0.5 else 1))
    with memory:
        machine = SimulatedMachine(memory, available_bytes=1 << 30)
        found = measure(machine, ["float32", "bfloat16"], model_dtype="float32", budget_s=7.0)
    assert memory.now_s < 14.0
    assert set(found.memory) == {"read", "copy", "triad", "gemv float32"}
    assert set(found.compute) == {"float32", "bfloat16"}


def test_fresh_pages_are_counted_and_have_a_price() -> None:
    """A mapped buffer of 64 MiB touches all its pages, of 4 KiB or of 2 MiB each; zeroing them takes time.

    All pages cost less than the whole first filling, and a part of it. Another process may slow down one filling.
    """
    shares = []
    for _ in range(3):
        with mmap.mmap(-1, 64 << 20) as pages:
            fresh = torch.frombuffer(pages, dtype=torch.uint8)
            before, start_s = page_faults(), time.perf_counter()
            fresh.fill_(1)
            filled_s, count = time.perf_counter() - start_s, page_faults() - before
            assert count >= 32
            before = page_faults()
            fresh.fill_(2)
            assert page_faults() - before < 32
            del fresh  # a map that is still in use cannot be closed
        shares.append(count * measure_page_fault_s(HOST) / filled_s)
    assert any(0.02 < share < 2 for share in shares), shares


@pytest.mark.timing  # other tests do not check cached ceilings
def test_ceilings_from_a_busy_minute_are_not_kept(of_fake_clock: Ceilings) -> None:
    """Ceilings cached at half of today's speed are measured again; those that still hold are reused."""
    first = of_fake_clock

    for slower in (2.0, 0.5):
        memory = {name: replace(ceiling, per_s=ceiling.per_s / slower) for name, ceiling in first.memory.items()}
        known, machine = replace(first, memory=memory), small(clock=FakeClock())
        again = measure(machine, ["float32"], model_dtype="float32", budget_s=0.3, known=known)
        assert (again.measured_at_unix_s > first.measured_at_unix_s) == (slower > 1)


def test_float8_is_measured_as_torchao_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_scaled_mm` gets the arguments of torchao's linear with scales per row, which `--quant fp8` creates."""
    pytest.importorskip("torchao")
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor, QuantizeTensorToFloat8Kwargs

    seen: list[dict[str, object]] = []

    def recorded(left: torch.Tensor, right: torch.Tensor, **kwargs: object) -> torch.Tensor:
        shown = {"left": left, "right": right, **{name: value for name, value in kwargs.items() if value is not None}}
        seen.append({name: _shown(value) for name, value in shown.items()})
        return torch.zeros(left.shape[0], right.shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_mm", recorded)
    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    weight = Float8Tensor.from_hp(
        torch.randn(64, 64, dtype=torch.bfloat16),
        granularity=PerRow(),
        mm_config=config.mm_config,
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(torch.float8_e4m3fn, PerRow()),
    )
    torch.nn.functional.linear(torch.randn(64, 64, dtype=torch.bfloat16), weight)
    matmuls.square_matmul(CPU, "float8_e4m3fn", 64)[0]()
    theirs, *ours = seen
    assert ours == [theirs] * 2, "one call checks that it works, one is the ceiling"


def _shown(value: object) -> object:
    """Return what selects a kernel: a tensor's shape, dtype and order in memory (whether it is contiguous)."""
    return (value.shape, value.dtype, value.is_contiguous()) if isinstance(value, torch.Tensor) else value


@pytest.mark.ci
def test_a_machine_that_slows_is_seen_at_the_end_and_a_steady_one_is_not() -> None:
    """40 GB/s at the beginning and 28 at the end, with the same buffers and shapes."""
    slower: list[float] = []
    memory = SimulatedMemory(lambda _nbytes: 40e9 * (slower or [1.0])[-1])
    machine = SimulatedMachine(memory)
    with memory:
        ceilings = measure(machine, ["float32"], model_dtype="float32", budget_s=0.3).only(["float32"], "float32")
        steady = remeasure_ceilings(machine, ceilings, "float32", 0.02)
        slower.append(0.7)
        slowed = remeasure_ceilings(machine, ceilings, "float32", 0.02)
    assert set(slowed.memory) == {"read", "gemv"}
    assert list(moved(ceilings, steady)) == []
    shares = {what: now.per_s / first.per_s for what, _, first, now in moved(ceilings, slowed)}
    assert shares == {"memory": pytest.approx(0.7), "float32 matmuls": pytest.approx(0.7)}


def read_at(per_s: float, sizes: Mapping[int, float]) -> Ceilings:
    """Ceilings of a memory of `per_s` bytes/s whose curve reads these sizes at these rates."""
    curve = tuple(CurvePoint(nbytes, rate) for nbytes, rate in sizes.items())
    return Ceilings({}, {"read": ceiling(per_s)}, max(sizes), True, curve)


def test_a_size_between_two_of_the_curve_can_be_either() -> None:
    """72 MB of cache hold 67, although the next larger size of the curve exceeds it."""
    found = read_at(1e12, {32: 4e12, 64: 4e12, 128: 1e12, 256: 1e12})
    assert found.memory_bytes_per_s_for(67) == 1e12
    assert found.out_of_the_cache(67).memory_bytes_per_s_for(67) == 4e12
    assert found.out_of_the_cache(67).memory_bytes_per_s_for(128) == 1e12, "larger sizes stay out of the cache"
    assert [found.out_of_the_cache(size) for size in (1, 300)] == [found, found], "these are outside the curve"
    flat = read_at(1e12, {32: 1.2e12, 64: 1.2e12, 128: 1e12, 256: 1e12})
    assert flat.out_of_the_cache(67) == flat, "no size is read clearly faster"


def test_a_curve_that_was_read_in_a_faster_minute_makes_no_cache() -> None:
    """The ceiling is 31 GB/s and the curve ends at 48: memory is 31, and what is read three times as fast is cached."""
    found = read_at(31e9, {1 << 20: 144e9, 16 << 20: 96e9, 256 << 20: 48e9})
    assert found.memory_bytes_per_s_for(200 << 20) == pytest.approx(31e9)
    assert not found.cache_resident(200 << 20)
    assert found.memory_bytes_per_s_for(1 << 20) == pytest.approx(93e9)
    assert found.cache_resident(1 << 20)


def test_what_is_read_as_slowly_as_memory_leaves_nothing_else_in_a_cache() -> None:
    """The curve is of a CPU that reports 480 MiB of cache, of which this machine has 128.

    A slow small size is one bad minute, and shows nothing about larger ones. 256 MiB may be half in the cache; 512 MiB
    are not.
    """
    rates = {16: 53e9, 32: 25e9, 64: 56e9, 128: 45e9, 256: 25.6e9, 512: 25.4e9, 1024: 25.7e9}
    found = read_at(27e9, {size << 20: per_s for size, per_s in rates.items()})
    assert found.past_caches_bytes == 512 << 20
    assert replace(found, curve=()).past_caches_bytes == 1 << 30


def test_ceilings_are_not_looked_at_again_without_room(of_fake_clock: Ceilings) -> None:
    """A run on a full GPU continues instead of running out of memory at its end."""
    machine = small(clock=FakeClock())
    full = replace(of_fake_clock, stream_bytes=machine.available_bytes())
    with pytest.raises(NoFreeMemoryError, match="no free memory for buffers of"):
        remeasure_ceilings(machine, full, "float32", 0.05)


@pytest.mark.timing
@pytest.mark.slow
def test_ceilings_command(roofscope, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    with_effort(monkeypatch, ceiling_s=0.1)
    document = json.loads(roofscope("ceilings", "--format", "json").out)
    assert_follows("ceilings", document)
    assert {"float32", "bfloat16", "float16", "int8"} <= set(document["compute"])
    assert {"read", "copy", "triad", "gemv"} <= set(document["memory"])
    # A step of thirty layers calls hundreds of operators, each with more work in Python than one launch.
    assert 100 < document["host"]["step_s"] / document["launch"]["submit_s"] < 1e5
    assert document["host_index"] == document["host"]["step_s"] / document["reference_host"]["step_s"]


MIB = 1 << 20


def keeping(cache_bytes: int, cache_bytes_per_s: float, memory_bytes_per_s: float) -> Callable[[int], float]:
    """A least-recently-used cache, which serves all of a buffer that fits, and nothing of a larger one."""
    return lambda nbytes: cache_bytes_per_s if nbytes <= cache_bytes else memory_bytes_per_s


def falling(nbytes: int) -> float:
    """A cache shared with neighbours: 133, 111 and 91 GB/s at 64, 128 and 256 MiB, and flat from 1 GiB on."""
    steps = {64: 133e9, 128: 111e9, 256: 91e9, 512: 75e9}
    return next((per_s for size, per_s in steps.items() if nbytes <= size * MIB), 62e9)


@pytest.mark.parametrize(
    ("bytes_per_s", "memory_bytes_per_s", "stream_mib"),
    [
        (keeping(MIB, 200e9, 40e9), 40e9, 512),  # a flat memory is done with two sizes
        pytest.param(falling, 62e9, 2048, marks=pytest.mark.slow),  # a curve that falls is followed to its plateau
        # An MI300X reports 4 MiB and has another cache of 256 MiB, about three times as fast as its memory. All rates
        # are a hundred times lower here, so the test needs fewer calls.
        (keeping(256 * MIB, 120e9, 42e9), 42e9, 1024),
    ],
    ids=["flat", "falling", "a cache that is not reported"],
)
def test_a_curve_has_a_plateau(bytes_per_s: Callable[[int], float], memory_bytes_per_s: float, stream_mib: int) -> None:
    """STREAM's rule counts all that a kernel touches: two buffers for a copy, three for a triad."""
    with SimulatedMemory(bytes_per_s) as memory:
        found = measure_streams(SimulatedMachine(memory), 4.5)
    assert [found.memory[name].per_s for name in ("read", "copy", "triad")] == [pytest.approx(memory_bytes_per_s)] * 3
    for operation in ("sum", "copy_", "add"):
        assert max(memory.footprints[operation]) == pytest.approx(found.stream_bytes, rel=1e-6)
    assert (found.stream_bytes, found.plateau, found.beyond_cache) == (stream_mib * MIB, True, True)
    assert not list(ceiling_warnings(found))


def test_the_curve_has_a_size_that_nearly_fills_the_reported_cache() -> None:
    """A cache of 100 MiB holds weights of 99 MB, of which one of 64 MiB would say nothing, and 128 MiB do not fit."""
    with SimulatedMemory(keeping(100 * MIB, 160e9, 40e9)) as memory:
        found = measure_streams(SimulatedMachine(memory, cache_bytes=100 * MIB), 4.5)
    assert [point.nbytes // MIB for point in found.curve] == [1, 2, 4, 8, 16, 32, 64, 99, 128, 256, 512, 1024]
    assert found.memory_bytes_per_s_for(99e6) == pytest.approx(160e9, rel=0.03)
    assert found.memory_bytes_per_s_for(110e6) == pytest.approx(40e9, rel=0.03)


@pytest.mark.parametrize(
    ("bytes_per_s", "warns"),
    [(keeping(MIB, 200e9, 25e9), False), (falling, True)],
    ids=["a neighbour's cache", "a shared cache"],
)
def test_two_equal_sizes_show_that_a_cache_serves_nothing(bytes_per_s: Callable[[int], float], warns: bool) -> None:
    """A CPU reports its socket's 480 MiB, and may have almost nothing. There is time for 1 GiB, not for four times."""
    with SimulatedMemory(bytes_per_s) as memory:
        found = measure_streams(SimulatedMachine(memory, 16 << 30, cache_bytes=480 * MIB), 4.5)
    assert found.stream_bytes == 1024 * MIB
    assert bool(list(ceiling_warnings(found))) == warns


def read(
    tensors: list[torch.Tensor | None], call_s: float = 20e-6, available_bytes: int = 64 << 30
) -> WeightReadCeiling:
    """Measure with a memory of 60 GB/s and a cache of 1 MiB that takes no time."""
    memory = SimulatedMemory(lambda nbytes: 60e9 if nbytes > MIB else 1e15, call_s)
    with memory:
        found = measure_weights(tensors, SimulatedMachine(memory, available_bytes), 0.01)
    assert found is not None
    return found


@pytest.mark.parametrize("call_s", [0.0, 20e-6])
def test_a_stream_in_the_same_pieces_pays_for_the_same_calls(call_s: float) -> None:
    found = read([torch.empty(1024, 2048) for _ in range(20)], call_s)
    assert found.nbytes == 20 * 8 * MIB
    assert found.stream is not None
    assert found.ceiling.per_s == pytest.approx(found.stream.per_s, rel=1e-9)
    assert found.ceiling.per_s == pytest.approx(8 * MIB / (8 * MIB / 60e9 + call_s), rel=1e-3)


def test_pages_that_are_slower_than_a_streams_show() -> None:
    """Every second weight takes three times as long to read, so all together are read half as fast."""
    far = [torch.empty(1024, 2048) for _ in range(10)]
    lie_far = {part.data_ptr() for part in far}

    class Far(SimulatedMemory):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_far = args and isinstance(args[0], torch.Tensor) and args[0].data_ptr() in lie_far
            before_s = self.now_s
            found = super().__torch_dispatch__(func, types, args, kwargs)
            self.now_s += 2 * (self.now_s - before_s) * bool(is_far)
            return found

    with Far(lambda _: 60e9) as memory:
        found = measure_weights([*far, *(torch.empty(1024, 2048) for _ in range(10))], SimulatedMachine(memory), 0.01)
    assert found is not None
    assert found.stream is not None
    assert found.ceiling.per_s / found.stream.per_s == pytest.approx(0.5, rel=1e-3)


def test_a_model_that_leaves_no_room_for_such_a_stream_is_read_in_part() -> None:
    """Weights take 160 MiB, and 400 MiB are free: a tenth of those is 40 MiB, so every fourth weight is read."""
    found = read([torch.empty(1024, 2048) for _ in range(20)], available_bytes=400 * MIB)
    assert found.nbytes == 5 * 8 * MIB


def test_tied_and_packed_weights_count_as_they_are_stored_and_those_elsewhere_not() -> None:
    table = nn.Parameter(torch.empty(4096, 512))
    packed = torch.empty(2 * MIB, dtype=torch.uint8)
    half, eight = torch.empty(1024, 2048, dtype=torch.bfloat16), torch.empty(2048, 2048).to(torch.float8_e4m3fn)
    tensors: list[torch.Tensor | None] = [table, table.t(), packed, half, eight, None]
    assert read(tensors).nbytes == storage_bytes(tensors) == (8 + 2 + 4 + 4) * MIB
    assert measure_weights([torch.empty(1024, 2048, device="meta")], HOST, 0.01) is None


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


def test_a_slower_second_half_is_drift_and_one_bad_look_is_not() -> None:
    steady, slower = DriftReading(10e-3, 5e-3), DriftReading(12e-3, 5e-3)
    for on_gpu in (False, True):
        assert drift([steady] * 3 + [slower] * 3, on_gpu=on_gpu) == pytest.approx(0.2)
        assert drift([steady] * 5 + [slower], on_gpu=on_gpu) == 0.0
        assert drift([steady], on_gpu=on_gpu) == 0.0
        assert drift([], on_gpu=on_gpu) == 0.0


@pytest.mark.parametrize("clocks_mhz", [(None,) * 4, (1980, 1980, 1740, 1740)])
def test_a_gpus_own_heat_is_no_drift(clocks_mhz: tuple[float | None, ...]) -> None:
    """Of four readings of an H200, the last two follow prefills at its power limit.

    Its memory moved by 0.25 % between the halves. The matmuls took the same cycles, at 1.98 and 1.74 GHz.
    """
    memory_us, compute_us = (70.336, 70.144, 70.368, 70.464), (58.080, 57.856, 66.048, 66.048)
    drift_readings = [
        DriftReading(memory * 1e-6, compute * 1e-6, clock_hz=mhz and mhz * 1e6)
        for memory, compute, mhz in zip(memory_us, compute_us, clocks_mhz, strict=True)
    ]
    assert drift(drift_readings, on_gpu=True) < 0.01
    assert swing(drift_readings, on_gpu=True) < 0.01
    assert drift(drift_readings, on_gpu=False) > 0.13
    assert swing(drift_readings, on_gpu=False) > 0.13


def test_a_gpu_that_loses_speed_at_its_clock_drifts() -> None:
    """A neighbour on the same card takes a fifth of the memory, or of the processors: no clock explains that."""
    steady = [DriftReading(70e-6, 58e-6, clock_hz=1.98e9)] * 3
    for disturbed in (DriftReading(84e-6, 58e-6, clock_hz=1.98e9), DriftReading(70e-6, 69.6e-6, clock_hz=1.98e9)):
        assert drift([*steady, *[disturbed] * 3], on_gpu=True) == pytest.approx(0.2)
        assert swing([*steady, disturbed], on_gpu=True) == pytest.approx(0.2)


class Settling(FakeClock):
    """Seconds of successive calls: slow at first, as after a large prefill, then steady."""

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return [self.given[min(int(mark) // 8, len(self.given) - 1)] for mark in marks[1:]]


class OnGpu(Machine):
    is_cuda = True


class Timeless(Machine):
    """A machine whose clock stands still, so other processes have no effect on it."""

    def now_s(self) -> float:
        return 0.0


def test_a_gpus_look_has_its_clock_and_waits_until_the_machine_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's work is small, since its times are set by hand."""
    monkeypatch.setattr("profiler.roofs.measure.PROBE_BYTES", 1 << 12)
    monkeypatch.setattr("profiler.roofs.measure._SIDE", 8)
    source = Mock(read=Mock(return_value=Reading(clock_hz=1.74e9)))
    of_cpu, of_gpu = (kind(CPU, clock=Settling(1e-3), source=source) for kind in (Machine, OnGpu))
    assert DriftProbe(of_cpu).look().clock_hz is None
    assert DriftProbe(of_gpu).look().clock_hz == 1.74e9
    probe = DriftProbe(Timeless(CPU, clock=Settling(1.2e-3, 1.1e-3, 1e-3)))
    assert probe.look().memory == pytest.approx(1e-3)
    never = DriftProbe(Timeless(CPU, clock=Settling(*(1e-3 * number for number in range(1, 40)))))
    assert never.look().memory > 4e-3  # it does not wait forever


class Card(Machine):
    """A GPU by its UUID, one of many of its name."""

    def __init__(self, uuid: str, power_limit_w: float = 700.0, driver: str = "580.95.05") -> None:
        settings = {"power_limit_w": power_limit_w, "driver": driver, "pcie_lanes": 16}
        super().__init__(CPU, source=Mock(failures={}, facts=Mock(return_value=settings)))
        self._uuid = uuid

    @cached_property
    def info(self) -> Device:
        return replace(HOST.info, kind="cuda", name="NVIDIA H100 80GB HBM3", uuid=self._uuid)


def known(machine: Machine, measured_s: float = 5.0, *, keeps: bool = True, small: bool = False) -> bool:
    """Whether ceilings were cached for this machine; afterwards they are, if they were measured for long enough."""
    found: list[Ceilings | None] = []

    def measure(*, known: Ceilings | None) -> Ceilings:
        found.append(known)
        return Ceilings({}, {}, 1, True, measured_s=measured_s, measured_at_unix_s=machine.unix_s())

    cached(measure, machine, keeps=keeps, small=small)
    return found[0] is not None


def test_a_card_and_its_settings_reuse_ceilings_of_long_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 at 350 W multiplies slower than at 700."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = "GPU-2d5f", "GPU-91ab"
    assert [known(Card(uuid)) for uuid in (first, first, second, second, first)] == [False, True, False, True, True]
    assert [known(Card(first, watts)) for watts in (350.0, 700.0)] == [False, True]
    assert [known(Card(first, driver=version)) for version in ("590.10", "590.10")] == [False, True]
    assert [known(HOST, 0.8), known(HOST, keeps=False), known(HOST, 3.0), known(HOST)] == [False, False, False, True]
    third = Card("GPU-77c0")  # ceilings of small buffers are no run's, but a run's are as good as small ones
    assert [known(third, small=small) for small in (True, True, False, True)] == [False, True, False, True]
