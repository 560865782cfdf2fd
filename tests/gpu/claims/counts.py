"""FLOPs, compared with torch's counter on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from profiler.counting.walk import walk
from profiler.facts.step import ExecutionPath, Step

from .bench import Attempt, Bench, Check

_LENGTH = 64


def attempts(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("prefill FLOPs: torch's counter", _flops, cuda=False)


def _flops(bench: Bench) -> Iterator[Check]:
    """Check FLOPs in plain attention: torch 2.11's counter refuses grouped heads in SDPA (PR #177188 came later).

    Linears are `mm` and `addmm`. Attention is `bmm`, and so is the rotary embedding if transformers computes it as a
    product (5.17, modeling_llama.py: inv_freq [width / 2, 1] by positions [1, S], for each sequence).
    """
    from torch.utils.flop_counter import FlopCounterMode

    model = bench.load(bench.small)
    model.set_attn_implementation("eager")
    work, step = walk(model), Step(1, _LENGTH, 0)
    ids = torch.zeros(1, _LENGTH, dtype=torch.long, device=bench.device)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)
    counted = {str(op).rpartition(".")[2]: flops for op, flops in counter.get_flop_counts()["Global"].items()}
    path = ExecutionPath(attention="eager")
    attention = sum(int(op.work(step, path).executed_flops) for op in work.operators if op.group == "attention")
    linears = int(work.work(step, path).executed_flops) - attention
    found = counted.get("mm", 0) + counted.get("addmm", 0)
    yield Check("prefill FLOPs of all linears: torch's counter", found == linears, counted, f"= {linears}")
    rotary = _LENGTH * getattr(model.config, "head_dim", model.config.hidden_size // model.config.num_attention_heads)
    passed = counted.get("bmm", 0) in (attention, attention + rotary)
    limit = f"= {attention}, or {rotary} more for the rotary embedding"
    yield Check("prefill FLOPs of plain attention: torch's counter", passed, counted, limit)
