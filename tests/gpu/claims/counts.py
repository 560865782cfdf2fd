"""FLOPs compared with torch's counter; bytes with the memory controller's (Nsight Compute): a stream, two steps."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from profiler.counting.attention import AttentionCore
from profiler.counting.attention_kernel import attention_path
from profiler.counting.walk import walk
from profiler.device.machine import machine_for
from profiler.engines.transformers import EagerEngine
from profiler.facts.step import ExecutionPath, Step
from profiler.roofs.sampler import random_bytes

from .bench import Attempt, Bench, Check, NotRunError

_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_STREAM_BYTES = 1 << 30
_LENGTH = 64
_PROMPT, _SLOTS = 512, 520
_PARTS = ("stream", "decode", "prefill")
"""Each runs on a separate stream; Nsight Compute's rows name the stream, in the order of launches."""


def flops(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("prefill FLOPs: torch's counter", _flops, cuda=False)


def nbytes(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("bytes: the memory controller", _bytes, least_s=75.0)


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


def _bytes(bench: Bench) -> Iterator[Check]:
    if shutil.which("ncu") is None:
        raise NotRunError("Nsight Compute (ncu) is not installed")
    folder = bench.made_model("mistral-7b-v0.1", "mistral-4-layers", "MistralForCausalLM", num_hidden_layers=4)
    options = ["--metrics", ",".join(_METRICS), "--csv", "--print-units", "base", "--clock-control", "none",
               "--cache-control", "none", "--profile-from-start", "off"]  # fmt: skip
    own = [sys.executable, str(Path(__file__).resolve().parents[1] / "acceptance.py"), "--ncu-target", folder]
    limit_s = max(30.0, bench.left_s - 20)
    done = subprocess.run(["ncu", *options, *own], capture_output=True, text=True, timeout=limit_s, check=False)
    rows = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not rows:
        raise NotRunError(f"ncu: {' '.join((done.stderr + done.stdout).split())[-300:]}")
    total: dict[str, float] = {}
    for row in csv.DictReader(rows):
        if row["Metric Name"] in _METRICS:
            total[row["Stream"]] = total.get(row["Stream"], 0.0) + float(row["Metric Value"].replace(",", ""))
    if len(total) != len(_PARTS):
        raise RuntimeError(f"ncu saw {len(total)} streams where {len(_PARTS)} were used")
    of_part = dict(zip(_PARTS, total.values(), strict=True))
    share = _STREAM_BYTES / of_part["stream"]
    value = {"read": _STREAM_BYTES, "memory controller": of_part["stream"]}
    yield Check("bytes of a stream that is read / memory controller", abs(share - 1) < 0.03, value, "within 3 %")
    work = walk(bench.load(folder))
    cores = [op for op in work.operators if isinstance(op, AttentionCore)]
    for phase, query, context in (("decode", 1, _PROMPT + 1), ("prefill", _PROMPT, 0)):
        path = attention_path("sdpa", cores, bench.device, bench.dtype, query=query, keys=query + context)
        yield _next_to(phase, work.work(Step(1, query, context), path), of_part[phase])


def _next_to(phase: str, counted: Any, total: float) -> Check:
    share, weights = float(counted.executed_bytes) / total, float(counted.weight_bytes)
    value = {
        "executed / memory controller": share,
        "memory controller": total,
        "weights": weights,
        "activations": float(counted.activation_bytes),
        "avoidable": {str(cause): float(nbytes) for cause, nbytes in counted.avoidable_bytes.items()},
    }
    if phase == "decode":
        return Check("decode bytes: executed / memory controller", abs(share - 1) < 0.05, value, "within 5 %")
    # A prefill's activations stay in the L2 between two kernels if they fit.
    passed = weights <= 1.05 * total and share > 0.95
    return Check("prefill bytes: weights <= memory controller <= executed", passed, value, "within 5 %")


def ncu_target(bench: Bench) -> None:
    """Run the parts between the profiler's marks, in the process that Nsight Compute profiles."""
    device, machine = bench.device, machine_for(bench.device)
    model = bench.load(bench.model)
    engine, data = EagerEngine(model, machine), random_bytes(_STREAM_BYTES, device)
    ids = torch.zeros(1, _PROMPT, dtype=torch.long, device=device)
    with torch.inference_mode():
        state = engine.prefill(ids, _SLOTS)
        parts = (data.sum, lambda: engine.decode(state), lambda: engine.prefill(ids, _SLOTS))
        streams = [torch.cuda.Stream(device) for _ in parts]
        for counted in (False, True):  # objects made at their first use, such as workspaces of cuBLAS, are not counted
            torch.cuda.synchronize(device)
            if counted:
                torch.cuda.profiler.start()
            for stream, part in zip(streams, parts, strict=True):
                with torch.cuda.stream(stream):
                    part()
                torch.cuda.synchronize(device)
        torch.cuda.profiler.stop()
