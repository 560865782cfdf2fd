"""The commands that look without running a model: what they print and the code they end with."""

from __future__ import annotations

import pytest
from known_kernels import checked

from profiler.judge.regimes import Regime


@pytest.mark.parametrize(("labels", "code"), [
    (["compute-bound", "memory-bound"], 0),
    (["compute-bound", "inconclusive"], 3),
    (["inconclusive", "compute-bound"], 1),
])  # fmt: skip
def test_a_wrong_label_and_none_have_codes_of_their_own(
    roofscope, monkeypatch: pytest.MonkeyPatch, labels: list[Regime], code: int
) -> None:  # type: ignore[no-untyped-def]
    expected: list[Regime] = ["compute-bound", "memory-bound"]
    results = [checked("a kernel", *pair) for pair in zip(expected, labels, strict=True)]
    monkeypatch.setattr("profiler.roofs.measure.measure", lambda *_, **__: None)
    monkeypatch.setattr("profiler.checks.selftest.run_selftest", lambda *_: results)
    done = roofscope("selftest")
    assert done.code == code
    assert ("WRONG" in done.out) == (code == 1)
    assert ("inconclusive: a kernel: rounds say" in done.out) == ("inconclusive" in labels)


def test_no_line_of_the_glossary_is_wider_than_the_screen(roofscope) -> None:  # type: ignore[no-untyped-def]
    words = " ".join(roofscope("explain").out.split()).split(", ")
    assert {"MFU", "memory-bound", "generate tax"} <= set(words)
    for asked in ((), *((word,) for word in words)):
        assert max(map(len, roofscope("explain", *asked).out.splitlines())) <= 100, asked
