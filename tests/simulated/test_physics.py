"""What a GPU has besides its ceilings, planted: short kernels, power that settles, a host that others use, counters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from profiler.device import telemetry
from profiler.device.machine import machine_for
from profiler.device.telemetry import nvml_source
from profiler.effort import Effort
from profiler.facts.ceilings import drift
from profiler.roofs.fixed_work import DriftProbe
from profiler.roofs.gemm import measure_gemm
from profiler.roofs.sampler import clocked
from profiler.store.folder import read_gathered

from . import nvml
from .scenario import Scenario, held, said
from .truth import H100, T4, PowerCap, Truth
from .world import simulated

CARD = torch.device("cuda", 0)
CAP = PowerCap(after_computing_s=0.02, share=0.89, dip_share=0.72)
"""An H100 under its power limit: 780 TFLOP/s for 20 ms, then 562 for about 50 ms, and 692 to 700 after that."""


def capped(settles_s: float) -> Truth:
    return H100.but(power_cap=PowerCap(CAP.after_computing_s, CAP.share, CAP.dip_share, settles_s))


def test_a_power_limit_has_settled_before_the_ceiling_is_taken() -> None:
    """Both the ceiling and its reported clock are those after the fall."""
    with simulated(capped(0.1), hurried=False):
        machine = machine_for(CARD)
        ceiling = clocked(lambda: measure_gemm(machine, "bfloat16", Effort().ceiling_s), machine)
    assert ceiling.per_s == pytest.approx(CAP.share * H100.flops_per_s["bfloat16"], rel=0.03)
    assert ceiling.clock_hz == pytest.approx(CAP.share * H100.clock_hz, rel=0.03)


@pytest.mark.slow
def test_the_probe_reads_the_clock_that_its_matmul_had() -> None:
    """Two readings at full clock, two right after 0.2 s of matmuls, which bring the clock to its capped share.

    A part of the probe's matmul is a launch, which has no clock: 38 and 42 µs are 2 % apart in cycles.
    """
    with simulated(capped(0.0)):
        machine = machine_for(CARD)
        probe, rows = DriftProbe(machine), torch.randn(8192, 8192, device=CARD, dtype=torch.bfloat16)
        drift_readings = [probe.look(), probe.look()]
        for _ in range(2):
            start_s = machine.now_s()
            while machine.now_s() < start_s + 0.2:
                rows @ rows
                torch.cuda.synchronize()
            drift_readings.append(probe.look())
    assert drift_readings[-1].compute > 1.05 * drift_readings[0].compute
    assert drift_readings[-1].clock_hz == pytest.approx(CAP.share * H100.clock_hz, rel=0.01)
    assert drift(drift_readings, on_gpu=True) < 0.02
    assert drift(drift_readings, on_gpu=False) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("settles_s", [0.1, 3.0])
def test_heat_of_its_own_prefills_is_no_drift_of_the_machine(settles_s: float, tmp_path: Path) -> None:
    """A short prefill runs at the full clock or at the capped one, after whatever ran before it.

    A prefill of 32 x 512 tokens computes for 34 ms, and the limit comes after 20. One of 16 x 512 computes for 17, and
    its decode loop lasts as long: a timed one never reaches the limit. If the limit settles in seconds, no ceiling of
    one second has settled: the label of a cell above it is not sure.
    """
    scenario = Scenario("mistral-7b-v0.3", 4, "bfloat16", batch_sizes=(1, 32))
    run, _ = said(scenario, [capped(settles_s)], tmp_path)
    evidence = run.document.evidence
    assert not any("machine" in reason for item in evidence for reason in item.noise_reasons)
    assert not any("power-capped" in item.flags for item in evidence if item.phase == "decode")
    assert all(item.confidence == "low" for item in evidence if "above-ceiling" in item.flags)
    assert any("power cap" in line for line in run.document.warnings)


@pytest.mark.parametrize(("quiet", "low", "high"), [(True, 0.9, 1.1), (False, 1.5, 3.0)], ids=["quiet", "at once"])
def test_counters_of_a_loop_are_those_of_its_kernels(
    quiet: bool, low: float, high: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that keeps the memory busy for a tenth of its second follows work that uses all of it, as a prefill may.

    A sample is up to 0.1 s old: without idle ends, the counters have some of the work before. Streams reach 0.9 of the
    simulated memory's theoretical maximum. GPM metrics exist from Hopper on.
    """
    if not quiet:
        monkeypatch.setattr(telemetry, "_QUIET_S", 0.0)
    for truth in (T4, H100):
        with simulated(truth) as world:
            source, host, world.card.log = nvml_source(CARD), world.host, []
            data = torch.zeros(1 << 30, dtype=torch.uint8, device=CARD)
            while world.card.core.busy_s < 0.1 or host.now_s % nvml.GPM_REFRESH_S < 0.09:
                data.sum()
                torch.cuda.synchronize()
            assert source.counters() is None, "an interval has a start"
            start_s, busy_s = host.now_s, world.card.core.busy_s
            for _ in range(250):
                data.sum()
                torch.cuda.synchronize()
                host.advance(3.2e-3)
            loop_s, busy_s = host.now_s - start_s, world.card.core.busy_s - busy_s
            found = source.counters(loop_s)
            assert source.counters(0.2) is None, "too short"
        assert source.missing == ()
        assert (found is None) == (truth is T4)
    assert low < found.dram / (0.9 * busy_s / loop_s) < high


@pytest.mark.slow
@pytest.mark.parametrize(("more", "warns"), [(1.0, False), (2.0, True)], ids=["alone", "other-traffic"])
def test_the_counters_stand_next_to_the_counted_bytes(
    more: float, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode loop of 0.7 s moves its weights at every step; other traffic that the counters see is a finding."""
    scenario = Scenario("mistral-7b-v0.3", 8, "bfloat16", prompt_lens=[64], batch_sizes=[1], new_tokens=700)
    if more != 1.0:
        monkeypatch.setattr(nvml, "STREAM_SHARE", nvml.STREAM_SHARE * more)
    run, _ = said(scenario, [H100], tmp_path)
    [decode] = [item for item in run.document.evidence if item.phase == "decode"]
    [ratio] = [each.value for each in decode.signals if each.signal.startswith("memory traffic by the GPU's counters")]
    assert ratio == pytest.approx(more, rel=0.1)
    assert warns == any("GPU's counters saw" in line for line in run.document.warnings)


@pytest.mark.slow
def test_the_overhead_model_of_4_bit_weights_launches_the_dense_copies_of_the_model(tmp_path: Path) -> None:
    """On an H100 bitsandbytes unpacks wide linears within the matmul up to few rows, and writes a copy for more.

    Its own table decides (backends/cuda/ops.py, 0.50): at 8 rows all but gate and up have a copy.
    """
    scenario = Scenario("mistral-7b-v0.3", 4, "bfloat16", prompt_lens=[64], batch_sizes=[1, 8], quant="nf4")
    truth = H100.but(launch_s=40e-6)
    run, _ = said(scenario, [truth], tmp_path)
    overhead = read_gathered(run.folder, run.document).overhead
    one, eight = (overhead["eager", "decode", batch].step_s for batch in (1, 8))
    assert eight > one
    for phase, row in held(scenario, truth, run, tmp_path):
        if phase.phase == "decode":
            assert row["overhead_s"] == pytest.approx(phase.exposed_overhead_s, rel=0.03)
