"""A walk is cached, and repeated if anything that it depends on changes."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from profiler.counting import cache as walks
from profiler.counting import count as meta
from profiler.counting.operators import ModelWork
from profiler.facts.step import Step
from profiler.loading.source import load_preset, resolve

STEP = Step(2, 1, 100)


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[object]:
    """The walks that run, with an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    walk = Mock(side_effect=meta.counted_on_meta)
    monkeypatch.setattr(meta, "counted_on_meta", walk)
    return walk.mock_calls


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    _write(path)
    return path


def _write(folder: Path, **changed: object) -> None:
    config = {**load_preset("smollm2-135m").config, **changed}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def work_of(model: str | Path, dtype: str = "auto", quant: str = "none") -> ModelWork:
    return walks.counted_model(resolve(str(model)), dtype, quant).work


def test_a_folder_is_walked_once(folder: Path, walked: list[object]) -> None:
    """134,515,008 parameters of 2 bytes, and 32 rotary frequencies twice, in float32."""
    first, again = (walks.counted_model(resolve(str(folder))) for _ in range(2))
    assert len(walked) == 1
    assert first.weight_bytes == again.weight_bytes == 2 * 134_515_008 + 2 * 32 * 4
    assert first.work.work(STEP) == again.work.work(STEP) == work_of("smollm2-135m").work(STEP)


def test_another_dtype_or_format_is_another_walk(folder: Path, walked: list[object]) -> None:
    """float32 has twice the bytes of bfloat16, nf4 a little over a quarter without the head."""
    wide, plain, narrow = (work_of(folder, *form) for form in (("float32",), ("auto",), ("auto", "nf4")))
    assert len(walked) == 3
    assert wide.work(STEP).weight_bytes == 2 * plain.work(STEP).weight_bytes
    assert narrow.work(STEP).weight_bytes < plain.work(STEP).weight_bytes / 2


def test_a_config_that_changed_is_walked_again(folder: Path, walked: list[object]) -> None:
    """Half the layers have half the cache."""
    before = work_of(folder).work(STEP).kv_read_bytes
    _write(folder, num_hidden_layers=15)
    assert work_of(folder).work(STEP).kv_read_bytes == before / 2
    assert len(walked) == 2


@pytest.mark.parametrize(("name", "other"), [("library_versions", {"torch": "0"}), ("rules_digest", "other")])
def test_other_libraries_or_rules_walk_again(
    folder: Path, walked: list[object], monkeypatch: pytest.MonkeyPatch, name: str, other: object
) -> None:
    work_of(folder)
    monkeypatch.setattr(walks, name, lambda: other)
    work_of(folder)
    assert len(walked) == 2


def test_an_unreadable_cache_file_is_walked_again(folder: Path, walked: list[object], tmp_path: Path) -> None:
    work_of(folder)
    [cached] = (tmp_path / "cache" / "roofscope" / "walks").iterdir()
    cached.write_text('{"operators": [{"operator": "Os"}]}')
    for _ in range(2):
        work_of(folder)
        assert len(walked) == 2


def test_a_cache_that_cannot_be_written_is_ignored(
    folder: Path, walked: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert work_of(folder).work(STEP) == work_of(folder).work(STEP)
    assert len(walked) == 2
