"""Ask a GPU what only a GPU can answer: python tests/gpu/questions.py --half 1 --out FOLDER

The questions are in the order of their value, each with its most seconds and what its answer decides. The two halves
fit 15 minutes together. `--only roof,compile` asks some of them. FOLDER gets answers.json, which is written again after
every question, a log of each, and runs.tar.gz with the runs. Models have random weights; nothing is downloaded.
`--list` prints the questions and asks none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve()
_ROOT = _HERE.parents[2]
_RANDOM = "--weights random --dtype bfloat16 --device cuda:0"
_MISTRAL = f"mistral-7b-v0.1 {_RANDOM} --new-tokens 32"
_MIB = 1 << 20


@dataclass(frozen=True)
class Question:
    """A run of roofscope, or a measurement of this file."""

    name: str
    half: int
    seconds: float
    """At most; then it is ended, and the next one follows."""
    decides: str
    run: str = ""
    """Arguments of `roofscope run`; without them `--ask NAME` measures."""
    environment: str = ""


QUESTIONS = (
    Question(
        "compile", 1, 200, "what torch.compile saves of a decode step: about 6.3 ms are computed for an H100",
        f"{_MISTRAL} --prompt-lens 128 --batch-sizes 1 --engine eager,graph,compile --budget 150",
    ),
    Question("roof", 1, 30, "whether the memory roof is t0 + n/B, and what t0 is"),
    Question("attention", 1, 40, "which kernels take grouped heads, and what a first use of each length costs"),
    Question(
        "trials", 1, 90, "which changes can be tried on a GPU, and which fail",
        f"smollm2-135m {_RANDOM} --prompt-lens 64 --batch-sizes 1,8 --budget 60",
    ),
    Question("counters", 1, 25, "whether NVML has GPM metrics without root, and what they say of a known stream"),
    Question("default", 2, 95, "what the default minute answers", _MISTRAL),
    Question(
        "nf4", 2, 110, "the main use: the packed and the dense path, and whether its step can be captured",
        f"{_MISTRAL} --quant nf4 --prompt-lens 128 --batch-sizes 1,8 --engine eager,graph --budget 80",
    ),
    Question(
        "tried", 2, 165, "what each change saves when it is tried, torch.compile on four layers too",
        f"{_MISTRAL} --prompt-lens 128 --batch-sizes 1 --budget 120",
    ),
    Question(
        "deep", 2, 65, "a step bound by its KV cache, and one that runs out of memory",
        f"{_MISTRAL} --context-lens 4096,32000 --batch-sizes 1,16 --no-levers --budget 40",
    ),
    Question("host", 2, 40, "whether the steps of a disturbed host are preempted: its CPU time next to wall time"),
    Question(
        "tuned", 2, 130, "what inductor's own matrix-vector products save: about 5.8 ms are computed",
        f"{_MISTRAL} --prompt-lens 128 --batch-sizes 1 --engine compile --no-levers --budget 90",
        "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1",
    ),
    Question(
        "no-cudnn", 2, 60, "what a first use and a steady step cost without cuDNN's attention",
        f"{_MISTRAL} --prompt-lens 128 --batch-sizes 1 --no-levers --budget 35", "TORCH_CUDNN_SDPA_DEPRIORITIZED=1",
    ),
)  # fmt: skip


def roof() -> dict[str, Any]:
    """Reads of 0.25 to 4 GiB, with an event per call or one pair per 20, and matrix-vector products in a graph."""
    import numpy as np
    import torch

    torch.manual_seed(0)
    answers: dict[str, Any] = {}
    data = torch.rand(4 << 28, device="cuda")
    for name, group in (("an event per call", 1), ("one pair per 20 calls", 20)):
        points = []
        for mib in (256, 512, 1024, 2048, 4096):
            part = data[: mib * _MIB // 4]
            seconds = _timed(part.sum, groups=200 // group if mib < 2048 else 60 // group + 1, calls=group)
            points.append((part.nbytes, statistics.median(seconds)))
        sizes, times = np.array(points).T
        per_byte, fixed_s = np.polyfit(sizes, times, 1)
        answers[name] = {"points": points, "t0_s": fixed_s, "bytes_per_s": 1 / per_byte}
    del data
    points = []
    x = torch.rand(1, 4096, device="cuda", dtype=torch.bfloat16)
    for rows in (256, 1024, 4096, 14336, 32000, 64000):
        copies = max(2, (256 << 20) // (rows * 4096 * 2))
        weights = [torch.rand(rows, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(min(copies, 64))]
        replay = _graph(lambda weights=weights: [torch.nn.functional.linear(x, weight) for weight in weights])
        seconds = _timed(replay, groups=20, calls=1)
        points.append((weights[0].nbytes, statistics.median(seconds) / len(weights)))
    sizes, times = np.array(points).T
    per_byte, fixed_s = np.polyfit(sizes, times, 1)
    answers["products of one row, in a graph"] = {"points": points, "t0_s": fixed_s, "bytes_per_s": 1 / per_byte}
    return answers


def attention() -> dict[str, Any]:
    """Seconds of one decode step's attention (32 query heads on 8) by kernel, and of its first use at new lengths."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    def tensors(length: int) -> tuple[Any, Any, Any]:
        def heads(count: int, tokens: int) -> Any:
            return torch.rand(1, count, tokens, 128, device="cuda", dtype=torch.bfloat16)

        return heads(32, 1), heads(8, length), heads(8, length)

    answers: dict[str, Any] = {}
    backends = {
        "as torch chooses": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
        "memory-efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
    }  # fmt: skip
    mask = torch.ones(1, 1, 1, 160, dtype=torch.bool, device="cuda")
    mask[..., 140:] = False
    for name, backend in backends.items():
        for masked in (False, True):
            for grouped in (True, False):
                query, key, value = tensors(160)
                if not grouped:
                    key, value = (each.repeat_interleave(4, dim=1) for each in (key, value))
                call = lambda q=query, k=key, v=value, m=masked, g=grouped: sdpa(  # noqa: E731
                    q, k, v, attn_mask=mask if m else None, enable_gqa=g
                )
                label = f"{name}, {'masked' if masked else 'no mask'}, {'grouped' if grouped else 'repeated'}"
                try:
                    with sdpa_kernel(backend) if backend is not None else sdpa_kernel(list(backends.values())[1:]):
                        call()
                        answers[label] = statistics.median(_timed(call, groups=20, calls=20))
                except RuntimeError as error:
                    answers[label] = str(error).splitlines()[0][:120]
    for name, enabled in (("cudnn on", True), ("cudnn off", False)):
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        first, later = [], []
        for length in range(200, 220):
            query, key, value = tensors(length)
            for times in (first, later):
                torch.cuda.synchronize()
                start_s = time.perf_counter()
                sdpa(query, key, value, enable_gqa=True)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start_s)
        answers[f"first use of a length, {name}"] = statistics.median(first)
        answers[f"second use of a length, {name}"] = statistics.median(later)
    return answers


def counters() -> dict[str, Any]:
    """NVML's GPM metrics over two seconds of reads, of products and of nothing."""
    import pynvml as nvml
    import torch

    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    answers: dict[str, Any] = {"supported": nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice}
    data = torch.rand(1 << 28, device="cuda")
    a, b = (torch.rand(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    loads: dict[str, Callable[[], object]] = {
        "sum of 1 GiB": data.sum, "product of 8192": lambda: a @ b, "nothing": lambda: time.sleep(0.01),
    }  # fmt: skip
    names = {"sm_util": 2, "any_tensor_util": 5, "dram_bw_util": 10, "graphics_util": 1}
    for name, call in loads.items():
        for wait_s in (0.1, 1.0):
            samples = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
            _busy(call, 0.2)
            nvml.nvmlGpmSampleGet(handle, samples[0])
            calls, seconds = _busy(call, wait_s)
            nvml.nvmlGpmSampleGet(handle, samples[1])
            asked = nvml.c_nvmlGpmMetricsGet_t()
            asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(names)
            asked.sample1, asked.sample2 = samples
            for place, metric in enumerate(names.values()):
                asked.metrics[place].metricId = metric
            start_s = time.perf_counter()
            nvml.nvmlGpmMetricsGet(asked)
            found = {each: asked.metrics[place].value for place, each in enumerate(names)}
            asking_s = time.perf_counter() - start_s
            answers[f"{name}, {wait_s} s"] = found | {"calls": calls, "seconds": seconds, "asking_s": asking_s}
            for each in samples:
                nvml.nvmlGpmSampleFree(each)
    return answers


def host() -> dict[str, Any]:
    """Wall seconds, CPU seconds and stolen time of 120 eager decode steps, 22 layers of TinyLlama's width."""
    import torch

    sys.path.insert(0, str(_ROOT))
    from profiler.device.machine import machine_for
    from profiler.engines.registry import ENGINES
    from profiler.loading.load import load
    from profiler.run.options import Options
    from profiler.run.validate import prepare

    prepared = prepare(Options(model="tinyllama-1.1b", weights="random", dtype="bfloat16", device="cuda:0"))
    loaded, machine = load(prepared.request, prepared.config), machine_for(prepared.request.device)
    engine = ENGINES["eager"](loaded.module, machine)
    rows = []
    with torch.inference_mode():
        state = engine.fill(1, 128, 260)
        for _ in range(120):
            torch.cuda.synchronize()
            before = time.perf_counter(), time.thread_time(), _stolen_ticks()
            state = engine.decode(state)
            issued = time.perf_counter(), time.thread_time(), _stolen_ticks()
            torch.cuda.synchronize()
            rows.append(
                (*(after - start for start, after in zip(before, issued, strict=True)), time.perf_counter() - before[0])
            )
    steady = rows[20:]
    columns = dict(
        zip(("issue_wall_s", "issue_cpu_s", "stolen_ticks", "step_s"), zip(*steady, strict=True), strict=True)
    )
    summary: dict[str, Any] = {
        name: {"median": statistics.median(each), "low": min(each), "high": max(each), "sum": sum(each)}
        for name, each in columns.items()
    }
    return summary | {"load": Path("/proc/loadavg").read_text().strip(), "rows": steady}


MEASURED: dict[str, Callable[[], dict[str, Any]]] = {
    "roof": roof, "attention": attention, "counters": counters, "host": host,
}  # fmt: skip


def _stolen_ticks() -> int:
    return int(Path("/proc/stat").read_text().split("\n")[0].split()[8])


def _busy(call: Callable[[], object], seconds: float) -> tuple[int, float]:
    import torch

    start_s, calls = time.perf_counter(), 0
    while time.perf_counter() - start_s < seconds:
        call()
        calls += 1
        if calls % 20 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return calls, time.perf_counter() - start_s


def _graph(work: Callable[[], object]) -> Callable[[], object]:
    import torch

    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _timed(call: Callable[[], object], groups: int, calls: int) -> list[float]:
    """Seconds per call of groups of calls between two events, after one group that is not timed."""
    import torch

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    marks = []
    for number in range(groups + 1):
        if number:
            marks.append(mark())
        for _ in range(calls):
            call()
    marks.append(mark())
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e-3 / calls for before, after in pairwise(marks)]


def _asked(question: Question, out: Path) -> dict[str, Any]:
    """Ask in a process of its own; what it printed is in FOLDER/NAME.log."""
    if question.run:
        command = [
            sys.executable,
            "-m",
            "profiler",
            "run",
            *question.run.split(),
            "--plain",
            "--out",
            f"runs/gpu/{question.name}",
        ]
    else:
        command = [sys.executable, str(_HERE), "--ask", question.name]
    environment = os.environ | dict([question.environment.split("=")] if question.environment else [])
    start_s, timed_out, code = time.perf_counter(), False, None
    with (out / f"{question.name}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, cwd=_ROOT, env=environment, timeout=question.seconds, stdout=log, stderr=subprocess.STDOUT,
                check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            timed_out = True
    text = (out / f"{question.name}.log").read_text(errors="replace")
    found = {
        "decides": question.decides,
        "seconds": time.perf_counter() - start_s,
        "exit": code,
        "timed_out": timed_out,
    }
    if not question.run and code == 0:
        found["answer"] = json.loads(text.splitlines()[-1])
    print(f"== {question.name}: {found['seconds']:.0f} s, exit {code}\n{text[-3000:]}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", type=int, choices=(1, 2))
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--ask", choices=tuple(MEASURED), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.ask:
        print(json.dumps(MEASURED[options.ask]()))
        return 0
    names = options.only.split(",") if options.only else []
    chosen = [each for each in QUESTIONS if options.half in (None, each.half) and (not names or each.name in names)]
    if options.list:
        for each in chosen:
            print(f"{each.half}  {each.name:10} {each.seconds:4.0f} s  {each.decides}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    answers: dict[str, Any] = {}
    for question in chosen:
        answers[question.name] = _asked(question, options.out)
        (options.out / "answers.json").write_text(json.dumps(answers, indent=1) + "\n")
        with tarfile.open(options.out / "runs.tar.gz", "w:gz") as packed:
            if (_ROOT / "runs/gpu").exists():
                packed.add(_ROOT / "runs/gpu", arcname="runs")
    return 0 if all(found["exit"] == 0 for found in answers.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
