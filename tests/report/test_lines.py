"""A run in sentences: a reason of all cells is reported once, and a term has the run's own figures."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from made_runs import evidence, key, old_run, result, whole_run, with_document

from profiler.facts.measurements import FormatLinears, LinearsTime
from profiler.facts.repetitions import Repetition
from profiler.judge.cell_stages import Timed
from profiler.judge.cells import row_of
from profiler.judge.savings import ChangeEffect, EngineDifference
from profiler.judge.scaling import Doubling, DoublingTest
from profiler.report.cells import batch_lines
from profiler.report.changes import changes, engines, linears, no_claim_lines
from profiler.report.glossary import explanation
from profiler.report.selection import half_width
from profiler.report.time_breakdown import terms_table
from profiler.stats import Estimate, Timing
from profiler.store.folder import Run

DRIFT = "the machine itself drifted by 23 %"
KEYS = [key("prefill", 1), key("decode", 1), key("decode", 2)]


@pytest.fixture
def run() -> Run:
    """Return a run of a prefill and two decodes on a machine that drifted; one of them has another reason as well."""
    items = (
        evidence(KEYS[0], noise_reasons=(DRIFT,)),
        evidence(KEYS[1], noise_reasons=(DRIFT,)),
        evidence(KEYS[2], noise_reasons=("only 4 samples", DRIFT)),
    )
    base = with_document(old_run(), evidence=items)
    return replace(base, results=tuple(result(of, noise="noisy") for of in KEYS))


def difference(saves_s: float, low_s: float, high_s: float, repetitions: int = 2) -> EngineDifference:
    columns = key("decode", 2, engine="static").columns
    return EngineDifference(
        **columns, against="eager", saves_s=saves_s, low_s=low_s, high_s=high_s, repetitions=repetitions
    )


@pytest.mark.parametrize(
    ("item", "row", "line"),
    [
        (difference(3e-3, 2e-3, 4e-3), ["saves 3.00 ms", "2.00 ms to 4.00 ms"], None),
        (difference(-3e-3, -4e-3, -2e-3), ["costs 3.00 ms", "2.00 ms to 4.00 ms"], None),
        (difference(1e-3, -1e-3, 3e-3), None, "in 1 cell engines differ by no more than noise"),
        (
            difference(-107e-3, -118e-3, -97e-3, repetitions=1), None,
            "1 cell has only one repetition of an engine: no difference is claimed; a larger --budget gives more",
        ),
    ],
)  # fmt: skip
def test_engines(run: Run, item: EngineDifference, row: list[str] | None, line: str | None) -> None:
    """One repetition each is not enough to claim a difference: those of the same code can differ by this amount."""
    run = with_document(run, engine=replace(run.document.engine, differences=(item,)))
    assert no_claim_lines(run) == ([line] if line else [])
    assert engines(run).blocks[0].rows == ([["decode 2 x 64", "static", *row, ""]] if row else [])


def test_the_interval_of_one_repetition_or_of_a_forecast_is_not_that_of_a_measured_time() -> None:
    """Ends 1 % below and above the time are 1 %; one repetition does not show how much repetitions differ."""
    rows = [
        result(KEYS[0], repetitions=2),
        result(KEYS[0], repetitions=1),
        result(KEYS[0], repetitions=2, status="forecast"),
    ]
    shares = [half_width(row) for row in rows]
    assert shares == [pytest.approx(0.01), pytest.approx(math.nan, nan_ok=True), pytest.approx(math.nan, nan_ok=True)]


def doubled(*batches: int, noise: str = "quiet") -> Run:
    """Return a run of decodes whose time grows with the square root of the batch; `noise` is that of the last."""
    rows = [result(key("decode", batch), math.sqrt(batch)) for batch in batches]
    steps = tuple(
        Doubling(smaller, larger, 0.5, 0.4, 0.6, 0.0, 1.0, math.sqrt(larger / smaller), "undecided")
        for smaller, larger in pairwise(batches)
    )
    fixed = {"phase": "decode", "engine": "eager", "prompt_len": 64, "context_len": 80}
    test = DoublingTest("batch", fixed, steps, batches[-1], batches[-1], None, None, ())
    run = with_document(old_run(), scaling=(test,))
    return replace(run, results=(*rows[:-1], replace(rows[-1], noise=noise)))


def test_a_measured_doubling_says_how_many_times_the_tokens_it_gives() -> None:
    """Time that grows by 2^0.4 to 2^0.6 with twice the sequences is 2^0.4 to 2^0.6 (1.3 to 1.5) times the tokens/s."""
    assert batch_lines(doubled(1, 2)) == ["batch x2 (1 to 2): 1.3 to 1.5 times the tokens in decode"]
    assert batch_lines(doubled(1, 2, 6)) == batch_lines(doubled(1, 2))
    missing = "no batch size was doubled: roofscope batch-test measures it"
    assert batch_lines(doubled(1, 4)) == ["batch x4 (1 to 4): 1.7 to 2.3 times the tokens in decode", missing]
    [vague] = batch_lines(doubled(1, 2, noise="unusable"))
    assert vague == missing.replace("no batch size was doubled", "no doubling of the batch is known well enough")


def test_changes_too_small_to_matter_are_left_out(run: Run) -> None:
    both = (ChangeEffect("a charm", 0.4, "hope"), ChangeEffect("a lucky charm", 0.009, "hope"))
    items = (evidence(KEYS[1], changes=both),)
    assert changes(with_document(run, evidence=items)).blocks[0].rows == [
        ["a charm", "decode 1 x 64", "about 400 ms", "40 %", "computed: hope"]
    ]


def test_terms_have_their_half_widths(run: Run) -> None:
    items = (evidence(KEYS[1], split_half_widths_s={"weights_s": 0.05}),)
    table = terms_table(with_document(run, evidence=items))
    assert [column.heading for column in table.columns] == ["", "decode 1 x 64", "decode 2 x 64", "prefill 1 x 64"]
    measured, weights = table.rows  # a term that no cell has gets no row
    assert measured == ["measured", "1.00 s", "1.00 s", "1.00 s"]
    assert weights == ["weights", "1.00 s ± 50.0 ms", "1.00 s", "1.00 s"]


def test_a_percentile_of_ttft_needs_its_samples() -> None:
    """p95 of 1 to 20 s is 19.05 s with linear interpolation (numpy's default); 19 samples have none."""
    cell, seconds = key("prefill", 2), [float(second) for second in range(1, 21)]
    for count, p95_s in ((20, 19.05), (19, math.nan)):
        repetitions = [
            Repetition(
                cell.cell, round=0, prefill_s=half[0], decode_s=(0.1,) * 3, wall_s=2.0, warm_up_s=(),
                peak_memory_bytes=1, at_unix_s=0.0, ttft_s=half[0], more_ttft_s=tuple(half[1:]),
            )
            for half in (seconds[:count:2], seconds[1:count:2])
        ]  # fmt: skip
        timed = Timed(cell, [], "ok", 2, Estimate(1.0, 1.0, 1.0, count), repetitions=repetitions)
        row = row_of(timed, whole_run().document.device)
        assert (row.ttft_samples, row.ttft_p95_s) == (count, pytest.approx(p95_s, nan_ok=True))


def test_kernels_that_are_slower_than_the_fastest_dense_ones_save_nothing() -> None:
    """bitsandbytes' 4-bit kernel on an H200: 4.27 ms next to 4.32 with one sequence, 14.0 next to 6.1 with 256."""
    rows = [("bfloat16", 4.32e-3, 6.1e-3), ("nf4", 4.27e-3, 14e-3), ("int4wo", 2e-3, 8e-3), ("fp8", 3e-3, 3e-3)]
    times = [
        LinearsTime(name, count, Timing(seconds, 0.1e-3), "aten::mm", graph=True)
        for name, *of_rows in rows
        for count, seconds in zip((1, 256), of_rows, strict=True)
    ]
    table, lines = linears(with_document(whole_run(), format_linears=FormatLinears(tuple(times))))
    assert [row[:3] for row in table.rows[:2]] == [
        ["bfloat16", "4.32 ms ± 2.3 %", "6.10 ms ± 1.6 %"], ["nf4", "4.27 ms ± 2.3 %", "14.0 ms ± 0.71 %"],
    ]  # fmt: skip
    assert lines.lines == ["bitsandbytes' 4-bit kernels (nf4) save nothing here"]


def test_figures_are_those_of_the_run() -> None:
    run = old_run()
    fastest = min(result.latency_s for result in run.measured if result.phase == "decode")
    assert f"{1e6 * fastest:.0f} µs" in explanation("decode", run)
    for regime in {cell.regime for cell in run.measured}:
        counted = sum(cell.regime == regime for cell in run.measured)
        assert f"In this run: {counted} of {len(run.measured)} cells" in explanation(str(regime), run)
