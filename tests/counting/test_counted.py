"""The bundled counts of the presets are equal to a walk, which is cached and repeated if what it depends on changes."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cases import slow_except
from counted import SPLITS, documents, rank_documents

from profiler.counting import cache as walks
from profiler.counting import count as meta
from profiler.counting.operators import Collective, Convolution, Embedding, ModelWork, Operator, RecurrentState
from profiler.counting.preset_counts import FILE, CountedModel, counts_json, from_json, preset_counts
from profiler.errors import RequestError
from profiler.facts.step import Step
from profiler.loading.source import presets, resolve
from profiler.quant.registry import FORMATS

# One of each kind: Conv1D, MXFP4 experts, banks of experts, a latent cache, plain linears. Planning torchao's int8 and
# fp8 takes half a second per preset.
EVERY_FORMAT = ("gpt2", "gpt-oss-20b", "mixtral-8x7b", "deepseek-v2-lite", "smollm2-135m")
STEPS = (Step(4, 512, 0), Step(8, 1, 1024))


@pytest.mark.parametrize("card", slow_except(("tinyllama-1.1b",), presets()))
def test_bundled_counts_are_up_to_date(card: str) -> None:
    """If this fails after an intended change, run `python tests/counting/counted.py` to write the file again."""
    quants = FORMATS if card in EVERY_FORMAT else ("none", "nf4", "int4wo")
    for quant, document in documents(card, quants).items():
        assert counts_json(preset_counts(card, quant)) == document


SPLIT = ("gpt2", "llama-3.1-8b", "deepseek-v2-lite", "qwen2.5-7b", "qwen3-30b-a3b")


@pytest.mark.parametrize("card", slow_except(SPLIT[:2], SPLIT))
def test_bundled_ranks_are_up_to_date(card: str) -> None:
    """The presets have a latent cache, grouped heads and experts. gpt2 has no plan, and 28 heads do not divide by 8."""
    for ranks, document in rank_documents(card).items():
        if isinstance(document, str):
            with pytest.raises(RequestError, match=re.escape(document)):
                preset_counts(card, ranks=ranks)
        else:
            assert counts_json(preset_counts(card, ranks=ranks)) == document


def test_every_preset_has_its_ranks() -> None:
    """`place` splits a preset over 2, 4 or 8 GPUs, without importing torch."""
    presets = json.loads(FILE.read_text(encoding="utf-8"))
    assert {tuple(preset["ranks"]) for preset in presets.values()} == {tuple(map(str, SPLITS))}


def test_other_models_and_formats_are_none() -> None:
    assert preset_counts("a model that has no card") is None
    assert preset_counts("gpt2", "int4wo") is None  # no group divides its layers
    assert preset_counts("gpt2", "model") is None  # a key of the file, not a format
    assert preset_counts("llama-3.1-8b", ranks=3) is None
    assert preset_counts("llama-3.1-8b", "nf4", ranks=2) is None


@pytest.mark.parametrize(
    "operator",
    [
        RecurrentState("mixer", torch.float32, 64, 5, 4, count=2),
        Convolution("conv", torch.bfloat16, 8, 1, 4, 4, 64, 2),
        Collective("all", torch.bfloat16, "all_reduce", 2, Embedding("e", torch.bfloat16, 8, 2), 8, count=3),
    ],
)
def test_operators_that_no_card_has(operator: Operator) -> None:
    """The modules that the walk does not understand are restored too."""
    work = ModelWork((operator,), 100, ("mixer.odd",), ("tower",), coverage=0.9)
    model = from_json(json.loads(json.dumps(counts_json(CountedModel(work, 200)))))
    assert model.weight_bytes == 200
    read = model.work
    assert (read.coverage, read.unknown, read.not_run) == (0.9, ("mixer.odd",), ("tower",))
    assert [read.work(step) for step in STEPS] == [work.work(step) for step in STEPS]


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
    """SmolLM2-135M with four layers."""
    path = tmp_path / "model"
    path.mkdir()
    _write(path, num_hidden_layers=4)
    return path


def _write(folder: Path, **changed: object) -> None:
    config = {**presets()["smollm2-135m"].config, **changed}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def work_of(model: str | Path, dtype: str = "auto", quant: str = "none") -> ModelWork:
    return walks.counted_model(resolve(str(model)), dtype, quant).work


def test_a_folder_is_walked_once(folder: Path, walked: list[object]) -> None:
    """134,515,008 parameters of 2 bytes, and 32 rotary frequencies twice, in float32."""
    _write(folder)
    first, again = (walks.counted_model(resolve(str(folder))) for _ in range(2))
    assert len(walked) == 1
    assert first.weight_bytes == again.weight_bytes == 2 * 134_515_008 + 2 * 32 * 4
    assert first.work.work(STEP) == again.work.work(STEP) == work_of("smollm2-135m").work(STEP)


def test_another_dtype_format_or_config_is_another_walk(folder: Path, walked: list[object]) -> None:
    """float32 has twice the bytes of bfloat16, nf4 11.5 bits less per weight of linears. Half the layers cache half."""
    wide, plain, narrow = (work_of(folder, *form) for form in (("float32",), ("auto",), ("auto", "nf4")))
    assert len(walked) == 3
    assert wide.work(STEP).weight_bytes == 2 * plain.work(STEP).weight_bytes
    in_linears = 4 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    saved_bytes = plain.work(STEP).weight_bytes - narrow.work(STEP).weight_bytes
    assert saved_bytes == pytest.approx(in_linears * 11.5 / 8, rel=0.01)
    _write(folder, num_hidden_layers=2)
    assert work_of(folder).work(STEP).kv_read_bytes == plain.work(STEP).kv_read_bytes / 2


@pytest.mark.parametrize(("name", "other"), [("version_of", "0"), ("rules_digest", "other")])
def test_other_libraries_or_rules_walk_again(
    folder: Path, walked: list[object], monkeypatch: pytest.MonkeyPatch, name: str, other: object
) -> None:
    work_of(folder)
    monkeypatch.setattr(walks, name, lambda *_: other)
    work_of(folder)
    assert len(walked) == 2


def test_an_unreadable_cache_file_is_walked_again(folder: Path, walked: list[object], tmp_path: Path) -> None:
    work_of(folder)
    [cached] = (tmp_path / "cache" / "roofscope" / "walks").iterdir()
    cached.write_text('{"operators": [{"operator": "Os"}]}')
    for _ in range(2):
        work_of(folder)
        assert len(walked) == 2
