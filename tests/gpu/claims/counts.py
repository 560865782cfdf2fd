"""Counted bytes compared with the memory controller's (Nsight Compute): a stream and two steps."""

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from profiler.counting.attention import AttentionCore
from profiler.counting.chosen_kernel import SdpaStep, attention_path
from profiler.counting.walk import walk
from profiler.device.machine import machine_for
from profiler.engines.transformers import EagerEngine
from profiler.facts.step import Step
from profiler.roofs.sampler import random_data

from .bench import Attempt, Bench, Check, NotRunError

_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_STREAM_BYTES = 1 << 30
_PROMPT, _SLOTS = 512, 520
_PARTS = ("stream", "decode", "prefill")
"""Each runs on a separate stream; Nsight Compute's rows name the stream, in the order of launches."""


def attempts(bench: Bench) -> Iterator[Attempt]:
    yield Attempt("bytes: the memory controller", _bytes, least_s=75.0)


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
        path = attention_path("sdpa", cores, SdpaStep(bench.device, bench.dtype, query, query + context))
        yield _next_to(phase, work.work(Step(1, query, context), path), of_part[phase])


def _next_to(phase: str, counted: Any, total: float) -> Check:
    share, weights = float(counted.executed_bytes) / total, float(counted.weight_bytes)
    value = {
        "executed / memory controller": share,
        "memory controller": total,
        "weights": weights,
        "activations": float(counted.activation_bytes),
        "redundant": {str(cause): float(nbytes) for cause, nbytes in counted.redundant_bytes.items()},
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
    engine, data = EagerEngine(model, machine), random_data(_STREAM_BYTES, device)
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
