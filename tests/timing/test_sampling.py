"""Medians, intervals and grades, against what statistics says they must be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from profiler.timing.sampling import deviations, difference, estimate, noise_report, outliers, two_modes, visit_sigma


def test_median_of_all_samples() -> None:
    assert estimate([[1.0, 3.0], [2.0]]).median_s == 2.0
    assert estimate([[1.0, 3.0], [2.0]]).samples == 3


def test_one_sample_has_no_known_width() -> None:
    assert math.isinf(estimate([[1.0]]).half_width)


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        estimate([])


def test_interval_covers_the_true_median_about_95_times_in_100() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        visits = [list(rng.normal(1.0, 0.05, 8)) for _ in range(12)]
        found = estimate(visits)
        hits += found.low_s <= 1.0 <= found.high_s
    assert 0.88 <= hits / 200 <= 0.99


def test_steps_of_one_loop_are_not_counted_as_independent() -> None:
    """A shift between loops must widen the interval, however many steps each loop has."""
    shifted = [[1.0 + 0.1 * (loop % 2)] * 8 for loop in range(6)]
    assert estimate(shifted).half_width > 0.02


def test_few_visits_are_covered_by_what_all_cells_say() -> None:
    """Visits differ by 1.5 %, steps by 0.5 %, each cell has two or three: the true time lies within, 95 times of 100.

    From its own visits alone a cell would claim intervals that miss it every third time.
    """
    rng = np.random.default_rng(5)
    hits, own_hits, cells = 0, 0, 0
    for _ in range(40):
        run = [
            [list(level * rng.normal(1.0, 0.005, 15)) for level in rng.normal(1.0, 0.015, visits)]
            for visits in (2, 3, 2, 3, 2, 3, 2, 3)
        ]
        sigma = visit_sigma(deviations(visits) for visits in run)
        for visits in run:
            found, own = estimate(visits, sigma), estimate(visits)
            hits += found.low_s <= 1.0 <= found.high_s
            own_hits += own.low_s <= 1.0 <= own.high_s
            cells += 1
    assert 0.9 <= hits / cells <= 0.99
    assert own_hits / cells < 0.8


def test_the_spread_of_visits_is_one_standard_deviation_and_ignores_a_few_disturbed_cells() -> None:
    rng = np.random.default_rng(6)
    run = [deviations([[value] for value in rng.normal(1.0, 0.02, 4)]) for _ in range(300)]
    assert visit_sigma(run) == pytest.approx(0.02, rel=0.06)
    disturbed = [deviations([[value] for value in rng.normal(1.0, 0.5, 4)]) for _ in range(15)]
    assert visit_sigma([*run, *disturbed]) == pytest.approx(0.02, rel=0.12)


def test_two_visits_do_not_decide_how_far_all_lie_apart() -> None:
    """Nothing visited twice: 1 %, what visits usually differ by. A pair 6 % apart: not much more, and never 6."""
    nothing = visit_sigma([deviations([[1.0, 1.1]])])
    assert nothing == pytest.approx(0.01, rel=0.1)
    disturbed, calm = deviations([[0.959], [1.021]]), deviations([[1.000], [1.002]])
    assert nothing < visit_sigma([disturbed, calm]) < 0.02
    assert visit_sigma([calm] * 20) < 0.3 * nothing


def test_a_difference_is_no_surer_than_its_sides() -> None:
    """100 against 90 ms, two visits each, 2 % from visit to visit: 10 +- 2 x sqrt(1.41^2 + 1.27^2) ms."""
    found = difference([[0.1] * 4] * 2, [[0.09] * 4] * 2, 0.02)
    assert found.median_s == pytest.approx(0.01)
    assert found.high_s - found.median_s == pytest.approx(2 * 0.02 * math.hypot(0.1, 0.09) / math.sqrt(2))


def test_grades() -> None:
    rng = np.random.default_rng(2)
    quiet = [list(rng.normal(1.0, 0.003, 30)) for _ in range(3)]
    assert noise_report(quiet).grade == "quiet"
    assert noise_report(quiet).reasons == ()
    drifted = noise_report([quiet[0], [1.1 * value for value in quiet[1]]])
    assert drifted.grade == "noisy"
    assert any("drift of 10 %" in reason for reason in drifted.reasons)
    assert noise_report([list(rng.lognormal(0, 0.8, 8)) for _ in range(2)]).grade == "unusable"
    assert noise_report([[1.0]]).reasons == ("a single sample",)
    assert noise_report(quiet, foreign_cores=1.0).reasons == ("others kept 1.0 cores busy",)
    assert noise_report(quiet, throttled=["power cap"]).grade == "noisy"


def test_two_modes_are_named_and_a_wide_single_one_is_not() -> None:
    rng = np.random.default_rng(3)
    low, high = rng.normal(1.0, 0.01, 40), rng.normal(1.3, 0.01, 30)
    modes = two_modes(np.concatenate([low, high]))
    assert modes is not None
    assert modes[0] == pytest.approx(1.0, abs=0.01)
    assert modes[1] == pytest.approx(1.3, abs=0.01)
    assert two_modes(rng.normal(1.0, 0.1, 70)) is None
    assert two_modes(np.concatenate([rng.normal(1.0, 0.01, 69), [1.5]])) is None  # one outlier is no mode


def test_outliers_by_the_modified_z_score() -> None:
    samples = np.concatenate([np.random.default_rng(4).normal(1.0, 0.01, 100), [2.0, 3.0]])
    assert outliers(samples) == 2


def test_the_difference_of_two_engines_covers_the_truth() -> None:
    """A true difference of 0.1 s lies in about 95 of 100 intervals; two equal engines differ by nothing as often."""
    rng = np.random.default_rng(5)
    covered = level = 0
    for _ in range(100):
        slow, fast, same = ([list(rng.normal(mean, 0.02, 24)) for _ in range(3)] for mean in (1.1, 1.0, 1.0))
        apart, equal = difference(slow, fast), difference(same, fast)
        covered += apart.low_s <= 0.1 <= apart.high_s
        level += equal.low_s <= 0 <= equal.high_s
    assert covered >= 85
    assert level >= 85
