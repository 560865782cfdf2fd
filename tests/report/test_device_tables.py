"""Tables of devices: roofs beside their datasheet, and known kernels with what they were called."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from made_runs import roof

from profiler.diagnosis.regimes import Evidence, Regime, Verdict
from profiler.report.console import screen
from profiler.report.device_tables import ceilings_table, selftest_table
from profiler.roofs.values import Ceilings


def printed(capsys: pytest.CaptureFixture[str], table: object) -> list[str]:
    screen().print(table)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_roof_stands_beside_its_datasheet(capsys: pytest.CaptureFixture[str]) -> None:
    ceilings = Ceilings(
        compute={"float32": roof(8e12)},
        memory={"read": roof(1.5e11)},
        stream_bytes=1 << 30,
        beyond_cache=True,
        launch={"host_s": 4e-6},
    )
    lines = printed(capsys, ceilings_table(ceilings, {"float32": 1e13, "bandwidth": 3e11}))
    assert "float32 8.00 TFLOP/s 7.20 T- 8.80 T 80 % - 8 by hand" in lines
    assert "read 150 GB/s 135 G- 165 G 50 % - 8 by hand" in lines
    assert "launch, host 4.00 us - one tiny kernel" in lines
    assert "read 150 GB/s 135 G- 165 G - - 8 by hand" in printed(capsys, ceilings_table(ceilings, {}))


@dataclass(frozen=True)
class Checked:
    name: str
    expected: Regime
    latency_s: float
    verdict: Verdict

    @property
    def right(self) -> bool:
        return self.expected == self.verdict.regime


def test_a_wrong_label_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = Verdict("memory-bound", "high", (Evidence("memory share", 0.9, ">= 0.6", "memory-bound", 1.0),), ())
    results = [Checked("copy", "memory-bound", 1e-3, verdict), Checked("product", "compute-bound", 2e-3, verdict)]
    lines = printed(capsys, selftest_table(results))
    assert "copy memory-bound memory-bound high 1.00 ms 0.90" in lines
    assert "product compute-bound memory-bound WRONG high 2.00 ms 0.90" in lines
