"""Tables of devices: roofs next to their datasheet, known kernels with their labels, a link with what was planted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from docs.schemas import assert_follows
from made_runs import roof

from profiler.checks.selftest import SelftestRow, selftest_section
from profiler.data.datasheets import gpus
from profiler.data.links import Link, MessageTime, fit_link
from profiler.device.contention import Neighbours
from profiler.facts.dispatch import Dispatch
from profiler.facts.roofs import Ceilings
from profiler.facts.telemetry import BusyProcess, Contention
from profiler.json_document import json_text
from profiler.judge.breakdown import Demand, StepRoofs, break_down
from profiler.judge.regimes import Evidence, Regime
from profiler.report.blocks import TextTable
from profiler.report.device import gpus_table, link_document, link_lines, link_table
from profiler.report.hardware import ceilings_table
from profiler.report.terminal import print_sections, rich_table, screen


def printed(capsys: pytest.CaptureFixture[str], table: TextTable) -> list[str]:
    screen().print(rich_table(table))
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_roof_is_next_to_its_datasheet(capsys: pytest.CaptureFixture[str]) -> None:
    ceilings = Ceilings({"float32": roof(8e12)}, {"read": roof(1.5e11)}, 1 << 30, True, launch={"host_s": 4e-6})
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


ALPHA_S, BUS_BYTES_PER_S, RANKS = 20e-6, 200e9, 4
WAIT_S = 240


def planted() -> Link:
    """Return the fit to all-reduces of 4 ranks, which send 2 x 3/4 of their bytes."""
    sizes = [1 << power for power in range(10, 27)]
    points = [MessageTime(RANKS, size, ALPHA_S + 1.5 * size / BUS_BYTES_PER_S) for size in sizes]
    return fit_link("planted", points, "arithmetic")


def test_the_document_has_the_rates_of_nccl_tests() -> None:
    document = link_document(planted())
    assert_follows("ceilings-link", json.loads(json_text(document)))
    assert document.ranks == RANKS
    assert document.alpha_s == pytest.approx(ALPHA_S)
    largest = document.points[-1]
    assert largest.bus_bytes_per_s == pytest.approx(1.5 * largest.alg_bytes_per_s)
    assert largest.fitted_s == pytest.approx(largest.seconds)
    assert len(link_table(document).rows) == 17
    text = " ".join(link_lines(document))
    assert "20.0 us" in text
    assert "below 2.54 MiB wait mostly for latency" in text
    assert text.endswith("--tp 4 --link 20.0,200")


@pytest.mark.slow
def test_two_ranks_on_this_machine() -> None:
    """gloo between two processes: a larger message takes longer."""
    options = ["--device", "cpu", "--link", "2", "--format", "json"]
    command = [sys.executable, "-m", "profiler", "ceilings", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=environment, check=True)
    document = json.loads(done.stdout)
    assert document["name"] == "gloo, 2 ranks"
    assert [point["nbytes"] for point in document["points"]] == [1024 << power for power in range(17)]
    assert document["points"][-1]["seconds"] > document["points"][0]["seconds"] > 0


def checked(name: str, expected: Regime, regime: Regime) -> SelftestRow:
    """The result for a 1 ms kernel, 90 % of it bytes at 10 GB/s: its regime is `expected`, its verdict `regime`."""
    demand = Demand(name, "other", 1.0, 9e6, 0.0, 1e12)
    split = break_down(1e-3, [demand], 0.0, StepRoofs(1e10, Dispatch(2e-5, 0.0), overlaps=False))
    return SelftestRow(
        name=name, expected=expected, expected_cause="", regime=regime, cause="", confidence="high",
        right=regime == expected, wrong=regime not in (expected, "inconclusive"), rounds={regime: 7, "mixed": 1},
        latency_s=1e-3, split=split, memory_bytes_per_s=(9e9, 1.1e10), compute_flops_per_s=(1e12, 1.2e12),
        signals=(Evidence("memory share", 0.9, ">= 0.6", "memory-bound", 1.0),),
    )  # fmt: skip
