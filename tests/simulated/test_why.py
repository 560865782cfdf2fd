"""A loop of a user's own that reads every token: the line is named, with what it costs on a card of known truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import profiler
from profiler.watching.patches import watched
from profiler.watching.recorder import Recorder

from .guard import why_not
from .truth import T4
from .world import World, simulated

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

STEPS = 8


def loop(model: Any, *, reads: bool) -> None:
    """Decode as people write it; a read a token decides nothing here."""
    ids = torch.zeros(1, 16, dtype=torch.long, device="cuda")
    with torch.inference_mode():
        found = model(ids, use_cache=True)
        for _ in range(STEPS):
            token = found.logits[:, -1:].argmax(-1)
            if reads:
                token[0, 0].item()
            found = model(token, past_key_values=found.past_key_values, use_cache=True)


def seconds(world: World, model: Any, *, reads: bool) -> float:
    torch.cuda.synchronize()
    start_s = world.host.now_s
    loop(model, reads=reads)
    torch.cuda.synchronize()
    return world.host.now_s - start_s


def test_reads_of_a_loop_are_named_with_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.job.why._floor", lambda _recorder, _seen: None)
    # A card without noise needs no repeats.
    monkeypatch.setattr("profiler.probes.again._MOST_REPEATS", 1)
    monkeypatch.setattr("profiler.probes.again._IN_A_ROW", 4)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=16, vocab_size=8192
    )
    with simulated(T4) as world:
        model: Any = LlamaForCausalLM(config).to(torch.float16).to("cuda").eval()
        loop(model, reads=True)
        saves_s = seconds(world, model, reads=True) - seconds(world, model, reads=False)
        with profiler.why() as watching:
            loop(model, reads=True)
        recorder = Recorder()
        with watched(recorder):
            loop(model, reads=False)
        assert recorder.reads() == ()
    assert watching.found is not None
    [read] = watching.found.seen.reads
    assert read.count == STEPS
    assert read.where.startswith("test_why.py:")
    assert [item.id for item in watching.found.findings][:1] == ["host-sync"]
    [finding] = [item for item in watching.found.findings if item.id == "host-sync"]
    assert finding.where == read.where
    assert finding.saves_s == pytest.approx(saves_s, rel=0.25)
    assert "item" not in vars(torch.Tensor)
