"""The range grammar, the order of cells, and prompts of unequal lengths."""

import itertools
from pathlib import Path

import pytest

from profiler.errors import GridError, RequestError
from profiler.grid.cells import Cell, CellKey
from profiler.grid.ragged import Request, parse_ragged, waiting
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


def test_a_row_names_its_cell() -> None:
    for cell in (Cell(2, 64, 32, engine="static"), Cell(2, 0, 32, context_len=512), Cell(2, 64, 32, context_len=384)):
        for key in cell.keys:
            assert CellKey.at(key.phase, 2, cell.prompt_len, key.context_len, 32, cell.engine) == key
    assert CellKey("decode", Cell(2, 64, 32, engine="static")).name == "decode 2 x 64 (static)"


@pytest.mark.parametrize("batches", ["1,8", "1,80", "2,3,64", "1,2"])
def test_keys_between_cells_have_row_counts_that_no_cell_has(batches: str) -> None:
    """For each engine: between the cells' own row counts, at most a factor of two apart, and nothing twice."""
    grid = make_grid("64,512", batches, 8, engines=("eager", "static"))
    between = keys_between(grid.keys)
    assert len(set(between)) == len(between)
    for engine in grid.engines:
        own, added = (
            sorted({key.tokens for key in keys if key.cell.engine == engine}) for keys in (grid.keys, between)
        )
        assert not set(own) & set(added)
        assert own[0] < min(added)
        assert max(added) < own[-1]
        every = sorted([*own, *added])
        assert all(after < 3 * before for before, after in itertools.pairwise(every))


def test_a_prefix_is_a_part_of_every_prompt() -> None:
    """Of 512 tokens, 384 are cached: the prefill runs 128."""
    grid = make_grid("512,1024", "4", 16, prefix=384)
    assert [(cell.prompt_len, cell.prefix, cell.depth, cell.slots) for cell in grid.cells] == [
        (128, 384, 512, 528),
        (640, 384, 1024, 1040),
    ]
    prefill, decode = grid.cells[0].keys
    assert (prefill.query_tokens, prefill.context_len, decode.context_len) == (128, 384, 520)
    with pytest.raises(RequestError, match="use 0 to 511"):
        make_grid("512", "4", 16, prefix=512)


def test_lengths_are_drawn_evenly_and_the_same_each_time() -> None:
    """The mean of n uniform draws from [a, b] is (a + b) / 2 +- (b - a) / sqrt(12 n), and both ends are drawn."""
    drawn = parse_ragged("ragged:32..512", 1000, 8)
    lens = [request.prompt_len for request in drawn.requests]
    assert len(lens) == 4000
    assert sum(lens) / len(lens) == pytest.approx(272, abs=3 * 480 / (12 * 4000) ** 0.5)
    assert (min(lens), max(lens)) == (32, 512)
    assert drawn == parse_ragged("ragged:32..512", 1000, 8)


def test_sequences_that_end_early_wait_for_the_last() -> None:
    """The prompt gives the first token, so the second sequence needs only 8 of the 16 steps."""
    batch = (Request(8, 17), Request(8, 9), Request(8, 17))
    assert waiting(batch) == pytest.approx(8 / 48)
    assert waiting((Request(8, 8), Request(16, 8))) == 0


def test_a_grid_has_one_batch_of_each_size(tmp_path: Path) -> None:
    """The batch with the median padding, of (10, 20), (30, 30) and (5, 50), represents the others."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("# prompt, new\n10, 6\n20, 12\n30\n30\n5,4\n50,9\n")
    grid = make_grid(f"ragged:{lengths}", "2", 8)
    assert grid.engines == ("padded", "eager")
    assert [(cell.prompt_len, cell.new_tokens, cell.engine) for cell in grid.cells] == [
        (20, 12, "padded"), (20, 12, "eager"),
    ]  # fmt: skip
    padded, plain = grid.cells
    assert grid.requests_of(padded) == (Request(10, 6), Request(20, 12))
    assert grid.requests_of(plain) is None
    assert grid.useful_tokens(CellKey("prefill", padded)) == 30
    assert grid.useful_tokens(CellKey("prefill", plain)) == 40
    assert grid.useful_tokens(CellKey("decode", padded)) == pytest.approx(2 * (5 + 11) / 22)
    assert grid.longest_context == 32
    assert grid.ragged is not None
    assert grid.ragged.name == "lengths.txt"


def test_invalid_lengths_are_refused_in_one_line(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("8\n9\n10\n")
    with pytest.raises(GridError, match="has 3 prompts, too few for a batch of 4"):
        make_grid(f"ragged:{lengths}", "4", 8)
    lengths.write_text("8\nlong\n")
    with pytest.raises(GridError, match=r"line 2 of lengths\.txt is not a length"):
        make_grid(f"ragged:{lengths}", "1", 8)
    with pytest.raises(GridError, match="--engine eager"):
        make_grid("ragged:4..8", "1", 8, engines=["static"])
