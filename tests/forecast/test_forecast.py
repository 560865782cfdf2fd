"""Forecasts compared with runs: counts from config.json, held-out cells, a simulated device, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.forecast import as_run

from profiler.counting.attention import AttentionCore
from profiler.counting.operators import Linear
from profiler.errors import RequestError, RunError
from profiler.forecast.command import RunFacts, forecast_run, run_facts
from profiler.forecast.options import ForecastRequest
from profiler.grid.cells import Cell, CellKey
from profiler.grid.ranges import make_grid
from profiler.judge.judge_run import judge_run
from profiler.predict.cross_validation import TrainedModel, held_out, train, train_on
from profiler.predict.kernel_times import DeviceRates, MeasuredCells
from profiler.predict.operator_arrays import StepArrays
from profiler.predict.predict import fit
from profiler.predict.result import BETWEEN_CELLS
from profiler.store.folder import read_document

QUIET = Path(__file__).parents[1] / "data" / "forecast" / "smollm2-135m-zen4-float32"

REFERENCE = Path(__file__).parents[2] / "runs" / "reference"


@pytest.fixture(scope="module")
def known() -> RunFacts:
    """A run of SmolLM2-135M on two cores of an EPYC with 32 cells, read from its folder."""
    return run_facts(REFERENCE / "smollm2-135m-epyc")


def test_cells_are_counted_from_the_config_alone(known: RunFacts) -> None:
    """The count of the model on the meta device equals that of the run's loaded model to the byte."""
    columns = {column.operator: column for column in known.trained.measured.demanded.columns}
    for index, key in enumerate(known.facts.grid.keys):
        for item in known.facts.operators[key]:
            column = columns[item.operator]
            assert column.flops[index] == item.flops
            assert column.weight_bytes[index] == item.weight_bytes
            assert column.kv_bytes[index] == item.kv_bytes
            assert sum(values[index] for values in column.redundant_bytes.values()) == sum(
                item.redundant_bytes.values()
            )
        need = known.trained.measured.demanded.need.at(np.array(index))
        assert need.peak_bytes == pytest.approx(known.facts.predicted_peak_bytes[key.cell], rel=0.01)
        # Free memory in pieces: 2.5 float32 outputs of the widest matmul.
        assert need.safe_bytes - need.peak_bytes == 2.5 * key.cell.batch_size * key.cell.depth * 1536 * 4


def test_the_model_is_the_time_breakdown() -> None:
    """At the measured cells the terms equal those of the run's judgement."""
    known = run_facts(QUIET)
    terms = known.trained.fitted.terms(known.trained.measured.demanded)
    results = {result.key: result for result in judge_run(known.facts).cells}
    for index, key in enumerate(known.facts.grid.keys):
        result = results[key]
        for name in ("weights_s", "kv_s", "compute_s", "overhead_s"):
            assert getattr(terms, name)[index] == pytest.approx(getattr(result, name), rel=1e-6, abs=1e-9), name
    judged = [results[key] for key in known.facts.grid.keys]
    explained = np.array([result.latency_s - result.unexplained_s - result.redundant_s for result in judged])
    off = np.abs((terms.total_s - terms.redundant_s) / explained - 1)
    assert np.median(off) < 0.02
    # A cache serves what a kernel wrote at least as fast as memory; the time breakdown counts it all as traffic.
    assert np.all(terms.redundant_s <= 1.001 * np.array([result.redundant_s for result in judged]))


def test_held_out_cells_are_not_seen(known: RunFacts) -> None:
    """The forecast of a held-out cell does not depend on its measured time."""
    measured, device = known.trained.measured, known.trained.fitted.device
    group = np.array([5])
    absurd = replace(measured, latency_s=np.where(np.arange(len(measured)) == 5, 1e3, measured.latency_s))
    one = held_out(measured, partial(fit, device=device), [group])
    other = held_out(absurd, partial(fit, device=device), [group])
    forecast_s = 1e3 * (1 - other.errors[0])
    assert abs(forecast_s / measured.latency_s[5] - 1) == pytest.approx(one.errors[0])


def test_the_intervals_of_a_real_run_hold_nine_in_ten_of_what_they_have_not_seen(known: RunFacts) -> None:
    within = known.trained.within
    assert len(within.errors) == 32
    assert np.mean(within.widths <= within.half_width) >= 0.9
    # The machine was shared and busy: cells of equal work differ by 10 %, and no forecast can be closer.
    assert within.median < 0.10


def planted(known: RunFacts, overlaps: bool = False) -> tuple[MeasuredCells, DeviceRates, Callable[[Any], Any]]:
    """The same cells on a simulated device: kernels at 40 % of their ceiling, steps 7 % above the sum of terms."""
    device = replace(known.trained.fitted.device, overlaps=overlaps)
    demanded = known.trained.measured.demanded
    rates = {each.operator: device.ceilings.compute_flops_per_s(each.source.dtype_name) for each in demanded.columns}

    def ceiling_s(column: Any, bandwidth: Any) -> Any:
        return np.maximum(column.flops / rates[column.operator], column.model_bytes / bandwidth) / column.source.count

    def bandwidth_of(some: Any) -> Any:
        return device.ceilings.memory_bytes_per_s_for(sum(column.model_bytes for column in some.columns))

    replayed = {
        column.operator: ceiling_s(column, bandwidth_of(demanded)) / 0.4
        for column in demanded.columns
        if isinstance(column.source, Linear | AttentionCore)
    }
    bare = replace(known.trained.measured, seconds=replayed, conversion_s={})

    def truth(some: Any) -> Any:
        return 1.07 * fit(bare, device).terms(some).total_s

    seconds = truth(demanded)
    return replace(bare, latency_s=seconds, half_width_s=0.01 * seconds), device, truth


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_planted_device_is_forecast_where_nobody_measured(known: RunFacts, overlaps: bool) -> None:
    """Fitted to 8 of 32 cells: forecasts of the other 24, and of batches and contexts four times larger."""
    measured, device, truth = planted(known, overlaps=overlaps)
    steps = measured.demanded.steps
    chosen = np.flatnonzero(np.isin(steps.batch, (1, 4)) & np.isin(steps.prompt_len, (64, 256)))
    assert len(chosen) == 8
    fitted = fit(measured.at(chosen), device)
    rest = np.setdiff1d(np.arange(len(measured)), chosen)
    off = np.abs(fitted.forecast(measured.demanded.at(rest)).latency_s / measured.latency_s[rest] - 1)
    assert np.median(off) < 0.02
    assert np.quantile(off, 0.9) < 0.05
    far = known.demanded(StepArrays.of(make_grid("1024,2048", "16,32", 32).keys))
    off = np.abs(fitted.forecast(far).latency_s / truth(far) - 1)
    assert np.median(off) < 0.05


def trained_on_four(known: RunFacts, own: float, drift: float = 0.0, slower: float = 1.0) -> tuple[TrainedModel, Any]:
    """A planted run of batches 1 and 8 and prompts of 64 and 512 with replays between them, and its truth.

    The half widths of its cells are `own`; replays between them took `slower` times their time.
    """
    measured, device, truth = planted(known)
    steps = measured.demanded.steps
    corners = np.flatnonzero(np.isin(steps.batch, (1, 8)) & np.isin(steps.prompt_len, (64, 512)))
    run = as_run(replace(measured, half_width_s=own * measured.latency_s), corners)
    assert run.between is not None
    seconds = {name: slower * times for name, times in run.between.seconds.items()}
    return train(replace(run, between=replace(run.between, seconds=seconds)), device, drift), truth


def test_a_forecast_between_replayed_rows_is_as_narrow_as_its_cells(known: RunFacts) -> None:
    """Four cells known within 1 %, and kernels replayed at 2 and 4 rows between 1 and 8."""
    trained, truth = trained_on_four(known, 0.01)
    demanded = known.demanded(StepArrays.of(make_grid("64,512", "2,4", 32).keys))
    forecast, half_width = trained.forecast(demanded)
    assert np.abs(forecast.latency_s / truth(demanded) - 1).max() < 0.02
    assert half_width.max() < 0.04


def test_no_interval_is_narrower_than_the_cells_around_and_the_drift(known: RunFacts) -> None:
    demanded = known.demanded(StepArrays.of(make_grid("128", "2", 32).keys))
    for own, drift, least in ((0.01, 0.12, 0.12), (0.09, 0.0, 0.09), (0.09, 0.12, 0.15)):
        trained, _ = trained_on_four(known, own, drift)
        _, half_width = trained.forecast(demanded)
        assert (half_width >= least - 1e-9).all()
        assert (half_width < 1.5 * least).all()


def test_a_measured_cell_keeps_its_time_and_interval(known: RunFacts) -> None:
    trained, _ = trained_on_four(known, 0.05)
    forecast, half_width = trained.forecast(trained.measured.demanded)
    assert forecast.latency_s == pytest.approx(trained.measured.latency_s)
    assert half_width == pytest.approx(np.hypot(0.05, 0.03))


def test_a_forecast_that_contradicts_larger_cells_is_refused(known: RunFacts) -> None:
    """The replays at 2 and 4 rows were disturbed: three times as slow as those of 1 and 8."""
    demanded = known.demanded(StepArrays.of(make_grid("64", "2,4", 32).keys))
    for slower, refused in ((1.0, False), (3.0, True)):
        trained, _ = trained_on_four(known, 0.01, slower=slower)
        _, half_width = trained.forecast(demanded)
        assert np.isinf(half_width).any() == refused


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_the_overhead_model_of_a_batch_without_a_cell_changes_no_forecast(slower: float) -> None:
    """An H100's run without batch 4, whose decode steps took 24.1 and 26.2 ms, whatever its overhead model took."""
    known = run_facts(REFERENCE / "mistral-7b-h100")
    overhead_model = {
        key: replace(item, step_s=slower * item.step_s) for key, item in known.facts.overhead.items() if key[2] == 4
    }
    facts = replace(known.facts, overhead={**known.facts.overhead, **overhead_model})
    rows = [row for row in known.run.measured if row.batch_size != 4]
    steps = StepArrays.of([key for key in facts.grid.keys if key.cell.batch_size == 4 and key.phase == "decode"])
    trained = train_on(facts, rows, lambda keys: known.demanded(StepArrays.of(keys)), "eager")
    assert trained is not None
    forecast, half_width = trained.forecast(known.demanded(steps))
    assert forecast.latency_s == pytest.approx([0.0241, 0.0262], rel=0.1)
    assert (half_width > 0.25).all(), "the cells around are known within 25 % and more"


def test_too_few_cells_are_refused_with_the_command_that_measures_the_others() -> None:
    request = ForecastRequest(batch_sizes="2,4", prompt_lens="64")
    with pytest.raises(RequestError, match=r"too few cells of prefill .*run mistral.* --batch-sizes 2,4$"):
        forecast_run(REFERENCE / "mistral-7b-h200-default", request)
    assert forecast_run(QUIET, request).cells


@pytest.mark.ci
def test_assumptions_of_a_forecast_beyond_the_grid_are_named() -> None:
    answer = forecast_run(REFERENCE / "smollm2-135m-epyc", ForecastRequest(prompt_lens="100,4096", batch_sizes="2,64"))
    by = {(cell.phase, cell.batch_size, cell.prompt_len): cell for cell in answer.cells}
    assert by["decode", 2, 100].basis == BETWEEN_CELLS
    assert "nearest batch" in by["decode", 64, 100].basis
    assert "nearest length" in by["decode", 2, 4096].basis
    near, far = by["decode", 2, 100], by["decode", 64, 4096]
    assert far.high_s / far.low_s > near.high_s / near.low_s
    assert answer.error.cells == 32
    assert answer.error.median is not None


def test_out_of_memory_is_a_forecast(known: RunFacts) -> None:
    """The cache of SmolLM2-135M is 2 x 3 heads x 64 x 30 layers x 4 bytes = 46,080 bytes per token."""
    answer = forecast_run(REFERENCE / "smollm2-135m-epyc", ForecastRequest(prompt_lens="8000", batch_sizes="1,4000"))
    assert {(cell.batch_size, cell.fits) for cell in answer.cells} == {(1, True), (4000, False)}
    need = known.demanded(StepArrays.of([CellKey("prefill", Cell(4000, 8000, 32))])).need
    assert need.cache_bytes == 4000 * (8000 + 32) * 46_080


@pytest.mark.ci
def test_another_change_is_forecast_only_where_it_was_tried() -> None:
    run = REFERENCE / "smollm2-135m-zen4"
    plain = forecast_run(run, ForecastRequest(batch_sizes="1", prompt_lens="16"))
    tried = forecast_run(run, ForecastRequest(batch_sizes="1", prompt_lens="16", dtype="bfloat16"))
    both = zip(plain.cells, tried.cells, strict=True)
    ratios = {before.phase: after.latency_s / before.latency_s for before, after in both}
    assert ratios["decode"] < 0.95
    with pytest.raises(RequestError, match=r"no basis for nf4 in every requested phase.*bfloat16, int4wo, nf4"):
        forecast_run(run, ForecastRequest(quant="nf4"))


def test_a_run_of_several_ranks_is_no_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    document = replace(read_document(QUIET), ranks=2)
    monkeypatch.setattr("profiler.forecast.command.read_document", lambda _: document)
    with pytest.raises(RunError, match="is a run of 2 ranks; use a run on one GPU"):
        forecast_run(QUIET, ForecastRequest())
