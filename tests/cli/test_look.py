"""Commands that run no model: their output and exit codes."""

from __future__ import annotations

import pytest
from known_kernels import checked

from profiler.device.contention import Neighbours
from profiler.facts.telemetry import BusyProcess, Contention
from profiler.judge.regimes import Regime

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
