"""`why` names the line of a user's loop that reads every token, with its cost on a card of known truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hurry import with_effort
from transformers import LlamaConfig, LlamaForCausalLM

import profiler
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder

from .native import why_not
from .truth import A100, T4
from .world import World, simulated

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

STEPS = 8
LONG, PADDING = 8184, 8


def loop(model: Any, *, reads: bool) -> None:
    """Decode in a usual loop. Reads of tokens have no effect here."""
    ids = torch.zeros(1, 16, dtype=torch.long, device="cuda")
    with torch.inference_mode():
        found = model(ids, use_cache=True)
        for _ in range(STEPS):
            token = found.logits[:, -1:].argmax(-1)
            if reads:
                token[0, 0].item()
            found = model(token, past_key_values=found.past_key_values, use_cache=True)


def without_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use no repetitions, since the card has no noise."""
    with_effort(monkeypatch, script_floor=False, script_repeats=1, script_calls=4)


def padded(model: Any, *, padding: int) -> None:
    """Run one long prompt after some tokens of padding; its mask is on the host, where values are known."""
    ids = torch.zeros(1, LONG + padding, dtype=torch.long, device="cuda")
    mask = torch.ones(1, LONG + padding, dtype=torch.long)
    mask[:, :padding] = 0
    with torch.inference_mode():
        model(ids, attention_mask=mask, use_cache=False, logits_to_keep=1)


def attention_s(world: World, model: Any, *, padding: int) -> tuple[str, float]:
    """Return the name and the seconds of the attention kernel."""
    world.card.log = log = []
    padded(model, padding=padding)
    world.card.log = None
    [kernel] = [kernel for kernel in log if "attention" in kernel.work.name]
    return kernel.work.name, kernel.duration_s


def test_a_mask_that_keeps_sdpa_from_its_flash_kernel_is_in_the_seconds_of_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With eight tokens of padding before 8,184, attention uses the kernel that takes a mask, over the whole square."""
    without_repeats(monkeypatch)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=16, vocab_size=8192
    )
    with simulated(A100) as world:
        model: Any = LlamaForCausalLM(config).to(torch.float16).to("cuda").eval()
        taken = {padding: attention_s(world, model, padding=padding) for padding in (0, PADDING)}
        assert taken[0][0] == "flash attention float16"
        assert taken[PADDING][0] == "memory-efficient attention float16"
        saves_s = world.seconds(padded, model, padding=PADDING) - world.seconds(padded, model, padding=0)
        assert taken[PADDING][1] - taken[0][1] > 0.5 * saves_s, "the kernel causes most of it"
        # Outside this mode torch itself chooses the kernel, and knows no card.
        with torch.inference_mode(), profiler.why() as watching:
            padded(model, padding=PADDING)
    assert watching.found is not None
    finding = watching.found.findings[0]
    assert finding.id == "padding"
    assert finding.saves_s == pytest.approx(saves_s, rel=0.25)
    assert finding.evidence == ("0 % of the tokens passed are padding, and the mask keeps SDPA from its flash kernel")


@pytest.mark.ci
def test_reads_of_a_loop_are_named_with_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    without_repeats(monkeypatch)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=16, vocab_size=8192
    )
    with simulated(T4) as world:
        model: Any = LlamaForCausalLM(config).to(torch.float16).to("cuda").eval()
        loop(model, reads=True)
        saves_s = world.seconds(loop, model, reads=True) - world.seconds(loop, model, reads=False)
        with profiler.why() as watching:
            loop(model, reads=True)
        recorder = Recorder()
        with watched(recorder):
            loop(model, reads=False)
        assert recorder.reads.by_line() == ()
    assert watching.found is not None
    [read] = watching.found.seen.reads
    assert read.count == STEPS
    assert read.where.startswith("test_why.py:")
    assert [item.id for item in watching.found.findings][:1] == ["host-sync"]
    [finding] = [item for item in watching.found.findings if item.id == "host-sync"]
    assert finding.where == read.where
    assert finding.saves_s == pytest.approx(saves_s, rel=0.25)
    assert "item" not in vars(torch.Tensor)
