"""Unequal prompts by arithmetic: random and given lengths, their batches, padding and waiting."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.errors import GridError
from profiler.grid.cells import CellKey
from profiler.grid.ragged import Request, parse_ragged, waiting
from profiler.grid.ranges import make_grid


def prompts(*lens: int) -> tuple[Request, ...]:
    return tuple(Request(length, 8) for length in lens)


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
    assert waiting(prompts(8, 16)) == 0


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
