"""The parts of this installation that work, according to `roofscope doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from profiler.checks.doctor import examine

from .bench import Attempt, Bench, Check

_NEEDED = ("driver", "torch", "device", "memory", "graphs", "fits")
"""Parts that must work; the rest is optional, or not available on many rented cards."""


def attempts(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("doctor", _doctor, least_s=40.0, cuda=False)


def _doctor(bench: Bench) -> Iterator[Check]:
    found = examine(str(bench.device) if bench.cuda else "cpu")
    for finding in found.findings:
        judged = finding.works if bench.cuda and finding.name in _NEEDED else None
        yield Check(f"doctor: {finding.name}", judged, finding.says, why="" if judged is not None else "reported only")
    yield Check("doctor: what to run first", None, found.first, why="reported only")
