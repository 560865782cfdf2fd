"""Medians, intervals and grades, compared with statistical theory."""

import math
from typing import Any

import numpy as np
import pytest

from profiler.stats import (
    ONE_REPETITION,
    NoiseReport,
    estimate,
    narrow_enough,
    noise_report,
    outliers,
    percentile,
    samples_for,
    spread_of,
    student_t,
    two_modes,
)


def test_a_percentile_needs_a_sample_beyond_it() -> None:
    """Of 1 s to 101 s the 99th percentile is 100 s. Ten samples have one beyond their p90."""
    seconds = [float(second) for second in range(1, 102)]
    assert percentile(seconds, 99) == 100
    assert percentile(seconds, 90) == 91
    assert (samples_for(90), samples_for(99)) == (10, 100)
    assert math.isnan(percentile(seconds[:99], 99))
    assert percentile(seconds[:10], 90) == pytest.approx(9.1)
    assert math.isnan(percentile(seconds[:9], 90))


def by_round(*medians: float) -> dict[int, float]:
    return dict(enumerate(medians))


@pytest.mark.parametrize(("freedom", "within", "end"), [(1, 0.95, 12.706), (3, 0.95, 3.182), (30, 0.9, 1.697)])
def test_students_t(freedom: float, within: float, end: float) -> None:
    """Compared with the printed table (0.975 and 0.95 quantiles)."""
    assert student_t(freedom, within) == pytest.approx(end, rel=0.01)


def test_the_spread_of_repetitions_is_one_standard_deviation_and_ignores_a_few_disturbed_cells() -> None:
    rng = np.random.default_rng(6)
    run = [by_round(*rng.normal(1.0, 0.02, 4)) for _ in range(300)]
    assert spread_of(run).repetition == pytest.approx(0.02, rel=0.06)
    disturbed = [by_round(*rng.normal(1.0, 0.5, 4)) for _ in range(15)]
    assert spread_of([*run, *disturbed]).repetition == pytest.approx(0.02, rel=0.12)


def test_two_repetitions_do_not_decide_the_spread_of_all() -> None:
    """Without second repetitions the spread is the usual 1 %; with a pair 6 % apart it is only slightly more."""
    nothing = spread_of([by_round(1.0), by_round(1.1)])
    assert nothing.repetition == pytest.approx(0.01, rel=0.1)
    disturbed, calm = by_round(0.959, 1.021), by_round(1.000, 1.002)
    assert nothing.repetition < spread_of([disturbed, calm]).repetition < 0.02
    assert spread_of([calm] * 20).repetition < 0.3 * nothing.repetition


def test_the_freedom_of_a_spread_counts_only_the_other_cells() -> None:
    pair = by_round(1.00, 1.01)
    assert spread_of([pair]).freedom == spread_of([]).freedom
    assert spread_of([pair] * 4).freedom == spread_of([]).freedom + 3


def test_the_drift_of_few_cells_is_limited_by_the_drift_probe() -> None:
    """Repetitions of a single cell from 0.97 to 1.03 are drift up to the change of the probe, and else chance."""
    cell = by_round(0.97, 0.99, 1.01, 1.03)
    assert spread_of([cell]).drift == 0.0
    assert spread_of([cell], swing=0.01).drift == 0.005
    assert spread_of([cell], swing=0.50).drift == pytest.approx(0.0258, rel=0.01)


def test_a_cell_is_done_after_four_repetitions_at_the_earliest() -> None:
    """Fewer repetitions that agree within 0.1 % prove nothing."""
    quiet = [[1.0, 1.001, 0.999, 1.0]] * 4
    assert not narrow_enough(estimate(quiet[:3]), 3)
    assert narrow_enough(estimate(quiet), 4)
    assert not narrow_enough(estimate([[1.0], [1.0], [1.0], [1.0]]), 4), "fewer samples than an interval needs"


def graded(repetitions: list[list[float]], **options: Any) -> NoiseReport:
    return noise_report(repetitions, estimate(repetitions), **options)


def test_grades() -> None:
    rng = np.random.default_rng(2)
    quiet = [list(rng.normal(1.0, 0.003, 30)) for _ in range(3)]
    assert graded(quiet).grade == "quiet"
    assert graded(quiet).reasons == ()
    drifted = graded([quiet[0], [1.1 * value for value in quiet[1]]])
    assert drifted.grade == "noisy"
    assert any("drift of 10 %" in reason for reason in drifted.reasons)
    assert graded([list(rng.lognormal(0, 0.8, 8)) for _ in range(2)]).grade == "unusable"
    assert graded([[1.0]]).reasons == (ONE_REPETITION, "a single sample")
    assert graded(quiet[:1]).reasons == (ONE_REPETITION,)
    assert graded(quiet, foreign_cores=1.0).reasons == ("others kept 1.0 cores busy",)
    assert graded(quiet, throttled=["power cap"]).grade == "noisy"


def test_two_modes_are_found_and_a_wide_single_one_is_not() -> None:
    rng = np.random.default_rng(3)
    low, high = rng.normal(1.0, 0.01, 40), rng.normal(1.3, 0.01, 30)
    assert two_modes(np.concatenate([low, high])) == pytest.approx((1.0, 1.3), abs=0.01)
    assert two_modes(rng.normal(1.0, 0.1, 70)) is None
    assert two_modes(np.concatenate([rng.normal(1.0, 0.01, 69), [1.5]])) is None  # one outlier is not a mode


def test_outliers_by_the_modified_z_score() -> None:
    samples = np.concatenate([np.random.default_rng(4).normal(1.0, 0.01, 100), [2.0, 3.0]])
    assert outliers(samples) == 2


def test_the_lower_end_of_a_time_is_positive() -> None:
    """Two repetitions that differ by a factor of ten: the interval is wide, and its lower end above zero."""
    time_s = estimate([[1.0] * 8, [10.0] * 8])
    assert 0 < time_s.low_s <= 1.0
    assert time_s.high_s > 10.0
