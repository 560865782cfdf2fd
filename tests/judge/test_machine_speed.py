"""A machine whose speed swings: the swing that the probe measures next to each repetition is divided out."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from profiler.facts.ceilings import DriftReading
from profiler.facts.repetitions import Repetition
from profiler.facts.run_facts import Facts
from profiler.judge.judge_run import Judgement, judge_run
from profiler.judge.machine_speed import at_median_speed, mode_words, swing_words
from profiler.store.folder import read_document, read_facts, read_gathered

Pace = Callable[[float], float]


def slowed(repetition: Repetition, by: float) -> Repetition:
    return replace(
        repetition,
        prefill_s=None if repetition.prefill_s is None else by * repetition.prefill_s,
        more_prefill_s=tuple(by * value for value in repetition.more_prefill_s),
        decode_s=tuple(by * value for value in repetition.decode_s),
        loop_s=None if repetition.loop_s is None else by * repetition.loop_s,
        issue_s=None if repetition.issue_s is None else by * repetition.issue_s,
    )


def steady(_at_s: float) -> float:
    return 1.0


def swinging(at_s: float) -> float:
    """The slowest moment takes 75 % longer than the fastest, over half a minute."""
    return 1.75 ** (math.sin(2 * math.pi * at_s / 31.7) / 2)


UNSTEADY: dict[str, Pace] = {
    "swinging": swinging,
    # Another process starts and stops every nine seconds, and slows everything by 60 %.
    "next to a neighbour": lambda at_s: 1.6 if int(at_s / 9) % 2 else 1.0,
    # A clock that loses a third over a minute and stays there.
    "with a falling clock": lambda at_s: 1.0 / (1.0 - min(at_s, 60.0) / 180.0),
}


def on_machine(facts: Facts, pace: Pace, probe_pace: Pace) -> Facts:
    """Repeat each cell's first repetition every 2 s on a machine of this pace, with a probe before each repetition.

    The probe has the pace `probe_pace`, within 1 %.
    """
    rng, now_s = np.random.default_rng(0), 0.0
    repetitions: dict[object, list[Repetition]] = {cell: [] for cell in facts.repetitions}
    drift_readings = []
    for number in range(4):
        for cell, known in facts.repetitions.items():
            memory, compute = probe_pace(now_s) * rng.normal(1.0, 0.01, 2)
            drift_readings.append(DriftReading(0.02 * float(memory), 0.01 * float(compute), now_s))
            slower = pace(now_s + 0.5) * float(rng.normal(1.0, 0.005))
            repetitions[cell].append(slowed(replace(known[0], round=number, at_unix_s=now_s, wall_s=1.0), slower))
            now_s += 2.0
    drift_readings.append(DriftReading(0.02 * probe_pace(now_s), 0.01 * probe_pace(now_s), now_s))
    return replace(facts, repetitions=repetitions, drift_readings=drift_readings, remeasured_ceilings=[])


def shape(judgement: Judgement) -> dict[object, float]:
    """Return each cell's time divided by that of the first cell, which does not depend on the machine's speed."""
    first = judgement.cells[0].latency_s
    return {cell.key: cell.latency_s / first for cell in judgement.cells}


def widest(judgement: Judgement) -> float:
    return max((cell.latency_high_s - cell.latency_low_s) / 2 / cell.latency_s for cell in judgement.cells)


def test_a_shared_swing_is_divided_out(xeon_facts: Facts) -> None:
    calm, swung = (judge_run(on_machine(xeon_facts, pace, pace)) for pace in (steady, swinging))
    for key, ratio in shape(swung).items():
        assert ratio == pytest.approx(shape(calm)[key], rel=0.05), key
    assert widest(swung) < 0.06
    assert widest(judge_run(on_machine(xeon_facts, swinging, steady))) > 0.15, "a steady probe cannot correct a swing"


@pytest.mark.parametrize("pace", UNSTEADY.values(), ids=UNSTEADY)
def test_labels_do_not_change_if_the_probe_measures_the_swing(xeon_facts: Facts, pace: Pace) -> None:
    """Labels on an unsteady machine are those of a steady one, or mixed; at most one in ten is inconclusive."""
    calm, swung = judge_run(on_machine(xeon_facts, steady, steady)), judge_run(on_machine(xeon_facts, pace, pace))
    labels = {cell.key: cell.regime for cell in calm.cells}
    found = [(cell.regime, labels[cell.key]) for cell in swung.cells]
    claimed = [(label, truth) for label, truth in found if label != "inconclusive"]
    assert all(label == truth or "mixed" in (label, truth) for label, truth in claimed)
    assert len(claimed) >= 0.9 * sum(truth != "inconclusive" for _, truth in found)


def test_a_probe_that_swings_by_itself_or_once_a_round_changes_no_time(xeon_facts: Facts) -> None:
    assert at_median_speed(xeon_facts)[0] is xeon_facts
    swung = on_machine(xeon_facts, steady, swinging)
    steadied, swings = at_median_speed(swung)
    assert not swings
    assert steadied.repetitions == swung.repetitions
    assert swing_words(swung) == []


def hosted(facts: Facts, pace_of: Callable[[np.random.Generator, int], float], seed: int, scatter: float) -> Facts:
    """Give each cell two repetitions in which steps take `pace_of` times as long, and scatter by themselves."""
    rng = np.random.default_rng(seed)

    def repetition(known: Repetition, number: int) -> Repetition:
        steps = rng.normal(1.0, scatter, len(known.decode_s)) * pace_of(rng, number)
        return replace(known, round=number, decode_s=tuple(float(np.median(known.decode_s)) * steps))

    repetitions = {
        cell: [repetition(known[0], number) for number in range(2)] for cell, known in facts.repetitions.items()
    }
    return replace(facts, repetitions=repetitions, drift_readings=[])


@pytest.fixture(scope="module")
def many_cells() -> Facts:
    folder = Path("runs/reference/smollm2-135m-epyc")
    document = read_document(folder)
    return replace(read_facts(folder, document, read_gathered(folder)), others={})


def test_a_host_with_two_modes_is_named_once_with_both(many_cells: Facts) -> None:
    """Repetitions of 16 cells meet modes of 18 and 33 ms. In nine runs of ten and more a sentence has both."""
    named = 0
    for seed in range(20):
        words = mode_words(hosted(many_cells, lambda rng, _: float(rng.choice([18, 33])), seed, 0.01))
        times = [float(value) for text in words for value in re.findall(r"([\d.]+) m?s", text)]
        named += len(words) == 1 and times[1] / times[0] == pytest.approx(33 / 18, rel=0.03)
    assert named >= 18


@pytest.mark.parametrize("scatter", [0.01, 0.1])
@pytest.mark.parametrize("apart", [0.01, 0.03, 0.1])
def test_one_mode_is_not_two(many_cells: Facts, scatter: float, apart: float) -> None:
    """Repetitions that differ by chance, and steps that scatter: at most one run in fifty is named."""
    runs = [hosted(many_cells, lambda rng, _: float(rng.normal(1.0, apart)), seed, scatter) for seed in range(50)]
    assert sum(bool(mode_words(run)) for run in runs) <= 1
