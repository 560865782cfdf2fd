"""The bundled counts of the presets are equal to a walk."""

from __future__ import annotations

import json
import re

import pytest
import torch
from cases import slow_except
from counted import SPLITS, documents, rank_documents

from profiler.counting.operators import Collective, Convolution, Embedding, ModelWork, Operator, RecurrentState
from profiler.counting.preset_counts import FILE, CountedModel, counts_json, from_json, preset_counts
from profiler.errors import RequestError
from profiler.facts.step import Step
from profiler.loading.source import preset_names
from profiler.quant.registry import FORMATS

# One of each kind: Conv1D, MXFP4 experts, banks of experts, a latent cache, plain linears. Planning torchao's int8 and
# fp8 takes half a second per preset.
EVERY_FORMAT = ("gpt2", "gpt-oss-20b", "mixtral-8x7b", "deepseek-v2-lite", "smollm2-135m")
STEPS = (Step(4, 512, 0), Step(8, 1, 1024))


@pytest.mark.parametrize("card", slow_except(("mistral-7b-v0.3",), preset_names()))
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


def test_a_format_has_its_own_bytes() -> None:
    """Llama-2-7B has 6.476 billion weights without table and head, in 4 bits with a float32 scale per 64 weights."""
    bundled = preset_counts("llama-2-7b", "nf4")
    head_and_norms = 2 * (32_000 * 4096 + 65 * 4096)
    expected = 32 * (4 * 4096**2 + 3 * 4096 * 11_008) * (4 / 8 + 4 / 64) + head_and_norms
    assert bundled.work.work(Step(1, 1, 0)).weight_bytes == pytest.approx(expected, rel=1e-4)
    # The total adds a code book of 16 values per matrix, the table, of which a step reads one row, and 64 rotary
    # frequencies twice in float32.
    assert bundled.weight_bytes == expected + 32 * 7 * 16 * 4 + 2 * 32_000 * 4096 + 2 * 64 * 4


_EMBEDDING = Embedding("embed", torch.bfloat16, 8, 2)


@pytest.mark.parametrize(
    ("operator", "document"),
    [
        (RecurrentState("mixer", torch.float32, 64, 5, 4, count=2), {"operator": "RecurrentState"}),
        (Convolution("conv", torch.bfloat16, 8, 1, 4, 4, 64, 2), {"operator": "Convolution", "kernel_size": 4}),
        (
            Collective("all", torch.bfloat16, "all_reduce", 2, _EMBEDDING, 8, 2, count=3),
            {"operator": "Collective", "kind": "all_reduce", "ranks": 2},
        ),
    ],
)
def test_operators_that_no_card_has(operator: Operator, document: dict[str, object]) -> None:
    """The modules that the walk does not understand are restored too."""
    work = ModelWork((operator,), 100, 90, ("mixer.odd",), ("tower",))
    written = json.loads(json.dumps(counts_json(CountedModel(work, 200))))
    assert written["operators"][0].items() >= document.items()
    model = from_json(written)
    assert model.weight_bytes == 200
    read = model.work
    assert (read.coverage, read.unknown, read.not_run) == (0.9, ("mixer.odd",), ("tower",))
    assert [read.work(step) for step in STEPS] == [work.work(step) for step in STEPS]
