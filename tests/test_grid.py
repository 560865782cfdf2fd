"""The range grammar and the order of cells."""

from __future__ import annotations

import pytest

from profiler.errors import GridError
from profiler.grid import Cell, decode_context, make_grid, parse_values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("128", (128,)),
        ("64,256,128", (64, 128, 256)),
        ("64..2048*2", (64, 128, 256, 512, 1024, 2048)),
        ("1..9+2", (1, 3, 5, 7, 9)),
        ("1..4", (1, 2, 3, 4)),
        ("1, 2 ,1..2", (1, 2)),
        ("3..10*3", (3, 9)),
    ],
)
def test_values(text: str, values: tuple[int, ...]) -> None:
    assert parse_values(text, "--batch-sizes") == values


@pytest.mark.parametrize("text", ["", "0", "a", "64..", "8..4", "1..8*1", "1..8+0", "-4", "1.5", "0..8*2", "1..999999"])
def test_no_values(text: str) -> None:
    with pytest.raises(GridError, match="--prompt-lens"):
        parse_values(text, "--prompt-lens")


def test_cells_come_in_order_of_tokens() -> None:
    grid = make_grid([64, 128], "1,2", 8)
    assert grid.cells == (Cell(1, 64), Cell(1, 128), Cell(2, 64), Cell(2, 128))
    assert grid.decode_steps == 7
    assert grid.longest_context == 136


def test_a_decode_loop_is_described_by_its_middle_step() -> None:
    # 32 new tokens: the prefill gives the first, 31 steps follow at contexts 64..94, whose middle is near 80.
    assert decode_context(64, 32) == 80


def test_too_few_new_tokens() -> None:
    with pytest.raises(GridError, match="--new-tokens"):
        make_grid([64], [1], 2)
