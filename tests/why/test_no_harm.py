"""`why` changes neither a script's results nor, by much, its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hurry import with_effort
from planted_faults import tiny_llama

import profiler
from profiler.data.roof_set import RoofSet
from profiler.why_slow import kept_arguments
from profiler.why_slow.kept_arguments import KeptArguments
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder

HURRIED = Path(__file__).parents[1] / "hurry.py"
CPU = torch.device("cpu")
IDS = torch.ones(1, 8, dtype=torch.long)

LLAMA = """
import hashlib, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=4000)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, eos_token_id=None, pad_token_id=0)).eval()
found = []
"""
SCRIPTS = {
    "generates": """
for _ in range(8):
    ids = torch.randint(0, 4000, (4, 512))
    found.append(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False))
""",
    # Each step passes a small view of a mask of 64 MB, a new one every eight steps.
    "loops with views of large buffers": """
ids, past = torch.randint(0, 4000, (1, 64)), None
with torch.inference_mode():
    for step in range(64):
        if step % 8 == 0:
            visible = torch.ones(1, 1 << 23, dtype=torch.long)
        mask = visible[:, : 64 + step]
        out = model(ids if past is None else ids[:, -1:], attention_mask=mask, past_key_values=past, use_cache=True)
        past, ids = out.past_key_values, torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
found.append(ids)
""",
    # Without `backward`, a graph lives as long as a tensor that belongs to it.
    "passes embeddings that require gradients": """
prefix = torch.nn.Parameter(torch.randn(1, 256, 128))
for _ in range(24):
    embedded = (prefix.expand(16, -1, -1) * torch.rand(16, 256, 128)).tanh()
    found.append(model(inputs_embeds=embedded, logits_to_keep=1).logits.detach().argmax(-1))
""",
    "has a paged cache": """
from transformers import ContinuousBatchingConfig, GenerationConfig
config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
batching = ContinuousBatchingConfig(page_size=32, num_blocks=2048, max_batch_tokens=2048)
for length in (12, 90, 33, 57, 21, 74, 40, 18):
    prompts = [torch.randint(3, 4000, (length,)).tolist()]
    for answer in model.generate_batch(prompts, config, batching).values():
        found.append(torch.tensor(answer.generated_tokens))
""",
    "has threads": """
from concurrent.futures import ThreadPoolExecutor
prompts = torch.randint(0, 4000, (8, 1, 256))
with ThreadPoolExecutor(2) as pool:
    found += pool.map(lambda ids: model.generate(ids, max_new_tokens=4, do_sample=False), prompts)
""",
    "makes one model after the other": """
for _ in range(3):
    model = None
    wide = LlamaConfig(**{**sizes, "vocab_size": 400000}, tie_word_embeddings=True)
    model = LlamaForCausalLM(wide).eval()
    found.append(model.generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=2, do_sample=False))
""",
}
END = """
import resource
tokens = torch.cat([each.flatten() for each in found]).numpy().tobytes()
print("result", hashlib.sha256(tokens).hexdigest())
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def result_and_peak(command: list[str]) -> tuple[str, int]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("result ", "peak ")))
    return lines["result"], int(lines["peak"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_has_its_result_and_at_most_a_fifth_more_memory(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(LLAMA + SCRIPTS[kind] + END)
    expected, own = result_and_peak([sys.executable, str(script)])
    command = [sys.executable, str(HURRIED), "why", "--budget", "0", "--out", str(tmp_path / "why"), str(script)]
    result, peak = result_and_peak(command)
    assert result == expected
    assert peak <= 1.2 * own, (peak, own)


def test_a_block_leaves_the_random_numbers_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor builds a twin of the model, whose weights are random."""
    monkeypatch.setattr("profiler.why_slow.floor.here_roofs", lambda *_: RoofSet("here", 1e9, {"float32": 1e9}))
    with_effort(monkeypatch, script_least_s=1.0, script_most_s=1.0)
    model = tiny_llama()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with profiler.why() as watching:
        model(IDS)
    assert watching.found.floor is not None
    assert torch.equal(torch.rand(3), expected)


def kept_bytes(kept: KeptArguments) -> int:
    return sum(kept.storages.values())


def test_a_storage_counts_once_and_a_view_keeps_only_itself() -> None:
    """Two calls with the same 400 bytes of numbers keep 400; 8 bytes of 8 MB keep 8."""
    kept = KeptArguments()
    embedded = torch.arange(100.0)
    assert kept.keep((), {"inputs_embeds": embedded, "again": embedded}, CPU) is not None
    assert kept.keep((), {"inputs_embeds": embedded.view(10, 10)}, CPU) is not None
    assert kept_bytes(kept) == 400
    large = torch.arange(1 << 20)
    found = kept.keep((large[5:6],), {}, CPU)
    assert (found[0][0].tolist(), kept_bytes(kept)) == ([5], 408)
    assert found[0][0].untyped_storage().nbytes() == 8


def test_tensors_in_dictionaries_lists_and_outputs_count() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    kept = KeptArguments()
    encoded = BaseModelOutput(last_hidden_state=torch.zeros(1, 4, 8))
    named = {"encoder_outputs": encoded, "masks": {"full": torch.zeros(16)}, "sizes": [torch.zeros(2)]}
    found = kept.keep((), named, CPU)
    assert isinstance(found[1]["encoder_outputs"], BaseModelOutput)
    assert kept_bytes(kept) == 4 * (32 + 16 + 2)


def test_what_is_kept_has_no_graph() -> None:
    weight = torch.ones(4, requires_grad=True)
    found = KeptArguments().keep((weight * 2,), {}, CPU)
    assert found[0][0].grad_fn is None


@pytest.mark.parametrize(
    ("named", "free_bytes"),
    [
        ({"cache": SimpleNamespace(keys=[torch.zeros(4)])}, 1 << 40),  # that other calls change
        ({"input_ids": torch.zeros(21, dtype=torch.uint8)}, 1000),  # more than 2 %
        ({"logits_processor": [SimpleNamespace(allowed={"ids": torch.zeros(6)})]}, 1000),
    ],
)
def test_what_is_shared_or_large_is_not_kept(
    named: dict[str, Any], free_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_arguments, "available_bytes", lambda _: free_bytes)
    kept = KeptArguments()
    assert kept.keep((), named, CPU) is None
    assert kept_bytes(kept) == 0


def test_recording_stops_with_a_line_if_memory_runs_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script goes on, none of its later calls is recorded, and the answer says when recording stopped."""
    with_effort(monkeypatch, script_floor=False, script_least_s=0.0, script_most_s=0.0)
    monkeypatch.setattr(kept_arguments, "available_bytes", lambda _: 1e8)
    monkeypatch.setattr(kept_arguments, "total_bytes", lambda _: 1e10)
    model = tiny_llama()
    with profiler.why() as watching, torch.no_grad():
        assert all(model(IDS).logits.shape == (1, 8, 64) for _ in range(3))
    assert watching.found.seen.calls == ()
    assert "recording failed 3 times" in watching.answer
    assert "recording stopped when 100 MB of 10.0 GB of memory were left" in watching.answer


def test_a_loop_keeps_no_mask_of_each_step() -> None:
    """Of 300 steps only the first 256 may keep arguments; the share of padding is known of all."""
    recorder, model = Recorder(), tiny_llama()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    with watched(recorder), torch.inference_mode():
        for _ in range(300):
            model(IDS, attention_mask=mask.clone(), use_cache=False)
    assert sum(noted.arguments is not None for noted in recorder.notes) == 256
    assert recorder.notes[-1].mask is None
    assert {call.padding for call in recorder.seen("s.py").calls} == {0.25}
