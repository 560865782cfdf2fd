"""Lines of a roofline: slopes and plateaus are the run's own roofs, each drawn only where it applies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_runs import key, old_run, result, roof, with_document

from profiler.facts.roofs import CurvePoint, WeightReadRoof
from profiler.report.roofline_data import RoofLine, roof_lines
from profiler.store.folder import Run


@pytest.fixture
def run() -> Run:
    """Return a run with a link, a datasheet and a 4 MiB cache.

    It has 100 GB/s, 1 TFLOP/s in the model's dtype and 2 TFLOP/s in float32.
    """
    run = old_run()
    cell = result(key("decode"), latency_s=2e-3, model_flops=10**8, model_bytes=10**8, intensity=1.0, flops_per_s=5e10)
    ceilings = replace(
        run.document.ceilings,
        compute={"bfloat16": roof(1e12), "float32": roof(2e12)},
        memory={"read": roof(1e11)},
        memory_bytes_per_s=1e11,
        curve=(CurvePoint(4 << 20, 4e11), CurvePoint(16 << 20, 1.24e11), CurvePoint(256 << 20, 1e11)),
        links={"host": roof(1e10)},
        dispatch_s={"eager": {"decode": {1: 1e-3}}},
    )
    device = replace(run.document.device, datasheet_flops_per_s=1.2e12, datasheet_bytes_per_s=1.5e11)
    model = replace(run.model, dtype="bfloat16")
    return replace(with_document(run, ceilings=ceilings, device=device, model=model), results=(cell,))


def only(run: Run, kind: str) -> RoofLine:
    [line] = [line for line in roof_lines(run) if line.kind == kind]
    return line


def test_slopes_and_plateaus_are_those_of_the_run(run: Run) -> None:
    measured = only(run, "measured")
    assert (measured.bytes_per_s, measured.flops_per_s) == (1e11, 1e12)
    assert measured.at(1.0) == 1e11
    assert measured.at(1000.0) == 1e12
    assert measured.ridge == pytest.approx(10.0)
    assert measured.label == "measured: 100 GB/s, 1.00 TFLOP/s bfloat16"
    assert measured.corners(0.1, 100.0) == [(0.1, 1e10), (10.0, 1e12), (100.0, 1e12)]
    sheet = only(run, "datasheet")
    assert (sheet.bytes_per_s, sheet.flops_per_s) == (1.5e11, 1.2e12)


def test_another_dtype_is_only_a_plateau(run: Run) -> None:
    other = only(run, "other")
    assert other.corners(0.1, 1000.0) == [(20.0, 2e12), (1000.0, 2e12)]
    assert other.label == "measured: 2.00 TFLOP/s float32"


def test_a_witness_is_drawn_if_it_disagrees(run: Run) -> None:
    def drawn(bytes_per_s: float) -> list[str]:
        witness = WeightReadRoof(256 << 20, roof(bytes_per_s))
        seen = with_document(run, ceilings=replace(run.document.ceilings, weights=witness))
        return [line.label for line in roof_lines(seen) if "weights" in line.label]

    assert drawn(0.97e11) == []
    assert drawn(0.6e11) == ["the model's own weights: 60.0 GB/s"]


def test_a_cache_and_a_link_are_only_slopes(run: Run) -> None:
    """A size read at 1.24 times memory speed is not a cache (limit 1.25); the link meets the roof at 100 FLOP/byte."""
    cache, link = only(run, "cache"), only(run, "link")
    assert cache.label == "a cache, at 4 MiB: 400 GB/s"
    assert cache.corners(0.1, 1000.0) == [(0.1, pytest.approx(4e10)), (2.5, pytest.approx(1e12))]
    assert link.corners(0.1, 1000.0)[-1] == (pytest.approx(100.0), pytest.approx(1e12))
    assert cache.corners(5.0, 1000.0) == []
