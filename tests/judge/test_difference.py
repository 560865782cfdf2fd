"""One notion of a difference wherever two runs are compared, and which of several GPUs of one kind is slow."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from profiler.comparison.compare import compare_sides
from profiler.comparison.side import read_side
from profiler.judge.device_health import DeviceRun, healths
from profiler.judge.difference import difference, longer_s
from profiler.report.device import health_lines
from profiler.run.judge_folder import judge_folder
from profiler.run.screens import compare_with_first
from profiler.stats import Estimate, RepetitionSpread, estimate
from profiler.store.folder import read_run

REFERENCE = Path(__file__).parents[2] / "runs/reference"


def test_errors_of_independent_times_add_in_quadrature() -> None:
    """3 % and 4 % make 5 %; 0.5 % that the machine shares make hypot(5, 0.5) %."""
    before = Estimate(1.0, math.exp(-0.03), math.exp(0.03), 9)
    after = Estimate(2.0, 2.0 * math.exp(-0.04), 2.0 * math.exp(0.04), 9)
    found = difference(before, after, 2)
    assert found.log_ratio == pytest.approx(math.log(2))
    assert (found.log_low, found.log_high) == pytest.approx((math.log(2) - 0.05, math.log(2) + 0.05))
    slower = difference(before, after, 2, machine=math.log(1.1), machine_half_width=0.005)
    assert slower.change == pytest.approx(2 / 1.1 - 1)
    assert slower.log_high - slower.log_ratio == pytest.approx(math.hypot(0.05, 0.005))


def test_precisions_and_compare_give_one_interval_for_the_same_folders(tmp_path: Path) -> None:
    """Both read the folders of one model in two dtypes, judged by today's rules."""
    runs = [tmp_path / name for name in ("float32", "bfloat16")]
    for run in runs:
        shutil.copytree(REFERENCE / f"smollm2-135m-xeon-{run.name}", run)
        judge_folder(run, finished=True)
    listed = {item.key.name: item.difference for item in compare_with_first([read_run(run) for run in runs])}
    compared = {item.name: item for item in compare_sides(*map(read_side, runs)).changes}
    assert len(listed) == len(compared) > 3
    for name, found in listed.items():
        other = compared[name].difference
        assert (found.log_ratio, found.log_low, found.log_high) == pytest.approx(
            (other.log_ratio, other.log_low, other.log_high)
        ), name


def test_a_difference_is_at_least_as_uncertain_as_its_sides() -> None:
    """100 and 90 ms, two equal repetitions each; repetitions of other cells differ by 2 % with ten degrees of freedom.

    Moderated by the cell's variance of 0 with one more degree: 2 % x sqrt(10 / 11); t(11) is 2.201.
    """
    spread = RepetitionSpread(0.02, 10.0)
    change = longer_s(*(estimate([[seconds] * 4] * 2, spread) for seconds in (0.09, 0.1)))
    assert change.median_s == pytest.approx(0.01)
    sigma = 0.02 * math.sqrt(10 / 11) * math.hypot(0.1, 0.09) / math.sqrt(2)
    assert change.high_s - change.median_s == pytest.approx(2.201 * sigma, rel=0.01)


def test_a_slow_card_is_ill_and_a_noisy_one_is_not() -> None:
    run = read_run(REFERENCE / "smollm2-135m-epyc")

    def card(name: str, slower: float, memory: float, width: float = 0.01) -> DeviceRun:
        ends = {"latency_low_s": 1 - width, "latency_s": 1.0, "latency_high_s": 1 + width}
        rows = [
            replace(row, repetitions=2, **{end: slower * by * row.latency_s for end, by in ends.items()})
            for row in run.measured
        ]
        return DeviceRun(name, "float32", rows, run.document.ceilings.ceilings.times(memory, 1.0))

    found = healths([card("cuda:0", 1.0, 1.0), card("cuda:1", 1.2, 0.8)])
    assert [item.ill for item in found] == [False, True]
    assert health_lines(found) == [
        "cuda:1 underperforms: its steps take 20 % longer; its memory ceiling is 20 % below the best."
    ]
    noisy = healths([card("cuda:0", 1.0, 1.0, 0.2), card("cuda:1", 1.1, 1.0, 0.2)])
    assert not any(item.ill for item in noisy)
    assert "No GPU is slower" in health_lines(noisy)[0]
