"""Lines and points of a roofline: the run's own ceilings where they apply, its operators and its matmuls."""

from dataclasses import replace

import pytest
from made_runs import REFERENCE, ceiling, key, old_run, result, with_document

from profiler.errors import RequestError
from profiler.facts.ceilings import CurvePoint, WeightReadCeiling
from profiler.facts.operators import GemmShape
from profiler.report.html import html_report
from profiler.report.plots import draw
from profiler.report.roofline_data import CeilingLine, ceiling_lines, group_points
from profiler.store.folder import Run, read_run

XEON = REFERENCE / "smollm2-135m-xeon-float32"


@pytest.fixture
def run() -> Run:
    """Return a run with a link, a datasheet and a 4 MiB cache.

    It has 100 GB/s, 1 TFLOP/s in the model's dtype and 2 TFLOP/s in float32.
    """
    run = old_run()
    cell = result(key("decode"), latency_s=2e-3, model_flops=10**8, model_bytes=10**8, intensity=1.0, flops_per_s=5e10)
    ceilings = replace(
        run.document.ceilings,
        compute={"bfloat16": ceiling(1e12), "float32": ceiling(2e12)},
        memory={"read": ceiling(1e11)},
        memory_bytes_per_s=1e11,
        curve=(CurvePoint(4 << 20, 4e11), CurvePoint(16 << 20, 1.24e11), CurvePoint(256 << 20, 1e11)),
        links={"host": ceiling(1e10)},
        overhead_s={"eager": {"decode": {1: 1e-3}}},
    )
    device = replace(run.document.device, datasheet_flops_per_s=1.2e12, datasheet_bytes_per_s=1.5e11)
    model = replace(run.model, dtype="bfloat16")
    return replace(with_document(run, ceilings=ceilings, device=device, model=model), results=(cell,))


def only(run: Run, kind: str) -> CeilingLine:
    [line] = [line for line in ceiling_lines(run) if line.kind == kind]
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
    other = only(run, "other")  # another dtype is only a plateau
    assert other.corners(0.1, 1000.0) == [(20.0, 2e12), (1000.0, 2e12)]
    assert other.label == "measured: 2.00 TFLOP/s float32"


def test_the_read_of_weights_is_drawn_if_it_disagrees(run: Run) -> None:
    def drawn(bytes_per_s: float) -> list[str]:
        weight_read = WeightReadCeiling(256 << 20, ceiling(bytes_per_s))
        seen = with_document(run, ceilings=replace(run.document.ceilings, weights=weight_read))
        return [line.label for line in ceiling_lines(seen) if "weights" in line.label]

    assert drawn(0.97e11) == []
    assert drawn(0.6e11) == ["the model's own weights: 60.0 GB/s"]


def test_a_cache_and_a_link_are_only_slopes(run: Run) -> None:
    """A size read at 1.24 times memory speed is no cache (limit 1.25); the link meets the ceiling at 100 FLOP/byte."""
    cache, link = only(run, "cache"), only(run, "link")
    assert cache.label == "a cache, at 4 MiB: 400 GB/s"
    assert cache.corners(0.1, 1000.0) == [(0.1, pytest.approx(4e10)), (2.5, pytest.approx(1e12))]
    assert link.corners(0.1, 1000.0)[-1] == (pytest.approx(100.0), pytest.approx(1e12))
    assert cache.corners(5.0, 1000.0) == []


def test_groups_add_up_to_the_step() -> None:
    """SmolLM2-135M in float32: all weights except norms are in matmuls, and a decode step reads each once."""
    run = read_run(XEON)
    points = group_points(run)
    assert {cell.phase for cell in points} == {"prefill", "decode"}
    for cell, groups in points.items():
        assert {group.group for group in groups} == {"attention", "attention_proj", "mlp", "lm_head"}
        assert sum(group.flops for group in groups) == pytest.approx(cell.model_flops)
        assert 0.3 < sum(group.seconds for group in groups) / cell.latency_s < 1.0
        if cell.phase == "decode" and cell.batch_size == 1:
            [mlp] = [group for group in groups if group.group == "mlp"]
            assert mlp.nbytes == 4 * 30 * 3 * 576 * 1536
            assert mlp.intensity == pytest.approx(0.5), "2 FLOPs for each weight of 4 bytes"


@pytest.mark.slow
def test_the_page_draws_them_and_a_run_without_replays_has_no_such_section() -> None:
    assert "Operator groups under the measured ceiling" in html_report(read_run(XEON))
    run = read_run(REFERENCE / "mistral-7b-h200-compile")
    assert "Operator groups under the measured ceiling" not in html_report(run)
    with pytest.raises(RequestError, match="no replayed kernels"):
        draw([run], "operators")


@pytest.mark.parametrize(
    ("n", "aligned", "used"),
    [(50257, False, 50257 / (393 * 128)), (50304, True, 1.0), (129, False, 129 / 256), (160, True, 160 / 256)],
)
def test_gpt_2s_vocabulary_of_50257_wants_47_more(n: int, aligned: bool, used: float) -> None:
    """50,257 is odd, so no row of it is a multiple of 16 bytes; 50,304 is 393 tiles of 128 columns."""
    shape = GemmShape(2048, n, 768, "bfloat16", 1)
    assert (shape.aligned, shape.tiles_used) == (aligned, pytest.approx(used))
    assert GemmShape.parse(str(shape), "bfloat16") == shape


@pytest.mark.parametrize(("dtype", "least"), [("float32", 4), ("float16", 8), ("int8", 16), ("float8_e4m3fn", 16)])
def test_16_bytes_are_more_elements_of_a_narrower_dtype(dtype: str, least: int) -> None:
    found = [n for n in range(1, 17) if GemmShape(1, n, 4096, dtype, 1).aligned]
    assert found[0] == least
