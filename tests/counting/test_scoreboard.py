"""No type of the scoreboards gets worse: FLOPs are those of torch's counter, and the cache is that of a real one."""

from collections.abc import Callable
from pathlib import Path

import cached
import pytest
import scoreboard
import torch
from shrink import configs

from profiler.counting.walk import walk
from profiler.facts.operators import Cause
from profiler.facts.step import Step
from profiler.loading.meta_model import build_on_meta

BOARDS = pytest.mark.parametrize(
    ("table", "types", "score", "least"),
    [
        (scoreboard.TABLE, scoreboard.types(), scoreboard.score, 160),
        (cached.TABLE, scoreboard.types(), cached.score, 170),
        (cached.PICTURES, cached.picture_types(), cached.score, 69),
        (cached.BUILT, cached.picture_types(), cached.built, 85),
    ],
    ids=["torch's counter", "causal caches", "image-text caches", "image-text types"],
)


@pytest.mark.slow
@BOARDS
def test_no_type_gets_worse(table: Path, types: list[str], score: Callable[[str], tuple[str, str]], least: int) -> None:
    before = scoreboard.read_table(table)
    worse = {}
    for name in types:
        result, detail = score(name)
        if scoreboard.RANK[result] > scoreboard.RANK[before[name][0]]:
            worse[name] = f"{before[name][0]} -> {result}: {detail}"
    assert worse == {}


@BOARDS
def test_every_difference_has_a_name(
    table: Path, types: list[str], score: Callable[[str], tuple[str, str]], least: int
) -> None:
    results = scoreboard.read_table(table)
    assert set(types) <= set(results), "a new type: run tests/counting/scoreboard.py and cached.py"
    assert sum(scoreboard.RANK[result] == 0 for result, _ in results.values()) >= least
    for name, (result, detail) in results.items():
        assert scoreboard.RANK[result] == 0 or detail, name


CACHED = (cached.score, cached.TABLE)
COUNTED = (scoreboard.score, scoreboard.TABLE)
BUILT = (cached.built, cached.BUILT)


@pytest.mark.parametrize(
    ("board", "model_type"),
    [
        (CACHED, "mistral"),  # a window
        (CACHED, "mimo_v2_flash"),  # values narrower than keys
        (CACHED, "qwen3_5_text"),  # a delta rule
        (CACHED, "jamba"),  # Mamba-1
        (CACHED, "longcat_flash"),  # experts that do nothing
        # Layers of which only the last position runs, and experts by their own `top_k`.
        pytest.param(COUNTED, "gemma4_text", marks=pytest.mark.ci),
        (COUNTED, "hunyuan_v1_moe"),  # a number of experts for each layer
        (COUNTED, "dots1"),
        (COUNTED, "nemotron_h"),
        # A step of text runs only the decoder.
        (BUILT, "qwen3_vl"),
        (BUILT, "paddleocr_vl"),
        (BUILT, "blip-2"),
        pytest.param(BUILT, "gemma3n", marks=pytest.mark.slow),  # its tower needs another package
    ],
)
def test_a_type_is_as_in_its_table(board: tuple[Callable[[str], tuple[str, str]], Path], model_type: str) -> None:
    score, table = board
    assert score(model_type) == scoreboard.read_table(table)[model_type]


@pytest.mark.parametrize(("model_type", "unread"), [("zamba", 0), ("zamba2", 0), ("hrm_text", 128 * 64 * 2)])
def test_a_block_that_runs_again_has_its_bytes_once(model_type: str, unread: int) -> None:
    """Zamba's head is its table; HRM looks rows up in a table of 128 x 64 besides."""
    model = build_on_meta(configs(model_type)[0], torch.bfloat16)
    done = walk(model).work(Step(1, 1, 10))
    assert done.weight_bytes == sum(each.nbytes for each in model.parameters()) - unread
    assert done.redundant_bytes[Cause.REREAD_WEIGHTS] > 0
