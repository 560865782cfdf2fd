"""No type of the scoreboards gets worse: FLOPs are those of torch's counter, and the cache is that of a real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    ],
    ids=["torch's counter", "causal caches", "image-text caches"],
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
    assert sum(result == "equal" for result, _ in results.values()) >= least
    for name, (result, detail) in results.items():
        assert result == "equal" or detail, name


@pytest.mark.parametrize(
    ("board", "model_type"),
    [
        (cached, "mistral"),  # a window
        (cached, "mimo_v2_flash"),  # values narrower than keys
        (cached, "qwen3_5_text"),  # a delta rule
        (cached, "jamba"),  # Mamba-1
        (cached, "longcat_flash"),  # experts that do nothing
        # Layers of which only the last position runs, and experts by their own `top_k`.
        pytest.param(scoreboard, "gemma4_text", marks=pytest.mark.ci),
        (scoreboard, "hunyuan_v1_moe"),  # a number of experts for each layer
        (scoreboard, "dots1"),
        (scoreboard, "nemotron_h"),
    ],
)
def test_a_type_is_as_in_its_table(board: Any, model_type: str) -> None:
    assert board.score(model_type) == scoreboard.read_table(board.TABLE)[model_type]


@pytest.mark.parametrize(("model_type", "unread"), [("zamba", 0), ("zamba2", 0), ("hrm_text", 128 * 64 * 2)])
def test_a_block_that_runs_again_has_its_bytes_once(model_type: str, unread: int) -> None:
    """Zamba's head is its table; HRM looks rows up in a table of 128 x 64 besides."""
    model = build_on_meta(configs(model_type)[0], torch.bfloat16)
    done = walk(model).work(Step(1, 1, 10))
    assert done.weight_bytes == sum(each.nbytes for each in model.parameters()) - unread
    assert done.redundant_bytes[Cause.REREAD_WEIGHTS] > 0


@pytest.mark.slow
def test_image_text_types_are_built() -> None:
    results = {name: cached.built(name)[0] for name in cached.picture_types()}
    worse = [name for name, (before, _) in scoreboard.read_table(cached.BUILT).items() if before < results[name]]
    assert worse == []
    assert sum(result == "built" for result in results.values()) >= 85


@pytest.mark.parametrize(
    ("model_type", "parts"),
    [
        ("qwen3_vl", ["model.visual"]),
        ("paddleocr_vl", ["model.visual", "model.projector"]),
        ("blip-2", ["vision_model", "qformer", "language_projection"]),
        pytest.param("gemma3n", [""], marks=pytest.mark.slow),
    ],
)
def test_a_step_of_text_runs_only_the_decoder(model_type: str, parts: list[str]) -> None:
    """The tower of Gemma-3n needs another package, so that its decoder is built alone."""
    result, left_out = cached.built(model_type)
    assert (result, left_out.split("; ")) == ("built", parts)
