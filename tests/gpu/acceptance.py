"""Check roofscope's claims on this card: python tests/gpu/acceptance.py --out FOLDER

Needs no network: models are cards with random weights, sized by the card's memory. Writes the runs, the pictures and
`scoreboard.json` into FOLDER: every check with its figure, its threshold, and whether it held. Takes under nine minutes
on one card, beside a host as slow as Colab's too (on simulated ones); groups that have not begun by then are listed as
not run, and one that has is finished. Nothing of the card's settings is changed.

--dry-run runs the very same script on a CPU with a tiny model; checks that need CUDA are then listed as not run.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import profiler
from profiler.diagnosis.scaling import crossover
from profiler.diagnosis.step_time import TERMS
from profiler.engines.base import greedy_tokens
from profiler.engines.registry import ENGINES
from profiler.engines.transformers import EagerEngine
from profiler.errors import RequestError
from profiler.job.batch_test import prepare_batch_test
from profiler.job.options import Options
from profiler.job.run import execute
from profiler.job.selftest import run_selftest
from profiler.loading.catalog import resolve
from profiler.loading.config import load_config
from profiler.loading.load import load
from profiler.loading.request import ModelRequest, dtype_name
from profiler.machine.clock import time_calls
from profiler.machine.device import describe, software
from profiler.machine.machine import Machine, machine_for
from profiler.machine.telemetry import Watch, source_for
from profiler.record.run import Run, read_run
from profiler.report.plots import PLOTS, save
from profiler.report.progress import QuietListener
from profiler.roofs.measure import measure
from profiler.roofs.products import measurable_dtypes
from profiler.roofs.sampling import STAGE_BUDGET_S
from profiler.work.conversions import conversion_calls
from profiler.work.formats import stored
from profiler.work.operators import Linear
from profiler.work.step import ExecutionPath, Step
from profiler.work.walk import linear_modules, walk

TIME_LIMIT_S = 9 * 60.0
_GPU = "claimed of GPUs"
_INTERLEAVED = 10
"""Turns of a plain loop and of ours."""
_HEATING_S = 5.0
_HEATING_SIDE = 16384
_LARGE_BYTES = 5e9
"""Weights from which small kernels do not count beside them at batch 1."""
_A_PRECISION = {"budget_s": 6.0, "new_tokens": 16}
"""Of each run that differs from the others by its weights' format alone: bytes and what ran need no long sweep."""
SPLIT = list(TERMS)
NCU_METRICS = "dram__bytes_read.sum,dram__bytes_write.sum"


@dataclass
class Check:
    """One claim, held against a figure."""

    name: str
    passed: bool | None
    """None: not run, and `why` says for what reason."""
    value: Any = None
    threshold: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        # numpy's own truths are neither True nor False to `is`, by which checks are counted.
        self.passed = None if self.passed is None else bool(self.passed)


@dataclass
class Bench:
    """What the checks share."""

    device: torch.device
    model: str
    """The model of the main checks."""
    small: str
    """A model that is quick to load, for the checks of the time itself."""
    folder: Path
    # Looked up when it is asked: a simulated card's clock comes after this class.
    started_s: float = field(default_factory=lambda: time.perf_counter())

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def machine(self) -> Machine:
        return machine_for(self.device)

    @property
    def left_s(self) -> float:
        return TIME_LIMIT_S - (time.perf_counter() - self.started_s)

    def run(self, name: str, model: str | None = None, **options: Any) -> Run:
        options = {"budget_s": 20.0 if self.cuda else 1.5, "new_tokens": 32 if self.cuda else 8, **options}
        return profiler.profile(
            model or self.model, device=self.device.type, weights="random", out=self.folder / name, **options
        )

    @property
    def dtype(self) -> torch.dtype:
        """A 16-bit dtype that this device multiplies: float16 on cards without bfloat16 units (T4)."""
        old = self.cuda and torch.cuda.get_device_capability(self.device) < (8, 0)
        return torch.float16 if old else torch.bfloat16

    def load(self, model: str, dtype: torch.dtype | None = None, quant: Any = "none") -> Any:
        source = resolve(model)
        request = ModelRequest(source, self.device, dtype or self.dtype, quant)
        return load(request, load_config(source)).module


def roofs(bench: Bench) -> Iterator[Check]:
    """1. Labels of known kernels; roofs against the datasheet and against themselves."""
    info = bench.machine.info
    dtypes = measurable_dtypes(bench.device)
    model_dtype = "bfloat16" if bench.cuda else "float32"
    if bench.cuda:
        _heat(bench)
    first, second = (
        measure(bench.machine, dtypes, model_dtype=model_dtype, stage_budget_s=STAGE_BUDGET_S if bench.cuda else 0.1)
        for _ in range(2)
    )
    for result in islice(run_selftest(bench.machine, first), None if bench.cuda else 3):
        right = result.right if bench.cuda else None
        yield Check(f"selftest: {result.name}", right, result.verdict.regime, result.expected, _GPU)
    for name in dtypes:
        once, again = first.compute[name], second.compute[name]
        # At one clock: a card lowers it as it warms, and products follow it.
        slowed = again.clock_hz / once.clock_hz if again.clock_hz and once.clock_hz else 1.0
        apart = abs(again.per_s / once.per_s / slowed - 1)
        yield Check(f"{name} product measured twice", apart < 0.03 if bench.cuda else None, apart, "< 3 % apart", _GPU)
        peak = info.datasheet.peak_flops_per_s(name) if info.datasheet else None
        if info.datasheet and peak:
            # Peaks are stated at the rated clock, above which cards boost.
            boost = max(1.0, (once.clock_hz or 0.0) / info.datasheet.rated_clock_hz)
            share = once.per_s / peak / boost
            yield Check(f"{name} product / datasheet", 0.3 < share < 1.02, share, "0.3 .. 1.02")
    apart = abs(second.memory_bytes_per_s / first.memory_bytes_per_s - 1)
    yield Check("stream measured twice", apart < 0.03 if bench.cuda else None, apart, "< 3 % apart", _GPU)
    if info.datasheet is None:
        yield Check("roofs / datasheet", None, why="this device is not in the table of datasheets")
        return
    share = first.memory_bytes_per_s / info.datasheet.bandwidth_bytes_per_s
    yield Check("stream / datasheet", 0.6 < share < 1.02, share, "0.6 .. 1.02")
    if healthy := info.datasheet.healthy_gemm_flops_per_s:
        dtype = info.datasheet.healthy_dtype
        share = first.compute[dtype].per_s / healthy
        yield Check(f"{dtype} product / a healthy card's", share > 0.9, share, "> 0.9")


def _heat(bench: Bench) -> None:
    """Some seconds of products: a card that is cold at first would be faster in the first of two measurements."""
    x = torch.randn(_HEATING_SIDE, _HEATING_SIDE, device=bench.device, dtype=torch.float16)
    end_s = time.perf_counter() + _HEATING_S
    while time.perf_counter() < end_s:
        x @ x
        bench.machine.clock.synchronize()


def truth_of_time(bench: Bench) -> Iterator[Check]:
    """2. A plain loop beside ours, interleaved in this process; the split adds up; the instrument is cheap."""
    from profiler.grid import Cell, make_grid
    from profiler.timing.outcomes import Visit
    from profiler.timing.sweep import Plan, sweep
    from profiler.timing.visit import seeded_prompts, warm_up

    model, clock, cell = bench.load(bench.small), bench.machine.clock, Cell(1, 64, 24)
    vocab, engine = model.config.vocab_size, EagerEngine(model, bench.machine)
    grid = make_grid([64], [1], 24)
    warm_up(engine, cell, bench.machine, vocab_size=vocab, budget_s=3.0)
    ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
    ids = seeded_prompts(cell, vocab).to(bench.device)
    for _ in range(_INTERLEAVED):
        plan = Plan(grid, budget_s=1e-9)
        [visit] = list(sweep({"eager": engine}, plan, machine=bench.machine, vocab_size=vocab))
        assert isinstance(visit, Visit)
        with torch.inference_mode():
            prefills_s: list[float] = []
            for _ in range(3):
                # Each on its own, as ours: in a row the last kernels of one would hide behind the next one's launches.
                clock.synchronize()
                marks = [clock.mark()]
                output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
                token = output.logits[:, -1:].argmax(-1)
                marks.append(clock.mark())
                clock.synchronize()
                prefills_s += clock.seconds(marks)
            marks = [clock.mark()]
            for _ in range(23):
                output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
                token = output.logits[:, -1:].argmax(-1)
                marks.append(clock.mark())
            clock.synchronize()
            steps_s = clock.seconds(marks)
        ratios["prefill"].append(statistics.median(visit.prefills_s) / statistics.median(prefills_s))
        ratios["decode"].append(statistics.median(visit.decode_s[1:]) / statistics.median(steps_s[1:]))
    for phase, found in ratios.items():
        ratio = statistics.median(found)
        tolerance = 0.02 if bench.cuda else 0.5
        yield Check(f"{phase}: ours / a plain loop", abs(ratio - 1) < tolerance, ratio, f"within {tolerance:.0%}")
    run = bench.run(
        "time", prompt_lens=[64, 512] if bench.cuda else [16], batch_sizes=[1, 4, 16] if bench.cuda else [1, 2]
    )
    cells = run.cells[run.cells["status"] == "ok"]
    error = (cells[SPLIT].sum(axis=1) / cells["latency_s"] - 1).abs().max()
    yield Check("the split adds up to the time", error < 1e-6, error, "exactly")
    share = float((cells["unexplained_s"].abs() < 0.15 * cells["latency_s"]).mean())
    yield Check("cells with under 15 % unexplained", share >= 0.8 if bench.cuda else None, share, ">= 0.8", _GPU)
    joules = cells[cells["phase"] == "decode"]["joules_per_token"]
    counted = joules.dropna()
    passed = bool((counted > 0).all()) if bench.cuda and len(counted) else None
    why = "" if len(counted) else "no energy counter, or no visit that it tells"
    yield Check("joules a token", passed, counted.round(4).tolist(), "> 0", why)
    cost = (run.document.engine.instrument_s_per_step or 0.0) / cells[cells["phase"] == "decode"]["latency_s"].min()
    yield Check("instrument / fastest step", cost < 0.005, cost, "< 0.5 %")


def truth_of_counts(bench: Bench) -> Iterator[Check]:
    """3. FLOPs against torch's counter on the device with SDPA; bytes against the memory controller, where ncu is."""
    from torch.utils.flop_counter import FlopCounterMode

    model = bench.load(bench.small)
    work = walk(model)
    ids = torch.zeros(1, 64, dtype=torch.long, device=bench.device)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)
    counted = int(work.work(Step(1, 64, 0), ExecutionPath()).model_flops)
    # The counter charges attention kernels with the full square, and knows none of the CPU's.
    full = int(work.work(Step(1, 64, 0), ExecutionPath(kernel="math")).executed_flops)
    total = counter.get_total_flops()
    if bench.cuda:
        yield Check("prefill FLOPs: torch's counter", total == full, {"torch": total, "full square": full}, "equal")
    else:
        linears = counted - sum(
            int(op.work(Step(1, 64, 0), ExecutionPath()).model_flops)
            for op in work.operators
            if op.group == "attention"
        )
        yield Check("prefill FLOPs of all linears: torch's counter", total == linears, total, f"= {linears}")
    if not bench.cuda:
        yield Check("bytes against the memory controller", None, why="needs CUDA")
    elif shutil.which("ncu") is None:
        yield Check("bytes against the memory controller", None, why="Nsight Compute (ncu) is not installed")
    else:
        del model
        _free()
        few = _few_layers(bench.folder)
        work = walk(bench.load(str(few)))
        for phase in ("decode", "prefill"):
            yield from _dram_bytes(bench, work, few, phase)


def _few_layers(folder: Path) -> Path:
    """Mistral-7B with four layers, as a folder with a config and no weights."""
    config = load_config(resolve("mistral-7b-v0.1"))
    config.num_hidden_layers = 4
    config.architectures = ["MistralForCausalLM"]
    path = folder / "mistral-4-layers"
    config.save_pretrained(path)
    return path


def _dram_bytes(bench: Bench, work: Any, model: Path, phase: str) -> Iterator[Check]:
    command = ["ncu", "--metrics", NCU_METRICS, "--csv", "--clock-control", "none", "--profile-from-start", "off"]
    own = [sys.executable, __file__, "--ncu-target", str(model), "--ncu-phase", phase]
    done = subprocess.run(
        [*command, *own], capture_output=True, text=True, timeout=max(60.0, bench.left_s), check=False
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not rows:
        yield Check("bytes against the memory controller", None, why=f"ncu: {(done.stderr or done.stdout)[-200:]}")
        return
    units = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    total = sum(
        float(row["Metric Value"].replace(",", "")) * units[row["Metric Unit"]]
        for row in csv.DictReader(rows)
        if row.get("Metric Name") in NCU_METRICS.split(",")
    )
    counted = work.work(Step(1, 1, 513) if phase == "decode" else Step(1, 512, 0), ExecutionPath())
    share = float(counted.executed_bytes) / total
    figures = {
        "executed / memory controller": share,
        "memory controller": total,
        "weights": float(counted.weight_bytes),
        "activations": float(counted.activation_bytes),
        "avoidable": {cause: float(nbytes) for cause, nbytes in counted.avoidable_bytes.items()},
    }
    if phase == "decode":
        yield Check("decode bytes: executed / memory controller", abs(share - 1) < 0.05, figures, "within 5 %")
        return
    # A prefill's activations stay in the L2 cache between two kernels where they fit: executed bytes bound from above,
    # weights from below.
    passed = float(counted.weight_bytes) <= 1.05 * total and share > 0.95
    yield Check(
        "prefill bytes: weights <= memory controller <= executed", passed, figures, "activations may stay in L2"
    )


def ncu_target(model_name: str, phase: str) -> None:
    """One step between the profiler's marks, for Nsight Compute to look at."""
    source = resolve(model_name)
    model = load(ModelRequest(source, torch.device("cuda"), torch.bfloat16), load_config(source)).module
    engine = EagerEngine(model, machine_for(model.device))
    with torch.inference_mode():
        ids = torch.zeros(1, 512, dtype=torch.long, device="cuda")
        state = engine.decode(engine.prefill(ids, 520))
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        if phase == "decode":
            engine.decode(state)
        else:
            engine.prefill(ids, 520)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def engines(bench: Bench) -> Iterator[Check]:
    """4. The same greedy tokens from every engine; their times side by side; the best against the memory roof."""
    alike = [name for name in ENGINES if not ENGINES[name].pads]  # of one length, which is nothing to pad
    names = [name for name in alike if bench.cuda or name in ("eager", "static")]
    model = bench.load(bench.small, torch.float32)
    prompt = torch.arange(1, 17, device=bench.device)[None]
    tokens = {name: greedy_tokens(ENGINES[name](model, bench.machine), prompt, 16).tolist() for name in names}
    for name in names[1:]:
        yield Check(f"tokens: {name} = eager", tokens[name] == tokens["eager"], None, "equal")
    for name in set(alike) - set(names):
        yield Check(f"tokens: {name} = eager", None, why="needs CUDA (compile is tested on a CPU elsewhere)")
    del model
    _free()
    run = bench.run("engines", engine=",".join(names), prompt_lens=[128 if bench.cuda else 16], batch_sizes=[1])
    decode = run.cells[run.cells["phase"] == "decode"]
    times = {row["engine"]: row["latency_s"] for row in decode.to_dict("records")}
    best = float(decode["bytes_per_s"].max()) / run.document.ceilings.memory_bytes_per_s
    large = bench.cuda and run.document.model.storage_bytes > _LARGE_BYTES
    fastest = decode.sort_values("latency_s").iloc[0]
    # A thousand small kernels of 2 us each take a fifth of such a step, whose replay runs them one after the other.
    left = 1 - float(fastest["kernel_s"]) / float(fastest["latency_s"])
    passed = best / left >= 0.85 if large else None
    why = "" if large else "a claim about 7B models on GPUs"
    missing = {term: float(fastest[term]) for term in SPLIT if term not in ("weights_s", "kv_s")}
    figures = {
        "share": best,
        "kernels_lose": 1 - left,
        "step_s": times,
        "engine": fastest["engine"],
        "missing_s": missing,
    }
    threshold = ">= 0.85 of the time that kernels, run alone, do not lose"
    yield Check("best engine / measured bandwidth, batch 1", passed, figures, threshold, why)
    if "graph" in times:
        host = 1 - times["graph"] / times["eager"]
        eager = decode[decode["engine"] == "eager"].iloc[0]
        # A replay keeps the gaps between its kernels: near one half it agrees with either verdict.
        open_case = abs(host - 0.5) < 0.1 or eager["regime"] in ("mixed", "inconclusive")
        agree = open_case or (eager["regime"] == "overhead-bound") == (host >= 0.5)
        yield Check("overhead verdict agrees with graph replay", agree, {"saved": host, "regime": eager["regime"]})


def precision(bench: Bench) -> Iterator[Check]:
    """5. Every precision: bytes as stored, its time, what dequantising takes, and which kernel ran."""
    linear_bytes: dict[str, float] = {}
    batches = [1, 8, 64] if bench.cuda else [1, 2]
    brief: dict[str, Any] = {"prompt_lens": [32], "batch_sizes": batches, **(_A_PRECISION if bench.cuda else {})}
    for quant, share in _shares(bench):
        name = f"precision-{quant}"
        run = bench.run(name, bench.small, quant=quant, dtype=dtype_name(bench.dtype), **brief)
        model = bench.load(bench.small, quant=quant)
        linears = [op for op in walk(model).operators if isinstance(op, Linear) and op.group != "lm_head"]
        linear_bytes[quant] = sum(op.count * op.weight.weight_bytes for op in linears)
        found = linear_bytes[quant] / linear_bytes["none"]
        decode = run.cells[run.cells["phase"] == "decode"].set_index("batch_size")
        figures = {"share": found, "step_s": decode["latency_s"].to_dict()}
        tolerance = 0.03 if quant != "none" else 0.0
        yield Check(f"{quant}: linear bytes / 16 bits", abs(found - share) <= tolerance, figures, f"{share} +- 0.03")
        if quant in ("nf4", "int8wo"):
            yield _dequantisation(bench, model, float(decode["dequantise_s"].iloc[-1]), batches[-1], quant)
        if quant == "nf4" and bench.cuda:
            yield _kernel_that_ran(model)
        del model
        _free()
    other = "float16" if bench.dtype == torch.bfloat16 else "float32"
    run = bench.run(f"precision-{other}", bench.small, dtype=other, **brief)
    decode = run.cells[run.cells["phase"] == "decode"].set_index("batch_size")
    ended = bool((run.cells["status"] == "ok").all())
    yield Check(f"{other} beside {dtype_name(bench.dtype)}", ended, decode["latency_s"].to_dict(), "every cell ends")
    first, *_ = bench.folder.glob("precision-none")
    lost = _loses_from(bench, first)
    yield Check("from which batch on each loses against 16 bits", None, lost, why="shown, not judged")
    if bench.cuda and bench.model != "mistral-7b-v0.1":
        few = {**brief, "prompt_lens": [128], "batch_sizes": [1, 4]}
        run = bench.run("mistral-nf4", "mistral-7b-v0.1", quant="nf4", **few)
        ended = bool((run.cells["status"] == "ok").all())
        yield Check("Mistral-7B in nf4 fits", ended, run.document.model.storage_bytes, "every cell ends")
    if not bench.cuda:
        yield Check("bitsandbytes' kernel by its name in a trace", None, why="needs CUDA")


def _shares(bench: Bench) -> list[tuple[str, float]]:
    """Precisions that this device runs, with the share of 16 bits that their linears keep."""
    capability = torch.cuda.get_device_capability(bench.device) if bench.cuda else (0, 0)
    found = [("none", 1.0), ("int8", 0.51), ("nf4", 0.28), ("fp4", 0.28), ("int8wo", 0.51)]
    return [*found, *([("fp8", 0.51)] if capability >= (8, 9) or not bench.cuda else [])]


def _dequantisation(bench: Bench, model: Any, term_s: float, rows: int, quant: str) -> Check:
    """The term of the split against a loop of its own over the same kernel, at every linear of the model."""
    name = f"{quant}: the dequantisation term / a loop of its own"
    found = [conversion_calls(modules, rows, bench.dtype) for modules in linear_modules(model).values()]
    calls = [call for several in found for call in several]
    if not calls:
        return Check(name, term_s == 0.0, term_s, "0: its kernel is fused at this batch")
    machine = bench.machine

    def convert() -> None:
        for call in calls:
            call()

    with torch.inference_mode():
        if bench.cuda:
            # As a graph: one launch after the other, small kernels would be timed waiting for the host.
            with machine.beside():
                convert()
            run: Callable[[], object] = machine.capture(convert)
        else:
            run = convert
        times = time_calls(run, machine.clock, 12)
    ratio = term_s / statistics.median(times[2:])
    if bench.cuda:
        return Check(name, abs(ratio - 1) < 0.1, ratio, "within 10 %")
    return Check(name, None, ratio, why="on a CPU its calls are dispatch, which a loop cannot leave out")


def _loses_from(bench: Bench, first: Path) -> dict[str, Any]:
    base = read_run(first).cells
    lost: dict[str, Any] = {}
    for folder in sorted(bench.folder.glob("precision-*")):
        both = base.merge(read_run(folder).cells, on=["phase", "batch_size", "prompt_len"], suffixes=("", "_other"))
        slower = both[(both["phase"] == "decode") & (both["latency_s_other"] > both["latency_s"])]
        lost[folder.name] = int(slower["batch_size"].min()) if len(slower) else None
    return lost


def _kernel_that_ran(model: Any) -> Check:
    """One row through a 4-bit layer: the fused kernel, or dequantisation first, as the count predicts."""
    layer = model.model.layers[0].mlp.up_proj
    weight = stored(layer)
    x = torch.randn(1, layer.in_features, device=model.device, dtype=weight.compute_dtype)
    with torch.inference_mode(), torch.profiler.profile() as trace:
        layer(x)
    names = [event.key for event in trace.key_averages()]
    dequantised = any("dequant" in name.lower() for name in names)
    predicted = weight.dense_from_rows is not None and weight.dense_from_rows <= 1
    return Check("nf4 at one row: predicted path = traced", dequantised == predicted, names[:12], "equal")


def doubling(bench: Bench) -> Iterator[Check]:
    """6. Doubling the batch: out of memory is a row, predicted peaks hold, the knee lies where it was predicted."""
    length, most = (512, 60.0) if bench.cuda else (16, 2.0)
    options = Options(
        model=bench.small, prompt_lens=[length], new_tokens=16, weights="random", device=bench.device.type,
        out=bench.folder / "doubling", budget_s=most,
    )  # fmt: skip
    run = execute(prepare_batch_test(options, "decode"), QuietListener())
    cells = run.cells[run.cells["status"] == "ok"]
    largest = cells[cells["batch_size"] == cells["batch_size"].max()].iloc[0]
    key = {"phase": "prefill", "batch_size": int(largest["batch_size"])}
    [predicted] = [
        item.predicted_peak_memory_bytes
        for item in run.document.evidence
        if all(getattr(item, name) == value for name, value in key.items())
    ]
    ratio = predicted / largest["peak_memory_bytes"]
    passed = 0.9 < ratio < 1.1 if bench.cuda else None
    yield Check("predicted / measured peak memory", passed, ratio, "within 10 %", "" if bench.cuda else "resident set")
    if bench.cuda:
        yield from _out_of_memory(bench)
    else:
        yield Check(
            "out of memory is a row, and memory is given back", None, why="needs CUDA; tested with a fake engine"
        )
    series = next(s for s in run.document.scaling if s.axis == "batch" and s.fixed["phase"] == "decode")
    knees = {"predicted": series.knee_predicted, "measured": series.knee_measured, "best": series.best}
    why = "shown, not judged: eager dispatch hides it on small models"
    yield Check("knee of decode", None, knees, why=why)
    # Llama-2-7B on an A100: no batch is compute-bound above 166 tokens (arithmetic, docs of the doubling test).
    weights = 2 * (6_738_415_616 - 32_000 * 4096)
    none = crossover(0.0, weights, weights + 4 * 32 * 4096 * 166, 524_288 * 166, 312e12, 2.039e12)
    yield Check("Llama-2-7B, A100, 166 tokens: no compute-bound batch", none is None, none, "None")


def _out_of_memory(bench: Bench) -> Iterator[Check]:
    """A card that is all but full: the cell that finds no room is a row, and its memory comes back."""
    _free()  # what torch keeps of the run before is free to its next tensors, and the driver calls it used
    free, _total = torch.cuda.mem_get_info(bench.device)
    ballast = torch.empty(int(free - 6e9), dtype=torch.uint8, device=bench.device)
    before = torch.cuda.memory_allocated(bench.device)
    run = bench.run("full", bench.small, prompt_lens=[512], batch_sizes=[1, 256], new_tokens=8)
    _free()
    left = torch.cuda.memory_allocated(bench.device) - before
    status = run.cells.groupby("batch_size")["status"].first().to_dict()
    del ballast
    _free()
    passed = status[1] == "ok" and status[256] in ("oom", "skipped") and left < 64e6
    yield Check("out of memory is a row, and memory is given back", passed, {"status": status, "left_bytes": left})


def telemetry(bench: Bench) -> Iterator[Check]:
    """7. What the device says of itself while it works; a second process is noticed."""
    source = source_for(bench.device)
    with Watch(source, interval_s=0.1) as watch:
        x = torch.randn(2048 if bench.cuda else 256, 2048, device=bench.device)
        end = time.perf_counter() + 2.0
        while time.perf_counter() < end:
            x @ x.T
            bench.machine.clock.synchronize()
    seen = {name for r in watch.readings for name, value in asdict(r).items() if value not in (None, (), 0.0)}
    wanted = {"clock_hz", "power_w", "temperature_c", "memory_used_bytes"} if bench.cuda else {"memory_used_bytes"}
    yield Check("telemetry", wanted <= seen, sorted(seen), f"has {sorted(wanted)}")
    cheap = watch.cost_s < 0.02 * 2.0 if bench.cuda else None
    yield Check("cost of telemetry", cheap, watch.cost_s / 2.0, "< 2 % at ten looks a second", _GPU)
    if not bench.cuda:
        yield Check("a second process on the card is noticed", None, why="needs CUDA")
        return
    spin = "import torch\nx = torch.randn(4096, 4096, device='cuda')\nwhile True: x @ x; torch.cuda.synchronize()"
    neighbour = subprocess.Popen([sys.executable, "-c", spin])
    try:
        end = time.perf_counter() + 30
        while time.perf_counter() < end and not (source.read().other_processes or 0):
            time.sleep(0.5)
        others = source.read().other_processes
    finally:
        neighbour.kill()
        neighbour.wait()
    passed = None if others is None else others >= 1
    yield Check(
        "a second process on the card is noticed", passed, others, ">= 1", "" if passed else "NVML hides processes"
    )


def settings(bench: Bench) -> Iterator[Check]:
    """8. Nothing in this project sets a clock, a power limit, persistence or MIG."""
    root = Path(__file__).resolve().parents[2]
    setters = ("nvmlDeviceSet", "nvidia-smi -", "nvmlDeviceReset")
    own = Path(__file__).resolve()
    found = [
        str(path.relative_to(root))
        for path in [*(root / "profiler").rglob("*.py"), *(root / "tests").rglob("*.py")]
        if path.resolve() != own and any(word in path.read_text(encoding="utf-8") for word in setters)
    ]
    yield Check("no call that changes the card", not found, found, "none")


def _free() -> None:
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


CHECKS: tuple[Callable[[Bench], Iterator[Check]], ...] = (
    settings, roofs, truth_of_time, truth_of_counts, engines, precision, telemetry, doubling,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/acceptance"))
    parser.add_argument("--dry-run", action="store_true", help="run on a CPU with a tiny model")
    parser.add_argument("--ncu-target", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--ncu-phase", default="decode", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ncu_target:
        ncu_target(options.ncu_target, options.ncu_phase)
        return 0
    if not options.dry_run and not torch.cuda.is_available():
        print("no CUDA device answers; --dry-run runs the script on a CPU.", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    bench = _bench(options.out, dry_run=options.dry_run)
    found: list[Check] = []
    took_s: dict[str, float] = {}
    for group in CHECKS:
        name = (group.__doc__ or "").split(".")[0]
        began_s = time.perf_counter()
        if bench.left_s < 20:
            found.append(Check(f"{name}. {group.__name__}", None, why="the time limit was reached"))
            continue
        try:
            for check in group(bench):
                found.append(check)
                _say(check)
        except Exception as error:
            found.append(Check(f"{group.__name__}: ended early", False, why=f"{type(error).__name__}: {error}"[:500]))
            _say(found[-1])
            traceback.print_exc()
        _free()
        took_s[group.__name__] = time.perf_counter() - began_s
    _write(bench, found, took_s)
    return 0 if all(check.passed is not False for check in found) else 1


def _bench(folder: Path, *, dry_run: bool) -> Bench:
    if dry_run:
        tiny = str(_tiny_model(folder))
        return Bench(torch.device("cpu"), tiny, tiny, folder)
    memory = torch.cuda.get_device_properties(0).total_memory
    main_model = "mistral-7b-v0.1" if memory > 22e9 else "tinyllama-1.1b"
    return Bench(torch.device("cuda", 0), main_model, "tinyllama-1.1b", folder)


def _tiny_model(folder: Path) -> Path:
    """A Llama of two layers, as a folder with a config and no weights."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=1024, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    path = folder / "tiny-llama"
    config.save_pretrained(path)
    return path


def _say(check: Check) -> None:
    mark = {True: "pass", False: "FAIL", None: "----"}[check.passed]
    print(f"{mark}  {check.name}: {check.value} {check.threshold} {check.why}".rstrip(), flush=True)


def _write(bench: Bench, found: list[Check], took_s: dict[str, float]) -> None:
    info = describe(bench.device)
    document = {
        "device": info.name,
        "facts": source_for(bench.device).facts(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "software": software(),
        "seconds": time.perf_counter() - bench.started_s,
        "took_s": took_s,
        "passed": sum(check.passed is True for check in found),
        "failed": sum(check.passed is False for check in found),
        "not_run": sum(check.passed is None for check in found),
        "checks": [asdict(check) for check in found],
    }
    (bench.folder / "scoreboard.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
    for folder in (bench.folder / "time", bench.folder / "doubling"):
        if (folder / "cells.csv").exists():
            for name in PLOTS:
                try:
                    save([read_run(folder)], name, folder / f"{name}.png")
                except RequestError as error:  # a run along one size has no picture of another
                    print(f"no {name} of {folder.name}: {error}")
    print(f"{document['passed']} passed, {document['failed']} failed, {document['not_run']} not run: {bench.folder}")


if __name__ == "__main__":
    sys.exit(main())
