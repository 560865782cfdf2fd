"""The range grammar and the order of cells."""

from __future__ import annotations

import pytest

from profiler.errors import GridError, RequestError
from profiler.grid.cells import Cell, CellKey
from profiler.grid.ranges import make_grid, parse_values
from profiler.measure.kernels import keys_between


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("128", (128,)), ("64,256,128", (64, 128, 256)), ("64..2048*2", (64, 128, 256, 512, 1024, 2048)),
        ("1..9+2", (1, 3, 5, 7, 9)), ("1..4", (1, 2, 3, 4)), ("1, 2 ,1..2", (1, 2)), ("3..10*3", (3, 9)),
    ],
)  # fmt: skip
def test_values(text: str, values: tuple[int, ...]) -> None:
    assert parse_values(text, "--batch-sizes") == values


@pytest.mark.parametrize("text", ["", "0", "a", "64..", "8..4", "1..8*1", "1..8+0", "-4", "1.5", "0..8*2", "1..999999"])
def test_no_values(text: str) -> None:
    with pytest.raises(GridError, match="--prompt-lens"):
        parse_values(text, "--prompt-lens")


def test_cells_come_in_order_of_tokens() -> None:
    grid = make_grid([64, 128], "1,2", 8)
    assert grid.cells == (Cell(1, 64, 8), Cell(1, 128, 8), Cell(2, 64, 8), Cell(2, 128, 8))
    assert {cell.decode_steps for cell in grid.cells} == {7}
    assert grid.longest_context == 136
    with pytest.raises(GridError, match="--new-tokens"):
        make_grid([64], [1], 2)


def test_a_decode_loop_is_described_by_its_middle_step() -> None:
    # 32 new tokens: the prefill gives the first, 31 steps follow at contexts 64..94, whose middle is near 80.
    key = CellKey("decode", Cell(4, 64, 32))
    assert (key.context_len, key.query_tokens, key.tokens) == (80, 1, 4)
    prefill = CellKey("prefill", Cell(4, 64, 32))
    assert (prefill.context_len, prefill.query_tokens, prefill.tokens) == (0, 64, 256)


def test_a_row_names_its_cell() -> None:
    for cell in (Cell(2, 64, 32, engine="static"), Cell(2, 0, 32, context_len=512)):
        for key in cell.keys:
            assert CellKey.at(key.phase, 2, cell.prompt_len, key.context_len, 32, cell.engine) == key
    assert CellKey("decode", Cell(2, 64, 32, engine="static")).name == "decode 2 x 64 (static)"


def test_rows_go_by_phase_engine_batch_and_depth() -> None:
    grid = make_grid([16], [1, 2], 8, context_lens=[8], engines=("eager", "static"))
    names = [key.name for key in grid.keys]
    assert names[:4] == ["prefill 1 x 16", "prefill 2 x 16", "prefill 1 x 16 (static)", "prefill 2 x 16 (static)"]
    assert names[4:8] == ["decode 1 x 8", "decode 1 x 16", "decode 2 x 8", "decode 2 x 16"]
    assert len(names) == 4 + 8


def test_keys_between_cells_have_row_counts_that_no_cell_has() -> None:
    """1 and 8 rows of decode steps, 64, 512 and 4096 of prompts: each doubled until it is near the next."""
    grid = make_grid("64,512", "1,8", 8)
    between = keys_between(grid.keys)
    assert [(key.phase, key.tokens) for key in between] == [
        *(("decode", rows) for rows in (2, 4, 16, 32)),
        *(("prefill", rows) for rows in (128, 256, 1024, 2048)),
    ]
    assert not set(between) & set(grid.keys)
    # 64 rows are too near 80 to add information.
    assert [key.tokens for key in keys_between(make_grid("", "1,80", 8, "128").keys)] == [2, 4, 8, 16, 32]
    assert keys_between(make_grid("2", "1,2", 8).keys) == ()


def test_each_engine_has_its_own_steps_between() -> None:
    keys = keys_between(make_grid("8", "1,4", 8, engines=("eager", "static")).keys)
    assert [(key.cell.engine, key.phase, key.tokens) for key in keys] == [
        (engine, phase, rows) for phase, rows in (("decode", 2), ("prefill", 16)) for engine in ("eager", "static")
    ]


def test_a_prefix_is_a_part_of_every_prompt() -> None:
    """Of 512 tokens, 384 are cached: the prefill runs 128, and a table's row has the same cell."""
    grid = make_grid("512,1024", "4", 16, prefix=384)
    assert [(cell.prompt_len, cell.prefix, cell.depth, cell.slots) for cell in grid.cells] == [
        (128, 384, 512, 528),
        (640, 384, 1024, 1040),
    ]
    for key in grid.keys:
        cell = key.cell
        assert key.query_tokens == (cell.prompt_len if key.phase == "prefill" else 1)
        assert key.context_len == (384 if key.phase == "prefill" else cell.depth + 8)
        assert CellKey.at(key.phase, 4, cell.prompt_len, key.context_len, 16, cell.engine) == key
    with pytest.raises(RequestError, match="use 0 to 511"):
        make_grid("512", "4", 16, prefix=512)
