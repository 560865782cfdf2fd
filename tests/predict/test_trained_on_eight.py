"""Forecasts of the reference runs: 24 of 32 cells are forecast from the other 8, and compared with their times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.forecast import LIMITS, MORE, as_run, crossed
from cases import slow_except

from profiler.forecast.command import run_facts
from profiler.predict.kernel_times import line
from profiler.predict.operator_arrays import Array
from profiler.predict.predict import fit

FOLDERS = sorted(MORE.glob("smollm2-*"))


@pytest.mark.parametrize("folder", slow_except(FOLDERS[:1], FOLDERS), ids=lambda folder: folder.name)
def test_eight_cells_forecast_the_other_twenty_four(folder: Path) -> None:
    run = run_facts(folder)
    measured, device = run.trained.measured, run.trained.fitted.device
    chosen = crossed(run)
    rest = np.setdiff1d(np.arange(len(measured)), chosen)
    assert (len(chosen), len(rest)) == (8, 24)
    forecast = fit(as_run(measured, chosen), device).forecast(measured.demanded.at(rest))
    off = np.abs(forecast.latency_s / measured.latency_s[rest] - 1)
    median, nine_in_ten = LIMITS
    assert np.median(off) <= median
    assert np.quantile(off, 0.9) <= nine_in_ten


def test_between_two_points_a_kernel_has_their_common_share_or_loss() -> None:
    """The roof is 1 s up to 4 rows, and 0.25 s per row beyond.

    The times at 1 and 64 rows give those between them. One kernel reaches half its roof everywhere, and another one
    loses 0.2 s everywhere.
    """

    def roof_s(rows: Array) -> Array:
        return np.maximum(1.0, rows / 4)

    measured, others = np.array([1.0, 64.0]), np.array([4.0, 8.0, 32.0])
    for truth in (lambda rows: 2 * roof_s(rows), lambda rows: roof_s(rows) + 0.2):
        times = line(measured, truth(measured), roof_s(measured))
        assert times.seconds(others, roof_s(others)) == pytest.approx(truth(others), rel=1e-3)
    halved = line(measured, 2 * roof_s(measured), roof_s(measured))
    assert halved.seconds(np.array([256.0]), np.array([64.0])) == pytest.approx(128.0, rel=1e-3), "beyond all points"
