"""Kernels of the hub are tried where the package and a kernel are on this machine, and named where they are not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from planted_faults import groups_of, tiny_llama

from profiler.why_slow import changes, kernel_changes
from profiler.why_slow.findings import Untried

HERE = Path(__file__).parent
IDS = torch.ones(1, 8, dtype=torch.long)

SCRIPT = """
import json, sys
sys.path[:0] = sys.argv[1:]
import huggingface_hub.constants, torch
from transformers import modeling_flash_attention_utils as flash
from planted_faults import changes_to, tiny_llama
huggingface_hub.constants.HF_HUB_OFFLINE = False
flash.FLASH_ATTN_KERNEL_DEVICES["kernels-community/flash-attn2"] = ("cpu",)
model, ids = tiny_llama(num_hidden_layers=2).bfloat16(), torch.arange(8)[None]
with torch.no_grad():
    before = model(ids).logits
found = changes_to(lambda: model(ids))
answer = {}
for name in ("hub-attention", "hub-layers"):
    with found[name].within(), torch.no_grad():
        answer[name] = [
            found[name].change,
            model.config._attn_implementation,
            sum("forward" in vars(part) for part in model.modules()),
            torch.allclose(model(ids).logits, before, atol=0.05),
        ]
with torch.no_grad():
    answer["after"] = torch.equal(model(ids).logits, before) and not model.use_kernels
answer["online"] = not huggingface_hub.constants.HF_HUB_OFFLINE
print(json.dumps(answer))
"""


@pytest.mark.slow
def test_a_stand_in_for_the_package_is_tried_and_undone() -> None:
    """Two layers have five norms with the last one. Nothing may be downloaded while a kernel is loaded."""
    command = [sys.executable, "-c", SCRIPT, str(HERE / "stand_in"), str(HERE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr[-2000:]
    name = "kernels-community/flash-attn2"
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "hub-attention": [f'attn_implementation="{name}"', name, 0, True],
        "hub-layers": ["use_kernels=True", "sdpa", 5, True],
        "after": True,
        "online": True,
    }


@pytest.mark.skipif(importlib.util.find_spec("kernels") is not None, reason="the package kernels is installed")
def test_without_the_package_they_are_named_as_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without it they are not named, since hardly any of these kernels runs there."""
    model, untried = tiny_llama().bfloat16(), Untried()
    [group] = groups_of(lambda: model(IDS))

    def names() -> set[str]:
        return {each.id for each in changes.candidates(group, untried)}

    tried = names()
    assert untried.by_reason == {}
    monkeypatch.setattr("profiler.why_slow.call_record.CallSettings.on_cpu", False)
    with monkeypatch.context() as patches:
        patches.setattr(kernel_changes, "attention_kernel", lambda _: "kernels-community/flash-attn2")
        assert not {"hub-attention", "hub-layers"} & (names() | tried)
    reason = "the package `kernels`, in a version that transformers accepts, is not installed"
    assert [name.split()[0] for name in untried.by_reason[reason]] == ["hub-attention", "hub-layers"]
