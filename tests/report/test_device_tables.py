"""Tables of devices: roofs next to their datasheet, and known kernels with their labels and exit codes."""

from __future__ import annotations

import re

import pytest
from known_kernels import checked
from made_runs import roof

from profiler.checks.selftest import selftest_section
from profiler.data.datasheets import gpus
from profiler.device.contention import Neighbours
from profiler.facts.roofs import Ceilings
from profiler.facts.telemetry import BusyProcess, Contention
from profiler.judge.regimes import Regime
from profiler.report.blocks import TextTable
from profiler.report.device import gpus_table
from profiler.report.hardware import ceilings_table
from profiler.report.terminal import print_sections, rich_table, screen


def printed(capsys: pytest.CaptureFixture[str], table: TextTable) -> list[str]:
    screen().print(rich_table(table))
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_roof_is_next_to_its_datasheet(capsys: pytest.CaptureFixture[str]) -> None:
    ceilings = Ceilings(
        compute={"float32": roof(8e12)},
        memory={"read": roof(1.5e11)},
        stream_bytes=1 << 30,
        beyond_cache=True,
        launch={"host_s": 4e-6},
    )
    lines = printed(capsys, ceilings_table(ceilings, {"float32": 1e13, "bandwidth": 3e11}))
    assert "float32 8.00 TFLOP/s 7.20 T to 8.80 T 80 % - 8 by hand" in lines
    assert "read 150 GB/s 135 G to 165 G 50 % - 8 by hand" in lines
    assert "launch, host 4.00 us - one tiny kernel" in lines
    assert "read 150 GB/s 135 G to 165 G - - 8 by hand" in printed(capsys, ceilings_table(ceilings, {}))


def test_every_card_is_one_line_of_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, gpus_table(gpus()))
    assert "T4 16 320 0.254 8.10 - 65.0 - - 130 203 70" in lines
    # A shown figure is marked if sources differ on it. Sources differ on the L2 of an RTX A5000, which is not shown.
    for gpu in gpus():
        # The memory follows the name, because RTX 4070 is also the start of another name.
        [line] = [line for line in lines if re.match(rf"{re.escape(gpu.gpu)}( [?])?( [0-9.-]+){{11}}$", line)]
        if gpu.gpu in ("L40", "RTX A5000"):
            assert ("?" in line) == (gpu.gpu == "L40")


def test_a_wrong_label_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        checked("copy", "memory-bound", "memory-bound"),
        checked("product", "compute-bound", "memory-bound"),
        checked("sum", "memory-bound", "inconclusive"),
    ]
    print_sections([selftest_section(results)], screen())
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("copy memory-bound right high 7 of 8 1.00 ms weights 90 %") for line in lines)
    assert any(line.startswith("product compute-bound memory-bound WRONG 0 of 8") for line in lines)
    assert any(line.startswith("sum memory-bound inconclusive") for line in lines)
    doubt = "inconclusive: sum: the rounds gave inconclusive (7), mixed (1); during them memory reached 9.00 GB/s to"
    assert f"{doubt} 11.0 GB/s and matmuls 1.00 TFLOP/s to 1.20 TFLOP/s" in " ".join(lines)


QUIET, BUSY = Contention(0.0, 1), Contention(0.9, 1, (BusyProcess("backup", 7, 0.9),))


def known(monkeypatch: pytest.MonkeyPatch, labels: list[Regime], contention: Contention) -> None:
    """Make selftest find these labels of a compute-bound and a memory-bound kernel, under this foreign load."""
    expected: list[Regime] = ["compute-bound", "memory-bound"]
    results = [checked("a kernel", *pair) for pair in zip(expected, labels, strict=True)]
    monkeypatch.setattr("profiler.roofs.measure.measure", lambda *_, **__: None)
    monkeypatch.setattr("profiler.checks.selftest.run_selftest", lambda *_: results)
    monkeypatch.setattr(Neighbours, "look", lambda _: contention)


@pytest.mark.parametrize(("labels", "code"), [
    (["compute-bound", "memory-bound"], 0),
    (["compute-bound", "inconclusive"], 3),
    (["inconclusive", "compute-bound"], 1),
])  # fmt: skip
def test_exit_codes_of_wrong_and_missing_labels(
    roofscope, monkeypatch: pytest.MonkeyPatch, labels: list[Regime], code: int
) -> None:  # type: ignore[no-untyped-def]
    known(monkeypatch, labels, QUIET)
    done = roofscope("selftest")
    assert done.code == code
    assert ("WRONG" in done.out) == (code == 1)
    assert ("inconclusive: a kernel: the rounds gave" in done.out) == ("inconclusive" in labels)


def test_a_busy_machine_is_named_instead_of_kernels_without_a_label(roofscope, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    known(monkeypatch, ["compute-bound", "inconclusive"], BUSY)
    done = roofscope("selftest")
    assert done.code == 3
    assert done.out.startswith("The machine is busy: backup (pid 7) kept 0.9 of 1 core busy, and 1 of 2 known kernels")
    assert "rounds" not in done.out
    known(monkeypatch, ["inconclusive", "compute-bound"], BUSY)
    assert "WRONG" in roofscope("selftest").out, "a wrong label is shown on any machine"
