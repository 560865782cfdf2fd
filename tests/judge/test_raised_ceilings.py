"""A compute ceiling that a run's own matmuls beat, the range of one on a GPU, and cells without a number."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import ceiling
from made_facts import CELL, KEY, facts

from profiler.facts.ceilings import READ, Ceilings, CeilingsRemeasured
from profiler.facts.measurements import Activity, KernelTime, Replay
from profiler.facts.operators import OperatorWork
from profiler.facts.repetitions import Gap, Repetition
from profiler.facts.run_facts import Facts
from profiler.grid.cells import Cell
from profiler.judge.demand import faster_matmuls, over_the_run
from profiler.judge.warnings import run_remarks, run_warnings

FLOPS = 10**9
CEILING = 100e12


def matmuls(count: int, *, us: float | None = None, traced_us: float | None = None, calls: int = 0, **on: str) -> Facts:
    """Return the facts of matmuls of 1 GFLOP on a device of 100 TFLOP/s, where each takes 10 µs."""
    operator = OperatorWork("linears", "mlp", count, "float16", count * FLOPS, 1, 0, 0)
    replays = {} if us is None else {"linears": Replay("linears", (us * 1e-6,))}
    known = facts([operator], replays, flops_per_s=CEILING, bytes_per_s=1e12, **on)
    kernels = (
        KernelTime("nvjet_sm90_tst", calls or count, count * (traced_us or 0.0) * 1e-6),
        KernelTime("MulFunctor", 9, 1.0),
    )
    activity = {} if traced_us is None else {KEY: Activity(KEY, 1, 1.0, 0, 0.0, 1.0, longest=kernels)}
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
    [replay] = over_the_run(matmuls(224, us=82.0, traced_us=74.0)).replays[KEY].values()
    assert replay.whole.median_s == pytest.approx(74.0e-6)
    [replay] = over_the_run(matmuls(224, us=82.0, traced_us=90.0)).replays[KEY].values()
    assert replay.whole.median_s == pytest.approx(82.0e-6)


@pytest.mark.parametrize(("kind", "ends"), [("cuda", (98e12, 112e12)), ("cpu", (98e12, 102e12))])
def test_a_gpus_ceiling_is_the_range_of_all_its_measurements(kind: str, ends: tuple[float, float]) -> None:
    known = matmuls(1, kind=kind)
    first = replace(known.ceilings.compute["float16"], low_per_s=98e12, high_per_s=102e12)
    later = replace(first, per_s=110e12, low_per_s=108e12, high_per_s=112e12)
    ceilings = Ceilings({"float16": first}, {READ: ceiling(1e12)}, 1, True)
    seen = over_the_run(
        replace(known, ceilings=ceilings, remeasured_ceilings=[CeilingsRemeasured({}, {"float16": later})])
    )
    found = seen.ceilings.compute["float16"]
    assert (found.low_per_s, found.high_per_s) == ends


OTHER, SMALL, LARGE = Cell(2, 64, 8), Cell(8, 64, 8), Cell(16, 64, 8)
REPETITION = Repetition(CELL, 0, 0.1, (0.1,) * 7, 1.0, (), None, 0.0)


def test_each_kind_of_reason_is_said_once_and_a_cell_measured_before_it_failed_has_a_number() -> None:
    """The reasons of two cells that need too much memory differ only in their figures."""
    gaps = [Gap(cell, "oom", "out of memory") for cell in (CELL, OTHER)]
    gaps += [Gap(cell, "skipped", f"needs {gb} GB, free are 3.0 GB") for cell, gb in ((SMALL, 4.1), (LARGE, 8.2))]
    known = replace(
        facts([], flops_per_s=1.0, bytes_per_s=1.0),
        repetitions={OTHER: [replace(REPETITION, cell=OTHER)]},
        gaps={gap.cell: gap for gap in gaps},
    )
    assert run_warnings(known, []) == [
        "1 cell has no number (first: batch 1 x 64, oom: out of memory).",
        "2 cells have no number (first: batch 8 x 64, skipped: needs 4.1 GB, free are 3.0 GB).",
        "1 cell failed in a later repetition and keeps its number (first: batch 2 x 64, oom: out of memory).",
    ]
