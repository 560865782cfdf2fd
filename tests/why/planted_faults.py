"""The planted faults of scripts, each with its fix, and functions that run scripts while they are recorded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scripts import SCRIPTS
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from profiler.why_slow.change_registry import candidates
from profiler.why_slow.command import run_script
from profiler.why_slow.findings import CallFloor, TriedChange, Untried
from profiler.why_slow.observations import Call, CallSettings, Observations
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.repeat_call import CallGroup, Candidate
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


def run_watched(script: Path, model: Path) -> Recorder:
    """Run a script in this process with a model folder as its argument, and return the record."""
    recorder = Recorder()
    with watched(recorder):
        assert run_script(script, [str(model)]) == 0
    return recorder


def recorded(run: Callable[[], object]) -> Recorder:
    """A function's calls of models, recorded without gradients."""
    recorder = Recorder()
    with watched(recorder), torch.no_grad():
        run()
    return recorder


def groups_of(run: Callable[[], object]) -> list[CallGroup]:
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
    return replace(Observations("s.py", wall_s, calls, (), 0.0, "", 0.0), **more)


def tried(saving: float, *calls: int, **more: Any) -> TriedChange:
    """Five pairs of these calls that all save this share of them."""
    rounds = ((1.0, 1 - saving),) * 5
    return replace(TriedChange("grad-on", calls, rounds, "s.py:4", "gradients are recorded", "no grad", "one"), **more)
