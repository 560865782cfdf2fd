"""`why` on a GPU of known truth names the cause or the line, and the seconds that the change really saves."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hurry import with_effort
from transformers import LlamaConfig, LlamaForCausalLM

import profiler
from profiler.why_slow.findings import Finding, Why
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder

from . import compiled
from .truth import A100, H100, T4, Truth
from .world import simulated

pytestmark = pytest.mark.slow

SLOW_HOST = H100.but(launch_s=40e-6, host_operator_s=40e-6)
PROMPT, NEW_TOKENS = 16, 24


@pytest.fixture(autouse=True)
def _without_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use no floor and no repeats, since a simulated GPU has no noise."""
    with_effort(monkeypatch, script_floor=False, script_repeats=1, script_calls=4)


def llama(dtype: torch.dtype, *, layers: int = 2) -> Any:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "vocab_size": 8192}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, eos_token_id=None, pad_token_id=0)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(dtype).eval()
    return model.to_empty(device="cuda")


def answer(model: Any, **options: object) -> None:
    ids = torch.ones(1, PROMPT, dtype=torch.long, device="cuda")
    model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


def why_of(script: Callable[[], object], budget_s: float | None = None) -> Why:
    with profiler.why(budget_s) as watching:
        script()
    assert watching.found is not None
    return watching.found


def explained(model: Any, budget_s: float = 600.0) -> Why:
    return why_of(lambda: [answer(model) for _ in range(2)], budget_s)


def finding(why: Why, name: str) -> Finding:
    [found] = [item for item in why.findings if item.id == name]
    return found


@pytest.mark.parametrize("compiles", [True, False])
def test_a_loop_bound_by_its_host_is_compiled_or_captured(compiles: bool) -> None:
    """Each launch costs the host 40 µs, so a step of 2 layers takes several ms; its weights take the GPU 0.03 ms."""
    with simulated(SLOW_HOST) as world, mock.patch.object(compiled, "RECORDING_S", 1e-3):  # for such a small step
        model = llama(torch.bfloat16)
        # The first calls compile and record the graph; the script has two calls.
        fastest_s = min(world.seconds(answer, model, cache_implementation="static") for _ in range(4))
        saves_s = 2 * (world.seconds(answer, model) - fastest_s)
        if compiles:
            why = explained(model)
        else:
            del model._compiled_call
            with mock.patch.object(torch, "compile", side_effect=RuntimeError("no working triton installation")):
                why = explained(model)
    found = finding(why, "uncompiled")
    assert found.saves_s == pytest.approx(saves_s, rel=0.25)
    assert found.saves_s > 0.5 * why.seen.calls_s
    assert 'cache_implementation="static"' in found.change
    assert found.basis == ("tried" if compiles else "stand-in")
    assert any("no working triton installation" in line for line in why.not_tried) is not compiles


@pytest.mark.parametrize(
    ("truth", "dtype", "name", "change"),
    [
        (T4, torch.float32, "wide-dtype", "call model.to(torch.float16) after loading"),
        (T4, torch.bfloat16, "emulated-dtype", "call model.to(torch.float16) after loading"),
        (A100, torch.float32, "wide-dtype", "call model.to(torch.bfloat16) after loading"),
        (A100, torch.float16, "", ""),
    ],
)
def test_weights_are_tried_in_the_16_bits_that_the_gpu_has(
    truth: Truth, dtype: torch.dtype, name: str, change: str
) -> None:
    """GPUs older than Ampere (compute capability 8.0) get float16; Ampere and newer GPUs get bfloat16."""
    with simulated(truth.but(launch_s=1e-6)) as world:
        model = llama(dtype)
        long = torch.ones(1, 2048, dtype=torch.long, device="cuda")

        def read(model: Any) -> None:
            with torch.inference_mode():
                model(long, use_cache=False, logits_to_keep=1)

        native = torch.float16 if truth is T4 else torch.bfloat16
        saves_s = 2 * (world.seconds(read, model) - world.seconds(read, llama(native)))
        why = why_of(lambda: [read(model) for _ in range(2)])
    found = [item for item in why.findings if item.id in ("wide-dtype", "emulated-dtype")]
    assert [(item.id, item.change.split(",")[0]) for item in found] == ([(name, change)] if name else [])
    assert all(item.saves_s == pytest.approx(saves_s, rel=0.25) for item in found)


def test_attention_plans_are_named_with_what_they_cost() -> None:
    """On an H100 with torch 2.11, a first `generate` of 64 tokens took 3.5 s, and 1.0 s when repeated."""
    with simulated(H100.but(plan_s=36e-3)):
        why = explained(llama(torch.bfloat16))
    plans = finding(why, "attention-plans")
    assert plans.once
    assert plans.saves_s == pytest.approx(36e-3 * (NEW_TOKENS - 1), rel=0.05)
    with simulated(A100.but(plan_s=36e-3)):  # torch prefers its own kernel there
        assert not [item for item in explained(llama(torch.bfloat16)).findings if item.id == "attention-plans"]


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


def padded(model: Any, *, padding: int) -> None:
    """Run one long prompt after some tokens of padding; its mask is on the host, where values are known."""
    ids = torch.zeros(1, LONG + padding, dtype=torch.long, device="cuda")
    mask = torch.ones(1, LONG + padding, dtype=torch.long)
    mask[:, :padding] = 0
    with torch.inference_mode():
        model(ids, attention_mask=mask, use_cache=False, logits_to_keep=1)


def test_a_mask_that_keeps_sdpa_from_its_flash_kernel_is_in_the_seconds_of_padding() -> None:
    """With eight tokens of padding before 8,184, attention uses the kernel that takes a mask, over the whole square."""
    with simulated(A100) as world:
        model = llama(torch.float16, layers=1)
        saves_s = world.seconds(padded, model, padding=PADDING) - world.seconds(padded, model, padding=0)
        # Outside this mode torch itself chooses the kernel, and knows no card.
        with torch.inference_mode():
            why = why_of(lambda: padded(model, padding=PADDING))
    first = why.findings[0]
    assert first.id == "padding"
    assert first.saves_s == pytest.approx(saves_s, rel=0.25)
    assert first.evidence == "0 % of the tokens passed are padding, and the mask keeps SDPA from its flash kernel"


@pytest.mark.ci
def test_reads_of_a_loop_are_named_with_what_they_cost() -> None:
    """The first read follows the prompt's forward, all others the loop's."""
    with simulated(T4) as world:
        model = llama(torch.float16, layers=1)
        loop(model, reads=True)
        saves_s = world.seconds(loop, model, reads=True) - world.seconds(loop, model, reads=False)
        why = why_of(lambda: loop(model, reads=True))
        recorder = Recorder()
        with watched(recorder):
            loop(model, reads=False)
        assert recorder.reads_after(recorder.notes[-1].where) == ()
    first = why.findings[0]
    assert first.id == "host-sync"
    assert f"the host reads {STEPS - 1} values" in first.evidence
    assert first.where.startswith("test_why.py:")
    assert first.saves_s == pytest.approx(saves_s, rel=0.25)
    assert "item" not in vars(torch.Tensor)
