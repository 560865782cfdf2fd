"""The planted faults of scripts, each with its fix, and functions that run scripts while they are recorded."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from scripts import SCRIPTS
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from profiler import effort
from profiler.device.clock import Clock
from profiler.why_slow.change_registry import candidates
from profiler.why_slow.findings import CallFloor, TriedChange, Untried
from profiler.why_slow.observations import Call, CallSettings, Observations
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.repeat_call import CallGroup, Candidate
from profiler.why_slow.script import run_script
from profiler.why_slow.trials import call_groups

FAULTS = {
    # script: (finding, faulty text, its fix)
    "cache_off": ("cache-off", ", use_cache=False", ""),
    "loop_without_cache": (
        "cache-off",
        "        logits = model(ids, logits_to_keep=1).logits\n",
        "        found = model(ids if past is None else ids[:, -1:], past_key_values=past, logits_to_keep=1)\n"
        "        past, logits = found.past_key_values, found.logits\n",
    ),
    "gradients": ("grad-on", "torch.enable_grad()", "torch.inference_mode()"),
    "train_mode": ("train-mode", ".train()", ".eval()"),
    "frozen": ("frozen-weights", "model.requires_grad_(False)", "model.eval()"),
    "padded_to_the_maximum": ("padding", "length = 384", "length = 48"),
    "float32": ("wide-dtype", "torch.float32", '"auto"'),
    "all_logits": ("all-logits", "use_cache=True", "use_cache=True, logits_to_keep=1"),
    "one_by_one": ("one-by-one", "questions.split(1)", "questions.split(8)"),
    "paged_one_by_one": ("one-by-one", "[[question] for question in questions]", "[questions]"),
    "adapters": ("unmerged-adapters", "with_linears(load(), partial(LowRank, rank=64))", "load()"),
    "eager_attention": ("slow-attention", 'attn_implementation="eager"', ""),
    "beams": ("beams", ", num_beams=5", ""),
    "stops_on_repeats": ("callbacks", ", stopping_criteria=[Repeats()]", ""),
    "allowed_tokens": ("callbacks", ", prefix_allowed_tokens_fn=allowed", ""),
    "autocast": ("autocast", "torch.float32", '"auto"'),
    "half_on_a_cpu": ("emulated-dtype", "torch.float16", '"auto"'),
    "assisted": ("assistant", ", assistant_model=assistant", ""),
    "experts_in_a_loop": ("slow-experts", '"eager"', '"grouped_mm"'),
    "tokenized_again": ("text-again", "    found = tokenizer", "    found = found or tokenizer"),
    "offloaded": ("offload", '"disk"', '"cpu"'),
    "loaded_again": ("reloads", "    model = load()", "    model = model or load()"),
}

THREE_FAULTS = {
    # script: finding: (faulty text, its fix)
    "three_faults": {
        "cache-off": (", use_cache=False", ""),
        "padding": ("(2, 160)", "(2, 80)"),
        "wide-dtype": ("torch.float32", '"auto"'),
    },
    "three_faults_in_a_loop": {
        "cache-off": (
            "    for _ in range(8):\n        logits = model(ids).logits\n",
            "    past = None\n    for _ in range(8):\n"
            "        found = model(ids if past is None else ids[:, -1:], past_key_values=past)\n"
            "        past, logits = found.past_key_values, found.logits\n",
        ),
        "all-logits": ("model(ids)", "model(ids, logits_to_keep=1)"),
        "wide-dtype": ("torch.float32", '"auto"'),
    },
}


def fixed_source(name: str, finding: str | None = None) -> str:
    """The source of a script without its fault, or without one of its three faults."""
    wrong, right = FAULTS[name][1:] if finding is None else THREE_FAULTS[name][finding]
    assert wrong in SCRIPTS[name]
    return SCRIPTS[name].replace(wrong, right)


def tiny_llama(**options: Any) -> LlamaForCausalLM:
    """A Llama of one layer with random weights, in float32 and eval mode, whose `generate` never ends early."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    config = LlamaConfig(**{"num_hidden_layers": 1, "eos_token_id": None, "pad_token_id": 0, **sizes, **options})
    return LlamaForCausalLM(config).eval()


def with_linears(model: Any, make: Callable[[nn.Linear], nn.Module]) -> Any:
    """The model with other modules in place of the linears of its layers."""
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(block, name, make(child))
    return model


class LowRank(nn.Module):
    """LoRA with children (Hu et al. 2021): W x + B A x."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def save_small_llama(folder: Path) -> None:
    """Save a small Llama, whose vocabulary is large enough that needless logits cost time.

    It is in bfloat16 if this CPU multiplies that: a healthy script has no dtype that is emulated.
    """
    dtype = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 16384}
    heads, ends = {"num_attention_heads": 8, "max_position_embeddings": 1024}, {"eos_token_id": None, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends)).to(dtype).save_pretrained(folder)


class ProcessClock(Clock):
    """CPU time of this process, whose forwards may run in another thread."""

    def mark(self) -> int:
        return time.process_time_ns()


def sleep(seconds: float) -> None:
    """Sleep until this process has worked for so long, at most for twenty times as long."""
    until_s = time.process_time() + seconds
    for _ in range(20):
        time.sleep(seconds)
        if time.process_time() >= until_s:
            return


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """A context with one torch thread and one visible core, where `why` measures the CPU time of this process.

    This excludes the time of other processes on that core. Floors are skipped.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with (
        patch("os.sched_getaffinity", lambda _process: {0}, create=not hasattr(os, "sched_getaffinity")),
        patch.object(effort, "STANDARD", replace(effort.STANDARD, script_floor=False)),
        patch("profiler.why_slow.recorder.clock_for", lambda _device: ProcessClock()),
        patch("profiler.why_slow.recorder.now_s", time.process_time),
        patch("profiler.why_slow.call_record.now_s", time.process_time),
        patch("profiler.why_slow.own_lines.now_s", time.process_time),
        patch("profiler.why_slow.own_lines.time", SimpleNamespace(sleep=sleep)),
        patch("profiler.why_slow.trials.now_s", time.process_time),
        patch("profiler.why_slow.trials.own_s", time.process_time),
    ):
        yield
    torch.set_num_threads(threads)


def run_watched(script: Path, model: Path) -> Recorder:
    """Run a script in this process with a model folder as its argument, and return the record."""
    recorder = Recorder()
    with (
        patch.object(sys, "argv", sys.argv),
        patch.object(sys, "path", [*sys.path]),
        patch.dict(sys.modules, {"__main__": sys.modules["__main__"]}),
        watched(recorder),
    ):
        assert run_script(script, [str(model)]) == 0
    return recorder


def recorded(run: Callable[[], object]) -> Recorder:
    """A function's calls of models, recorded without gradients."""
    recorder = Recorder()
    with watched(recorder), torch.no_grad():
        run()
    return recorder


def groups_of(run: Callable[[], object]) -> list[CallGroup]:
    """The groups of a function's calls."""
    recorder = recorded(run)
    return call_groups(recorder, recorder.seen("s.py"), Untried())


def changes_to(
    run: Callable[[], object], floor: Callable[[Recorder], CallFloor | None] = lambda _: None
) -> dict[str, Candidate]:
    """The changes that apply to the model calls in `run`, by name."""
    found = dict[str, Candidate]()
    for group in groups_of(run):
        group.floor = floor(group.recorder)
        found |= {candidate.id: candidate for candidate in candidates(group, Untried())}
    return found


def generate(number: int, seconds: float, **more: Any) -> Call:
    """A call of `generate` with these seconds, as if it had been recorded."""
    return Call(number, "generate", "Llama", 1, 8, 0, 4, 4, seconds, "s.py:4", **{"settings": CallSettings(), **more})


def script(wall_s: float, *calls: Call, **more: Any) -> Observations:
    """A script of such calls."""
    return replace(Observations("s.py", wall_s, calls, (), 0.0, "", 0.0), **more)


def tried(saving: float, *calls: int, **more: Any) -> TriedChange:
    """Five pairs of these calls that all save this share of them."""
    what = {
        "id": "grad-on",
        "where": "s.py:4",
        "evidence": "gradients are recorded",
        "change": "no grad",
        "shape": "one",
    }
    return TriedChange(calls=calls, rounds=((1.0, 1 - saving),) * 5, **what | more)


def taken_s(seen: Observations) -> float:
    """Seconds in calls, loads and tokenizers, and in the script's own code.

    A call's graph is freed between forwards. This is a sixth of the cost of recorded gradients.
    """
    return seen.watched_s + sum(line.seconds for line in seen.own_lines)
