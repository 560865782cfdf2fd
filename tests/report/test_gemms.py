"""The census of matrix products: tiles and rows by arithmetic, and a real run's times under its roofs."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.facts.operators import GemmShape
from profiler.report.time_breakdown import gemms
from profiler.store.folder import read_run

REFERENCE = Path(__file__).parents[2] / "runs" / "reference" / "mistral-7b-h100"


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


def test_an_h100s_small_projections_are_far_below_the_roof() -> None:
    """Mistral-7B at batch 16: K and V projections are [4096 x 1024], 64 calls, 8.4 MB each.

    At the 2.94 TB/s of this run that is 2.85 us a call, of the 11.6 us measured; a gate of [4096 x 14336] has 92 %.
    """
    rows = gemms(read_run(REFERENCE)).blocks[0].rows
    start = next(number for number, row in enumerate(rows) if row[0] == "decode 16 x 512")
    found = {row[0]: row[1:] for row in rows[start + 1 :]}
    calls, time, _, of_roof, tiles, aligned = found["16 x 1024 x 4096"]
    assert (calls, time, of_roof, tiles, aligned) == ("64", "740 us", "25 %", "12 %", "yes")
    at_memory_roof_s = 64 * 2 * 4096 * 1024 / 2.94e12
    assert at_memory_roof_s / 740e-6 == pytest.approx(0.25, abs=0.005)
    assert found["16 x 14336 x 4096"][3] == "92 %"
