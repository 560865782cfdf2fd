"""No type of the two scoreboards gets worse: 160 agree with torch's counter, 170 with the tensors of a real cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cached
import pictures
import pytest
import scoreboard

BOARDS = pytest.mark.parametrize(
    ("table", "score", "least"), [(scoreboard.TABLE, scoreboard.score, 160), (cached.TABLE, cached.score, 170)]
)


@pytest.mark.slow
@BOARDS
def test_no_type_gets_worse(table: Path, score: Callable[[str], tuple[str, str]], least: int) -> None:
    before = scoreboard.read_table(table)
    assert set(scoreboard.types()) <= set(before), "a new type: run tests/counting/scoreboard.py and cached.py"
    worse = {}
    equal = 0
    for name in scoreboard.types():
        result, detail = score(name)
        equal += result == "equal"
        if scoreboard.RANK[result] > scoreboard.RANK[before[name][0]]:
            worse[name] = f"{before[name][0]} -> {result}: {detail}"
    assert worse == {}
    assert equal >= least


@BOARDS
def test_every_difference_has_a_name(table: Path, score: Callable[[str], tuple[str, str]], least: int) -> None:
    results = scoreboard.read_table(table)
    assert set(scoreboard.types()) <= set(results)
    assert sum(result == "equal" for result, _ in results.values()) >= least
    for name, (result, detail) in results.items():
        assert result == "equal" or detail, name


ONE_OF_EACH_KIND = (
    "mistral",  # a window
    "gemma4_text",  # shared keys, and layers with other heads
    "mimo_v2_flash",  # values narrower than keys
    "deepseek_v32",  # a latent and an indexer
    "deepseek_v4",  # compressed keys
    "qwen3_5_text",  # a delta rule
    "kimi_linear",  # a decay per channel
    "bamba",  # Mamba-2
    "jamba",  # Mamba-1
    "minimax",  # linear attention in the model's dtype
    "lfm2",  # convolutions alone
    "longcat_flash",  # experts that do nothing
)


@pytest.mark.parametrize("model_type", ONE_OF_EACH_KIND)
def test_a_real_cache_has_the_bytes_that_are_counted(model_type: str) -> None:
    assert cached.score(model_type) == ("equal", "")


@pytest.mark.parametrize("model_type", ["qwen4_exp_text", "glm_moe_dsa", "nemotron_h", "gemma4_unified_text", "dots1"])
def test_torch_counts_the_same_flops(model_type: str) -> None:
    assert scoreboard.score(model_type) == ("equal", "")


@pytest.mark.slow
def test_image_text_types_are_built() -> None:
    results = {name: pictures.score(name)[0] for name in pictures.types()}
    worse = [name for name, (before, _) in scoreboard.read_table(pictures.TABLE).items() if before < results[name]]
    assert worse == []
    assert sum(result == "built" for result in results.values()) >= 85


@pytest.mark.parametrize(
    ("model_type", "tower"), [("qwen3_vl", "model.visual"), ("mistral3", "model.vision_tower"), ("gemma3n", "")]
)
def test_a_step_of_text_runs_no_tower(model_type: str, tower: str) -> None:
    """The tower of Gemma-3n needs another package, so that its decoder is built alone."""
    result, left_out = pictures.score(model_type)
    assert result == "built"
    assert left_out.split("; ")[0] == tower
