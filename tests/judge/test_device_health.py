"""Which of several GPUs of one kind is slow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from profiler.judge.device_health import DeviceRun, healths
from profiler.report.device import health_lines
from profiler.store.folder import read_run

EPYC = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-epyc"


def test_a_slow_card_is_ill_and_a_noisy_one_is_not() -> None:
    run = read_run(EPYC)

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
