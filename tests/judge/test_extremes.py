"""Uncertain ceilings: weights read more slowly than a stream, a machine that changes, a GPU at another clock.

A run's own matmuls may beat a compute ceiling. Cells without a number are named.
"""

from dataclasses import replace

import pytest
from made_facts import CELL, KEY, facts, model

from profiler.facts.ceilings import Ceiling, Ceilings, CeilingsRemeasured, CurvePoint, WeightReadCeiling
from profiler.facts.measurements import Activity, KernelTime, Replay
from profiler.facts.operators import OperatorWork
from profiler.facts.overhead import Overhead
from profiler.facts.repetitions import Gap, Repetition
from profiler.facts.run_facts import DeviceFacts, Facts
from profiler.facts.telemetry import Reading
from profiler.grid.cells import Cell, CellKey, Grid
from profiler.judge.cell_stages import Judged
from profiler.judge.demand import extreme_shares, faster_matmuls, moved, over_the_run, weight_read_share
from profiler.judge.judge_run import Judgement, judge_run
from profiler.judge.regimes import Flag
from profiler.judge.warnings import run_remarks, run_warnings

W, P, GB = 100e9, 1e12, 10**9
DECODE, PREFILL = KEY, CellKey("prefill", CELL)


def ceiling(per_s: float, clock_hz: float | None = None) -> Ceiling:
    """Return a ceiling that is known to 0.2 %: the quartiles of 64 samples are 1 % apart."""
    return Ceiling(per_s, 0.995 * per_s, 1.005 * per_s, samples=64, method="by hand", clock_hz=clock_hz)


def test_a_gpu_at_its_power_limit_has_one_ceiling() -> None:
    """An H100 at 700 W: 700 TFLOP/s with a median clock of 1410 MHz, and 674 with readings of 1500."""
    first, later = ceiling(700e12, clock_hz=1.41e9), ceiling(674e12, clock_hz=1.5e9)
    ceilings = replace(measured(10e-3, kind="cuda").ceilings, compute={"bfloat16": first})
    assert not list(moved(ceilings, CeilingsRemeasured({}, {"bfloat16": later})))
    assert list(moved(ceilings, CeilingsRemeasured({}, {"bfloat16": later.times(0.9)})))


def measured(decode_s: float, prefill_s: float = 1.0, replayed_s: float | None = None, kind: str = "cpu") -> Facts:
    """A step of 1 GB (10 ms at 100 GB/s) and a prefill of 0.1 TFLOP (100 ms at 1 TFLOP/s), each one operator."""
    operators = {
        DECODE: (OperatorWork("linears", "mlp", 1, "float32", GB // 2, GB, 0, 0),),
        PREFILL: (OperatorWork("linears", "mlp", 1, "float32", 10**11, GB, 0, 0),),
    }
    repetitions = [
        Repetition(CELL, number, prefill_s, (decode_s,) * 8, prefill_s + 8 * decode_s, (), None, 100.0 * number)
        for number in range(4)
    ]
    replays = {DECODE: {"linears": Replay("linears", (replayed_s,) * 8)}} if replayed_s else {}
    return Facts(
        model=model(params=250_000_000, dtype="float32", compute_dtype="float32", storage_bytes=GB),
        device=DeviceFacts(kind, "device", 64 * GB, 1 << 20, 2, ""),
        grid=Grid((64,), (1,), 8),
        ceilings=Ceilings(
            compute={"float32": ceiling(P, clock_hz=1.0e9 if kind == "cuda" else None)},
            memory={"read": ceiling(W), "copy": ceiling(0.8 * W), "gemv": ceiling(0.5 * W)},
            stream_bytes=1 << 30,
            beyond_cache=True,
            curve=(CurvePoint(1 << 29, W), CurvePoint(1 << 30, W)),
        ),
        operators=operators,
        predicted_peak_bytes={CELL: GB},
        overhead={("eager", phase, 1): Overhead(1e-4, 0.0) for phase in ("decode", "prefill")},
        repetitions={CELL: repetitions},
        replays=replays,
    )


def later_ceilings(memory: float = 1.0, compute: float = 1.0) -> CeilingsRemeasured:
    """Return the ceilings at the end, as shares of those at the start. The slower stream does not matter."""
    streams = {"read": ceiling(memory * W), "gemv": ceiling(0.4 * W)}
    return CeilingsRemeasured(streams, {"float32": ceiling(compute * P)}, 1.0)


def judged(base: Facts) -> tuple[Judgement, list[str]]:
    found = judge_run(base)
    return found, [*run_remarks(base, found.judged), *run_warnings(base, found.judged)]


def cell_of(found: Judgement, key: CellKey = DECODE) -> Judged:
    return next(cell for cell in found.judged if cell.key == key)


def verdict(found: Judgement, key: CellKey) -> tuple[str, str, bool]:
    of = cell_of(found, key).verdict
    return of.regime, of.confidence, Flag.UNSTEADY in of.flags


STEADY = measured(decode_s=12.5e-3, prefill_s=120e-3)


def test_ceilings_that_agree_change_nothing() -> None:
    """Later ceilings within 5 %, or weights read as fast as a stream, change nothing."""
    base, warnings = judged(STEADY)
    assert warnings == []
    near_a_stream = replace(STEADY.ceilings, weights=WeightReadCeiling(GB, ceiling(0.96 * W)))
    measured_again = replace(STEADY, remeasured_ceilings=(later_ceilings(0.97, 1.03),))
    for same in (measured_again, replace(STEADY, ceilings=near_a_stream)):
        assert extreme_shares(same) == {}
        assert judged(same) == (base, [])


@pytest.mark.parametrize(
    ("rates", "hidden"),
    [((4.0, 1.0, 1.0), True), ((4.0, 2.0, 2.0), False), ((1.0, 1.0, 1.0), False), ((2.0, 1.0), False)],
)
def test_a_cache_does_not_excuse_a_ceiling_measured_too_low(rates: tuple[float, ...], hidden: bool) -> None:
    """A step reads 1 GB at 1.6 times the memory ceiling, perhaps from a cache that ends between 0.5 and 1 GiB.

    In the other cases a warning says that a ceiling is too low or a count too high. There, the curve beyond is twice as
    fast as the ceiling, no size is faster, or only the end of the curve is slower.
    """
    curve = tuple(CurvePoint(1 << power, share * W) for power, share in enumerate(rates, 29))
    base = measured(decode_s=GB / (1.6 * W), prefill_s=120e-3)
    found, warnings = judged(replace(base, ceilings=replace(base.ceilings, curve=curve)))
    assert {Flag.CACHE_RESIDENT, Flag.ABOVE_CEILING} & {*cell_of(found).verdict.flags} == {
        Flag.CACHE_RESIDENT if hidden else Flag.ABOVE_CEILING
    }
    if not hidden:
        assert verdict(found, DECODE)[1] == "low"
        assert any("a ceiling is too low or a count too high" in warning for warning in warnings)


def test_a_machine_that_slowed_is_judged_under_both_its_ceilings() -> None:
    """A decode at 80 % of the memory ceiling is memory-bound with that ceiling and with a ceiling that is 40 % lower.

    It takes 12.5 ms, so it is above the lower ceiling. Its prefill does not depend on memory.
    """
    slowed = replace(STEADY, remeasured_ceilings=(later_ceilings(memory=0.6),))
    assert extreme_shares(slowed) == {"lowest": (0.6, 1.0)}
    found, warnings = judged(slowed)
    assert len(warnings) == 1
    assert verdict(found, DECODE) == verdict(judged(STEADY)[0], DECODE)
    assert verdict(found, PREFILL) == verdict(judged(STEADY)[0], PREFILL)


def test_a_label_that_changes_between_the_ceilings_says_so() -> None:
    """Bytes take 10 of 15 ms. At the end of the run memory is twice as fast, and they would take 5 of 15 ms."""
    moved = replace(measured(decode_s=15e-3), remeasured_ceilings=(later_ceilings(memory=2.0, compute=1.2),))
    assert extreme_shares(moved) == {"highest": (2.0, 1.2)}
    assert verdict(judged(replace(moved, remeasured_ceilings=()))[0], DECODE)[0] == "memory-bound"
    found, warnings = judged(moved)
    assert verdict(found, DECODE) == ("memory-bound", "low", True)
    named = "memory-bound under the ceilings measured first, inconclusive under the highest"
    [line] = [line for line in warnings if "label" in line]
    assert line.startswith(f"{2 if verdict(found, PREFILL)[2] else 1} cell")
    assert named in line
    assert line in run_warnings(moved, found.judged), "it may change a conclusion"
    assert warnings[0] in run_remarks(moved, found.judged), "the verdicts take both ceilings into account"


def test_replays_that_take_longer_than_their_step_are_named() -> None:
    """The only operator of an 11 ms step takes 15.4 ms in isolation.

    With 0.1 ms of overhead, the parts are 41 % longer than the step on a CPU, and 40 % on a GPU, which hides overhead.
    At 11.9 ms they are less than a tenth longer.
    """
    for kind, share in (("cpu", "41 %"), ("cuda", "40 %")):
        for replayed_s, confidence, named in ((15.4e-3, "medium", True), (11.9e-3, "high", False)):
            found, warnings = judged(measured(decode_s=11e-3, replayed_s=replayed_s, kind=kind))
            assert any(f"take longer than the whole step (most: {share}" in text for text in warnings) == named
            assert verdict(found, DECODE)[:2] == ("memory-bound", confidence)


def test_a_step_above_a_ceiling_proves_something_if_the_ceiling_rose() -> None:
    """A step reads 10 ms of bytes in 8 ms. At the end memory reaches 150 GB/s, so the first ceiling was disturbed."""
    above = measured(decode_s=8e-3)
    for later, flagged in (((), True), ((later_ceilings(memory=1.5),), False)):
        found = judge_run(replace(above, remeasured_ceilings=later))
        assert (Flag.ABOVE_CEILING in cell_of(found).verdict.flags) == flagged


@pytest.mark.parametrize(
    ("weight_read", "share"),
    [
        # A model of 4 MiB is in a cache that reads at 400 GB/s, not in memory at 100 GB/s.
        (WeightReadCeiling(4 << 20, ceiling(W)), 0.25),
        (WeightReadCeiling(GB, ceiling(W)), 1.0),
        # Short reads reach 70 of 100 GB/s in any memory; reads of the weights are as fast, or half as fast.
        (WeightReadCeiling(GB, ceiling(0.69 * W), ceiling(0.7 * W)), 1.0),
        (WeightReadCeiling(GB, ceiling(0.35 * W), ceiling(0.7 * W)), 0.5),
        # The read is 20 % slower than a stream, but its five samples have quartiles that are 30 % apart.
        (WeightReadCeiling(GB, Ceiling(0.8 * W, 0.65 * W, 0.95 * W, samples=5, method="by hand")), 1.0),
    ],
)
def test_weights_and_a_stream_of_their_size_and_pieces(weight_read: WeightReadCeiling, share: float) -> None:
    curve = (CurvePoint(4 << 20, 4 * W), *STEADY.ceilings.curve)
    assert weight_read_share(replace(STEADY.ceilings, curve=curve, weights=weight_read)) == pytest.approx(share)


def read(clock_hz: float, *throttle: str) -> list[Reading]:
    """A reading in each repetition."""
    return [Reading(clock_hz=clock_hz, throttle=throttle, at_unix_s=100.0 * number + 0.01) for number in range(4)]


def test_a_card_at_half_its_clock_is_compute_bound() -> None:
    """0.1 TFLOP at 1 TFLOP/s take 100 ms, and at half the clock 200 of the measured 210 ms."""
    throttled = replace(measured(decode_s=12.5e-3, prefill_s=210e-3, kind="cuda"), readings=read(0.5e9))
    found, _ = judged(throttled)
    cell = cell_of(found, PREFILL)
    assert (cell.verdict.regime, cell.timed.clock_share) == ("compute-bound", 0.5)
    assert Flag.THROTTLED in cell.verdict.flags
    assert cell.terms.compute_s == pytest.approx(200e-3)
    assert abs(cell.terms.unexplained_s) < 0.06 * 210e-3
    assert any("throttled at 50 % of its clock" in sentence for sentence in found.answer.sentences)
    assert cell_of(found).terms.weights_s == pytest.approx(10e-3), "the memory has another clock"


def test_a_step_that_is_faster_than_its_clock_allows_disproves_the_reading() -> None:
    """At half the clock 0.1 TFLOP take 200 ms. The measured 125 ms are 80 % of the ceiling at the whole clock."""
    misread = replace(measured(decode_s=12.5e-3, prefill_s=125e-3, kind="cuda"), readings=read(0.5e9))
    cell = cell_of(judge_run(misread), PREFILL)
    assert (cell.verdict.regime, cell.timed.clock_share) == ("compute-bound", 1.0)
    assert not {Flag.ABOVE_CEILING, Flag.THROTTLED} & {*cell.verdict.flags}
    assert cell.terms.compute_s == pytest.approx(100e-3)


@pytest.mark.parametrize(
    ("clock_hz", "reason", "noise"),
    [
        (1.0e9, "power cap", ()),
        (0.96e9, "power cap", ()),
        (0.9e9, "power cap", ("throttled (power cap)",)),
        (1.0e9, "hardware thermal", ("throttled (hardware thermal)",)),
    ],
)
def test_a_power_cap_is_noise_if_the_clock_differs(clock_hz: float, reason: str, noise: tuple[str, ...]) -> None:
    """A T4 of 70 W is always at its power cap. Its ceilings were measured at the cap too, and its times are steady."""
    base = measured(decode_s=12.5e-3, prefill_s=110e-3, kind="cuda")
    found, _ = judged(replace(base, readings=read(clock_hz, reason)))
    [prefill] = [item for item in found.evidence if item.key == PREFILL]
    assert tuple(why for why in prefill.noise_reasons if why.startswith("throttled")) == noise


def test_a_ceiling_that_a_cache_may_have_served_gives_no_high_confidence() -> None:
    """Without room for buffers beyond the caches, the stream may have measured a cache."""
    for beyond_cache in (True, False):
        facts = replace(STEADY, ceilings=replace(STEADY.ceilings, beyond_cache=beyond_cache))
        confident = {item.confidence for item in judge_run(facts).evidence}
        assert ("high" in confident) == beyond_cache, confident


CEILING = 100e12


def matmuls(count: int, *, us: float | None = None, traced_us: float | None = None, calls: int = 0, **on: str) -> Facts:
    """Return the facts of matmuls of 1 GFLOP on a device of 100 TFLOP/s, where each takes 10 µs."""
    operator = OperatorWork("linears", "mlp", count, "float16", count * GB, 1, 0, 0)
    replays = {} if us is None else {"linears": Replay("linears", (us * 1e-6,))}
    known = facts([operator], replays, flops_per_s=CEILING, bytes_per_s=1e12, **on)
    kernels = (
        KernelTime("nvjet_sm90_tst", calls or count, count * (traced_us or 0.0) * 1e-6),
        KernelTime("MulFunctor", 9, 1.0),
    )
    activity = {} if traced_us is None else {DECODE: Activity(DECODE, 1, 1.0, 0, 0.0, 1.0, longest=kernels)}
    clocked = replace(ceiling(CEILING), clock_hz=1.4e9) if known.device.kind == "cuda" else ceiling(CEILING)
    return replace(known, activity=activity, ceilings=replace(known.ceilings, compute={"float16": clocked}))


@pytest.mark.parametrize(
    ("known", "per_s"),
    [
        pytest.param(matmuls(32, us=8.0), 125e12, id="32 replayed"),
        pytest.param(matmuls(31, us=8.0), None, id="31 are too few"),
        pytest.param(matmuls(32, us=9.7), None, id="3 % is no difference"),
        pytest.param(matmuls(32, us=12.0, traced_us=8.0), 125e12, id="32 traced"),
        pytest.param(matmuls(32, traced_us=8.0, calls=31), None, id="one kernel is not named"),
        pytest.param(matmuls(32, us=8.0, dtype="float32"), None, id="no model's dtype"),
    ],
)
def test_at_least_32_matmuls_of_the_models_dtype_beat_a_ceiling(known: Facts, per_s: float | None) -> None:
    found = faster_matmuls(known)
    assert (found[0].flops_per_s if found else None) == (None if per_s is None else pytest.approx(per_s))


def test_a_gpu_is_raised_at_full_clock_and_a_cpu_at_any() -> None:
    """A GPU's ceiling is measured at its power limit, which other cells meet, too."""
    gpu, cpu = (over_the_run(matmuls(32, us=8.0, kind=kind)).ceilings.compute["float16"] for kind in ("cuda", "cpu"))
    assert (gpu.per_s, gpu.per_s * gpu.at_full_clock) == (CEILING, pytest.approx(125e12))
    assert cpu.per_s == pytest.approx(125e12)
    [said] = run_remarks(matmuls(32, us=8.0), [])
    assert said.endswith("raised to 125 TFLOP/s, the rate of 32 matmuls of decode 1 x 64 (replayed).")


def test_a_replay_is_no_slower_than_its_trace() -> None:
    """Replays of a long prefill run into a power limit: 82.0 ms on an H200, where a trace had 74.0."""
    for traced_us, found_us in ((74.0, 74.0), (90.0, 82.0)):
        [replay] = over_the_run(matmuls(224, us=82.0, traced_us=traced_us)).replays[DECODE].values()
        assert replay.whole.median_s == pytest.approx(found_us * 1e-6)


@pytest.mark.parametrize(("kind", "ends"), [("cuda", (98e12, 112e12)), ("cpu", (98e12, 102e12))])
def test_a_gpus_ceiling_is_the_range_of_all_its_measurements(kind: str, ends: tuple[float, float]) -> None:
    known = matmuls(1, kind=kind)
    first = replace(known.ceilings.compute["float16"], low_per_s=98e12, high_per_s=102e12)
    later = replace(first, per_s=110e12, low_per_s=108e12, high_per_s=112e12)
    ceilings = replace(known.ceilings, compute={"float16": first})
    again = [CeilingsRemeasured({}, {"float16": later})]
    found = over_the_run(replace(known, ceilings=ceilings, remeasured_ceilings=again)).ceilings.compute["float16"]
    assert (found.low_per_s, found.high_per_s) == ends


def test_each_kind_of_reason_is_said_once_and_a_cell_measured_before_it_failed_has_a_number() -> None:
    """The reasons of two cells that need too much memory differ only in their figures."""
    other, small, large = (Cell(batch, 64, 8) for batch in (2, 8, 16))
    gaps = [Gap(cell, "oom", "out of memory") for cell in (CELL, other)]
    gaps += [Gap(cell, "skipped", f"needs {gb} GB, free are 3.0 GB") for cell, gb in ((small, 4.1), (large, 8.2))]
    known = replace(
        facts([], flops_per_s=1.0, bytes_per_s=1.0),
        repetitions={other: [Repetition(other, 0, 0.1, (0.1,) * 7, 1.0, (), None, 0.0)]},
        gaps={gap.cell: gap for gap in gaps},
    )
    assert run_warnings(known, []) == [
        "1 cell has no number (first: batch 1 x 64, oom: out of memory).",
        "2 cells have no number (first: batch 8 x 64, skipped: needs 4.1 GB, free are 3.0 GB).",
        "1 cell failed in a later repetition and keeps its number (first: batch 2 x 64, oom: out of memory).",
    ]
