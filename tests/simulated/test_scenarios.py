"""The whole profiler on cards of known truth: its figures match the truth."""

import statistics
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from profiler.facts.change_ids import ChangeId
from profiler.forecast.command import forecast_run, run_facts
from profiler.forecast.options import ForecastRequest
from profiler.judge.regimes import Flag
from profiler.run.pipeline import device_healths
from profiler.store.folder import Run, read_gathered, read_run

from . import four_bit, nvml
from .oracle import Phase, pairs
from .scenario import CEILINGS, REST, Scenario, checked_cells, command_line, profiled, true_phases
from .truth import A100, H100, RTX_4090, T4, PowerCap, Throttle, capped
from .world import simulated

pytestmark = pytest.mark.slow

SAVE_THE_HOST = {ChangeId.GRAPH, ChangeId.COMPILED_STEP, ChangeId.COMPILED_FORWARD}
"""Changes that save what the host adds; a compiled step saves small kernels too."""


def first_change(run: Run, row: dict[str, Any]) -> ChangeId | None:
    keys = ("engine", "phase", "batch_size", "prompt_len")
    [item] = [item for item in run.document.evidence if all(getattr(item, key) == row[key] for key in keys)]
    return item.changes[0].id if item.changes else None


def test_a_small_card_spills_to_the_host(tmp_path: Path) -> None:
    """With 8 layers of Mistral-7B (3.7 GB) on a T4 with 3.9 GB, the link binds, and the second card gets nothing."""
    truth = T4.but(memory_bytes=3_900_000_000)
    scenario = Scenario("mistral-7b-v0.3", 8, prompt_lens=[64], batch_sizes=[1], new_tokens=4)
    run, world = profiled(scenario, [truth, truth], tmp_path)
    placed = set((run.document.model.placement or {}).values())
    assert placed == {"cuda:0", "cpu"}
    assert world.cards[1].memory.reserved == 0
    assert (run.cells["status"] == "ok").all()
    decode = run.cells[run.cells["phase"] == "decode"].iloc[0]
    assert decode["regime"] == "link-bound"
    [found] = [item.changes for item in run.document.evidence if item.phase == "decode"]
    assert found[0].id is ChangeId.FORMAT, "4-bit weights fit"
    crossing_s = run.document.model.offloaded_bytes["host"] / (truth.link_bytes_per_s * truth.pageable_share)
    assert decode["link_s"] == pytest.approx(crossing_s, rel=REST)


def test_two_cards_one_after_the_other_in_one_process(tmp_path: Path) -> None:
    """The second card's graphs contain its own work: its memory is half as fast, and its steps show it.

    Its arithmetic is not slower.
    """
    scenario = Scenario("mistral-7b-v0.3", 2, engine="graph", prompt_lens=[64], batch_sizes=[1])
    truths, devices = (A100, A100.but(bytes_per_s=A100.bytes_per_s / 2)), ["cuda:0", "cuda:1"]
    folder = str(scenario.folder(tmp_path))
    with simulated(*truths):
        code = command_line("run", folder, **scenario.options(), device=",".join(devices), out=tmp_path / "both")
    assert code == 0
    runs = [read_run(tmp_path / "both" / name.replace(":", "")) for name in devices]
    for run, truth in zip(runs, truths, strict=True):
        assert run.document.ceilings.memory_bytes_per_s == pytest.approx(truth.bytes_per_s, rel=CEILINGS)
        for phase, row in pairs(true_phases(scenario, truth, tmp_path), run.cells):
            assert row["latency_s"] == pytest.approx(phase.latency_s, rel=REST)
    well, ill = device_healths(runs, devices)
    assert not well.ill
    assert ill.ill
    assert ill.memory_behind == pytest.approx(0.5, abs=0.05)
    assert ill.compute_behind < 0.05


def test_weights_in_4_bits_on_an_old_card(tmp_path: Path) -> None:
    """bitsandbytes' own table says which linears a T4 unpacks first: at one row none, at 128 all but the widest.

    The kernel that unpacks within the matmul reaches a quarter of its ceilings here, and takes most of a step.
    """
    truth = T4.but(kernel_share={"gemm_4bit": 0.25})
    scenario = Scenario("mistral-7b-v0.3", 2, quant="nf4", prompt_lens=[128], batch_sizes=[1], new_tokens=4)
    run, _ = profiled(scenario, [truth], tmp_path, dtype="auto")
    assert run.document.model.dtype == "float16", "a T4 has no bfloat16 units"
    assert {item.flags for item in run.document.evidence} == {(Flag.INEFFICIENT_KERNELS,)}
    for phase, row in checked_cells(scenario, truth, run, tmp_path):
        assert (phase.dequantise_s > 0.1 * phase.latency_s) == (phase.phase == "prefill")
        assert row["regime"] == "slow-kernels"


@pytest.mark.ci
def test_attention_in_plain_matmuls_on_an_old_card(tmp_path: Path) -> None:
    """A T4 has no flash kernel, and no memory-efficient one for grouped heads: it repeats keys and writes scores."""
    scenario = Scenario("mistral-7b-v0.3", 2, prompt_lens=[512], batch_sizes=[4])
    run, _ = profiled(scenario, [T4], tmp_path)
    for phase, row in checked_cells(scenario, T4, run, tmp_path):
        assert row["regime"] == {"prefill": "compute-bound", "decode": "memory-bound"}[phase.phase]
        assert row["redundant_s"] > (0.1 if phase.phase == "prefill" else 0.01) * row["latency_s"]
        # bitsandbytes before 0.50 has no table: it unpacks the weights for more than one row, and this decode has 4.
        unpacks = find_spec("bitsandbytes") is not None and four_bit.table() is None
        change = ChangeId.REPEATED_HEADS if phase.phase == "prefill" or unpacks else ChangeId.FORMAT
        assert first_change(run, row) is change


def test_a_small_model_on_a_large_cache(tmp_path: Path) -> None:
    """All layers of one of SmolLM2's linears fit into a 4090's L2, but all linears of a step do not.

    The host is so fast that the card's own time is visible. A kernel replayed from the cache would be too fast, and the
    difference would be called overhead.
    """
    truth = RTX_4090.but(launch_s=0.5e-6, graph_launch_s=0.5e-6, smallest_kernel_s=0.3e-6)
    scenario = Scenario("smollm2-135m", 12, prompt_lens=[128], batch_sizes=[1])
    run, _ = profiled(scenario, [truth], tmp_path)
    changes = {}
    for phase, row in checked_cells(scenario, truth, run, tmp_path):
        # 128 rows are 1.2 times below this card's ridge, and a step's kernels take barely longer than their launches.
        assert row["regime"] in ("memory-bound", "mixed")
        changes[phase.phase] = first_change(run, row)
    assert changes["prefill"] in SAVE_THE_HOST
    [decode] = [item for item in run.document.evidence if item.phase == "decode"]
    # Small kernels take more of this step than its weights: a compiled step saves most, and 4 bits come next.
    assert [effect.id for effect in decode.changes][:2] == [ChangeId.COMPILED_STEP, ChangeId.FORMAT]


def test_a_throttled_card_is_reported(tmp_path: Path) -> None:
    """The ceilings are measured at full clock, in 2.5 busy seconds. Then the clock falls to half."""
    truth = H100.but(throttle=Throttle(after_busy_s=3.5, share=0.5))
    scenario = Scenario("mistral-7b-v0.3", 4, prompt_lens=[2048], batch_sizes=[64])
    run, world = profiled(scenario, [truth], tmp_path)
    assert world.card.core.clock_share == 0.5
    [prefill] = [item for item in run.document.evidence if item.phase == "prefill"]
    assert "throttled" in prefill.flags
    assert "throttled (power cap)" in prefill.noise_reasons
    assert prefill.regime == "compute-bound"
    assert any("power cap" in warning for warning in run.document.warnings)


def test_a_card_that_only_arithmetic_brings_to_its_power_cap(tmp_path: Path) -> None:
    """Matmuls run at 0.8 of the clock, streams at all of it; each ceiling has its own clock, like a prefill."""
    truth = H100.but(power_cap=PowerCap(after_computing_s=0.05, share=0.8))
    scenario = Scenario("mistral-7b-v0.3", 4, prompt_lens=[2048], batch_sizes=[64])
    run, _ = profiled(scenario, [truth], tmp_path)
    ceilings = run.document.ceilings
    matmuls, read = ceilings.compute["float16"], ceilings.memory["read"]
    assert matmuls.per_s == pytest.approx(0.8 * truth.flops_per_s["float16"], rel=CEILINGS)
    assert matmuls.burst_per_s == pytest.approx(truth.flops_per_s["float16"], rel=CEILINGS)
    assert ceilings.full_clock["float16"] == pytest.approx(matmuls.burst_per_s)
    assert matmuls.clock_hz == pytest.approx(0.8 * truth.clock_hz, rel=1e-3)
    assert (read.per_s, read.clock_hz) == (pytest.approx(truth.bytes_per_s, rel=CEILINGS), truth.clock_hz)
    evidence = {item.phase: item for item in run.document.evidence}
    assert Flag.POWER_CAPPED in evidence["prefill"].flags
    assert Flag.THROTTLED not in evidence["prefill"].flags
    assert not any("throttled" in reason for reason in evidence["prefill"].noise_reasons)
    assert evidence["prefill"].regime == "compute-bound"
    assert evidence["decode"].regime == "memory-bound"
    at_full_clock = {phase.phase: phase.latency_s for phase in true_phases(scenario, H100, tmp_path)}
    latency_s = {row["phase"]: row["latency_s"] for row in run.cells.to_dict("records")}
    assert 1.1 * at_full_clock["prefill"] < latency_s["prefill"] < at_full_clock["prefill"] / 0.8
    assert latency_s["decode"] == pytest.approx(at_full_clock["decode"], rel=REST)
    assert all(abs(row["unexplained_s"]) < REST * row["latency_s"] for row in run.cells.to_dict("records"))


def test_replays_of_a_short_prefill_have_its_clock(tmp_path: Path) -> None:
    """The card reaches its power cap after 0.2 s of arithmetic.

    Prefills of 5 ms end before that, and so must their replays: at the cap they would take a quarter longer than the
    step.
    """
    truth = T4.but(power_cap=PowerCap(after_computing_s=0.2, share=0.8))
    scenario = Scenario("mistral-7b-v0.3", 1, prompt_lens=[512], batch_sizes=[1])
    run, _ = profiled(scenario, [truth], tmp_path)
    at_full_clock = {phase.phase: phase.latency_s for phase in true_phases(scenario, T4, tmp_path)}
    for row in run.cells.to_dict("records"):
        assert row["latency_s"] == pytest.approx(at_full_clock[row["phase"]], rel=REST)
        assert abs(row["unexplained_s"]) < REST * row["latency_s"]


def test_plans_are_not_part_of_a_steps_time(tmp_path: Path) -> None:
    """A server plans once for each length, and then never again: 22 ms on a GB10, up to 440 on other cards."""
    truth = H100.but(plan_s=22e-3)
    scenario = Scenario("mistral-7b-v0.3", 2, prompt_lens=[128, 512], batch_sizes=[1, 4])
    run, _ = profiled(scenario, [truth], tmp_path)
    for _, row in checked_cells(scenario, truth, run, tmp_path):
        assert row["confidence"] != "unusable"
    slow = {item.key: item.first_use_s for item in run.document.evidence if item.first_use_s is not None}
    assert slow, "the first cell used its lengths when the engine warmed up, the others did not"
    for row in run.measured:
        if row.key in slow:
            assert slow[row.key] == pytest.approx(row.latency_s + truth.plan_s, rel=REST)
    assert any("torch.backends.cuda.enable_cudnn_sdp(False)" in text for text in run.answer)


def test_a_run_forecasts_a_card_of_known_truth(tmp_path: Path) -> None:
    """A default grid on two layers of Mistral-7B: median errors below 5 % of its cells, each from the others, and of
    eight unseen cells, whose intervals contain the truth."""
    scenario = Scenario("mistral-7b-v0.1", 2, prompt_lens=[128, 512, 2048], batch_sizes=[1, 4, 16])
    run, _ = profiled(scenario, [A100], tmp_path)
    known = run_facts(run.folder)
    assert known.trained.within.median < 0.05
    assert known.trained.outside.median < 0.05
    unseen = replace(scenario, prompt_lens=[256, 1024], batch_sizes=[1, 2, 8, 16])
    answer = forecast_run(run.folder, ForecastRequest(prompt_lens="256,1024", batch_sizes="1,2,8,16"))
    true_s = {(p.phase, p.batch_size, p.prompt_len): p.latency_s for p in true_phases(unseen, A100, tmp_path)}
    off = [abs(cell.latency_s / true_s[cell.phase, cell.batch_size, cell.prompt_len] - 1) for cell in answer.cells]
    assert len(off) == 16
    assert statistics.median(off) < 0.05
    assert all(cell.low_s < true_s[cell.phase, cell.batch_size, cell.prompt_len] < cell.high_s for cell in answer.cells)


HOSTS = {"slow": 40e-6, "middling": 7e-6, "fast": 2e-6}


def by_arithmetic(phase: Phase, launch_s: float) -> set[str]:
    """Return the possible labels, computed from launches and kernels.

    A host that takes twice as long as its card idles it for half of the step. A host that takes less than the card has
    no effect. In between, a graph gains something, but less than half. Near a tie, either label may apply.
    """
    host_s = phase.launches * launch_s
    by_card = {"prefill": "compute-bound", "decode": "memory-bound"}[phase.phase]
    if host_s > 2 * phase.device_s:
        return {"overhead-bound"}
    if host_s > 1.25 * phase.device_s:
        return {"mixed"}
    return {by_card} if host_s < 0.8 * phase.device_s else {by_card, "mixed"}


@pytest.mark.parametrize(
    ("engine", "host"),
    [*(("eager", host) for host in HOSTS), ("static", "fast"), ("compile", "middling"), ("graph", "slow")],
)
def test_the_verdict_follows_the_host(engine: str, host: str, tmp_path: Path) -> None:
    """A step of 4 layers of Mistral-7B on an H100 has 180 launches and 0.9 ms of kernels. A graph has one launch."""
    truth = H100.but(launch_s=HOSTS[host])
    scenario = Scenario("mistral-7b-v0.3", 4, engine=engine, prompt_lens=[512], batch_sizes=[1, 8])
    run, _ = profiled(scenario, [truth], tmp_path)
    for phase, row in checked_cells(scenario, truth, run, tmp_path):
        expected = by_arithmetic(phase, truth.launch_s)
        assert row["regime"] in expected, f"{phase.phase} {phase.batch_size}: {row['regime']}"
        if phase.batch_size == 8:  # no larger batch was measured
            waits = expected in ({"overhead-bound"}, {"mixed"})
            effect = first_change(run, row)  # compiled code also saves small kernels, a graph only what the host adds
            assert effect in SAVE_THE_HOST if waits else effect is not ChangeId.GRAPH


@pytest.mark.parametrize("settles_s", [0.1, 3.0])
def test_heat_of_its_own_prefills_is_no_drift_of_the_machine(settles_s: float, tmp_path: Path) -> None:
    """A short prefill runs at the full clock or at the capped one, after whatever ran before it.

    A prefill of 32 x 512 tokens computes for 34 ms, and the limit comes after 20. One of 16 x 512 computes for 17, and
    its decode loop lasts as long: a timed one never reaches the limit. If the limit settles in seconds, no ceiling of
    one second has settled: the label of a cell above it is not sure.
    """
    scenario = Scenario("mistral-7b-v0.3", 4, "bfloat16", batch_sizes=(1, 32))
    run, _ = profiled(scenario, [capped(settles_s)], tmp_path)
    evidence = run.document.evidence
    assert not any("machine" in reason for item in evidence for reason in item.noise_reasons)
    assert not any("power-capped" in item.flags for item in evidence if item.phase == "decode")
    assert all(item.confidence == "low" for item in evidence if "above-ceiling" in item.flags)
    assert any("power cap" in line for line in run.document.warnings)


@pytest.mark.parametrize(("more", "warns"), [(1.0, False), (2.0, True)], ids=["alone", "other-traffic"])
def test_the_counters_stand_next_to_the_counted_bytes(
    more: float, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode loop of 0.7 s moves its weights at every step; other traffic that the counters see is a finding."""
    scenario = Scenario("mistral-7b-v0.3", 8, "bfloat16", prompt_lens=[64], batch_sizes=[1], new_tokens=700)
    if more != 1.0:
        monkeypatch.setattr(nvml, "STREAM_SHARE", nvml.STREAM_SHARE * more)
    run, _ = profiled(scenario, [H100], tmp_path)
    [decode] = [item for item in run.document.evidence if item.phase == "decode"]
    [ratio] = [each.value for each in decode.signals if each.signal.startswith("memory traffic by the GPU's counters")]
    assert ratio == pytest.approx(more, rel=0.1)
    assert warns == any("GPU's counters saw" in line for line in run.document.warnings)


def test_the_overhead_model_of_4_bit_weights_launches_the_dense_copies_of_the_model(tmp_path: Path) -> None:
    """On an H100 bitsandbytes unpacks wide linears within the matmul up to few rows, and writes a copy for more.

    Its own table decides (backends/cuda/ops.py, 0.50): at 8 rows all but gate and up have a copy.
    """
    scenario = Scenario("mistral-7b-v0.3", 4, "bfloat16", prompt_lens=[64], batch_sizes=[1, 8], quant="nf4")
    truth = H100.but(launch_s=40e-6)
    run, _ = profiled(scenario, [truth], tmp_path)
    overhead = read_gathered(run.folder).overhead
    one, eight = (overhead["eager", "decode", batch].step_s for batch in (1, 8))
    assert eight > one
    for phase, row in checked_cells(scenario, truth, run, tmp_path):
        if phase.phase == "decode":
            assert row["overhead_s"] == pytest.approx(phase.exposed_overhead_s, rel=0.03)
