"""What a change would save without a trial, by the roofs of a memory-bound and of a compute-bound device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted_faults import changes_to, tiny_llama

from profiler.counting.floor import RoofSet
from profiler.why_slow.floor import floor_of_calls, subject_of
from profiler.why_slow.recorder import Recorder

IDS = torch.ones(4, 8, dtype=torch.long)
MEMORY, COMPUTE = (1.0, {"float32": 1e18}), (1e18, {"float32": 1.0})
"""(bytes/s, FLOP/s) of a device on which only one of them counts."""


def about(change: str, run: Any, model: Any, roofs: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr("profiler.why_slow.floor.here_roofs", lambda *_: RoofSet("here", *roofs))
    monkeypatch.setattr("profiler.why_slow.floor.least_dispatch_s", lambda *_: (0.0, 0.0))

    def floor(recorder: Recorder) -> Any:
        return floor_of_calls(recorder.seen("s.py").calls, {"LlamaForCausalLM": subject_of(model)})

    return changes_to(run, floor)[change].about


def wide() -> Any:
    """A model whose time is in its weights: 32 times more of them than keys and values of a short text."""
    return tiny_llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=2)


def test_beams_cost_little_where_weights_are_read_and_in_proportion_where_products_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of four beams reads the weights once, and computes four times as much."""
    model = wide()

    def run() -> None:
        model.generate(IDS[:1], max_new_tokens=4, num_beams=4, do_sample=False)

    assert about("beams", run, model, MEMORY, monkeypatch) < 0.1
    assert about("beams", run, model, COMPUTE, monkeypatch) == pytest.approx(0.75, abs=0.01)


def test_prompts_one_by_one_save_the_weights_that_a_batch_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts of one length: a batch reads a quarter of the weights, and computes as much."""
    model = wide()

    def run() -> None:
        for ids in IDS.split(1):
            model.generate(ids, max_new_tokens=4, do_sample=False)

    assert about("one-by-one", run, model, MEMORY, monkeypatch) == pytest.approx(0.75, abs=0.05)
    assert about("one-by-one", run, model, COMPUTE, monkeypatch) == pytest.approx(0.0, abs=0.01)


def test_padding_saves_in_the_prompt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 8 tokens is padding; three of the four steps compute one token per row, with it or without."""
    model, mask = wide(), torch.ones_like(IDS)
    mask[:, :4] = 0

    def run() -> None:
        model.generate(IDS, attention_mask=mask, max_new_tokens=4, do_sample=False)

    assert about("padding", run, model, COMPUTE, monkeypatch) == pytest.approx(4 / (8 + 3), abs=0.02)
    assert about("padding", run, model, MEMORY, monkeypatch) < 0.1


def test_unread_logits_save_the_products_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 8 positions: 7 of 8 rows of a head of 4096 x 32, next to 4 x 32 x 32 + 3 x 32 x 64 weights for all 8."""
    model = tiny_llama(vocab_size=4096)
    head, layer = 4096 * 32, 4 * 32 * 32 + 3 * 32 * 64

    def run() -> None:
        model(IDS).logits[:, -1].argmax(-1).tolist()

    expected = 7 * head / (8 * head + 8 * layer)
    assert about("all-logits", run, model, COMPUTE, monkeypatch) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("has", "name"), [((), "float32"), (("bfloat16",), "bfloat16")])
def test_a_cpu_without_units_for_a_half_tries_a_dtype_that_it_has(
    has: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profiler.why_slow.weight_changes._has_units", lambda dtype: dtype in has)
    model = tiny_llama().half()
    found = changes_to(lambda: model(IDS))["emulated-dtype"]
    assert found.change.startswith(f"dtype=torch.{name}")
    assert found.changed().logits.dtype == getattr(torch, name)  # type: ignore[attr-defined]
