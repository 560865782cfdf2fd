"""Faults in runs on a simulated GPU: a call into a device, a driver, a library or the disk fails, or the process dies.

    python -m tests.faults [--sample 130] [--seed 0] [--only TEXT]

As in SQLite's `malloc_common.tcl`, the n-th call fails, once or from then on: the first, middle and last call of an API
in each stage of a run. As in TigerBeetle's VOPR, safety comes first; then, without the fault, one resume must end the
run as if there had been none. Each failure is printed with the text for `--only` that tries it again.

CI runs the two tests at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import errno
import gc
import io
import json
import math
import multiprocessing
import os
import pkgutil
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pynvml
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `simulated`, as in pytest

from raw_samples import read_records
from simulated.native import why_not
from simulated.scenario import Scenario, flags
from simulated.truth import A100, T4, Truth
from simulated.world import World, simulated

from profiler.cli import app
from profiler.measure import sweep
from profiler.run.stages import Stages

pytestmark = [
    pytest.mark.ci,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

SMALL = Scenario("smollm2-135m", 1, "float16", "eager", (16, 32), (1, 2), 8)
SCENARIOS: Mapping[str, tuple[Scenario, Truth]] = {
    "eager": (SMALL, A100),
    "graph": (replace(SMALL, engine="graph", prompt_lens=(16,)), A100),
    "nf4": (replace(SMALL, quant="nf4", prompt_lens=(16,)), A100),
    "engines": (replace(SMALL, engine="static,generate", prompt_lens=(16,)), A100),
    "confident": (Scenario("mistral-7b-v0.1", 1, "float16", "eager", (16, 512), (1, 2), 8), T4),
}
"""`confident` has cells of high confidence, and gets the false answers."""
BRIEF: Mapping[str, Any] = {
    "profiler.roofs.sampler._LOADED_S": 0.02,
    "profiler.roofs.sampler._MOST_RECORDED": 20,
    "profiler.device.contention.ForeignLoad.cores": lambda _: 0.0,
    "profiler.report.html.write_report": lambda *_, **__: (),
    "signal.signal": lambda *_: None,
}
"""What is shorter: ceilings, and no reports, whose pages and pictures take seconds. No other process is busy, and no
signal is handled."""
LONGEST_S = 600.0
LATER_S, MOST_EXTRA_S = 3600.0, 60.0
"""Simulated seconds: between a run and its resume, and those that a fault may add to a run."""
TICKS_S, OTHER_REPETITIONS, FALSE = 1.01e-6, 0.01, 0.05
"""Two ticks of a CUDA event; what another number of repetitions may change; and from where on a figure is false."""


def slowed(kernel: tuple[Any, float]) -> None:
    core, duration_s = kernel
    core.ready_s += 9 * duration_s


def cuda(text: str, code: int) -> BaseException:
    """The exception that torch raises for a CUDA error since 2.8 (c10/cuda/CUDAException.cpp); a cudaError_t."""
    error = torch.AcceleratorError(f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported.")
    error.error_code = code  # type: ignore[attr-defined]
    return error


RAISED: Mapping[str, Callable[[], BaseException]] = {
    "lost": partial(cuda, "an illegal memory access was encountered", 700),
    "passing": partial(cuda, "invalid argument", 1),
    "not-ready": partial(cuda, "device not ready", 600),
    "oom": partial(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20.00 MiB."),
    "runtime": partial(RuntimeError, "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"),
    "no-kernel": partial(RuntimeError, "No available kernel. Aborting execution."),
    "not-set-up": partial(RuntimeError, "CUDA unknown error - this may be due to an incorrectly set up environment"),
    "nvml-lost": pynvml.NVMLError_GpuIsLost,
    "full": partial(OSError, errno.ENOSPC, "No space left on device"),
}
"""Errors. After `lost`, as after an Xid, every later call to the device gives the same one."""
LIES: Mapping[str, Callable[[Any], Any]] = {
    "zero": lambda _: 0.0,
    "negative": lambda value: -abs(value) or -1.0,
    "nan": lambda _: math.nan,
    "tenfold": lambda value: 10 * value,
    "none-free": lambda value: (0, value[1]),
    "halved": lambda value: value // 2,
    "slow": slowed,
}
"""False answers, and a kernel that takes long."""
CALLS: Mapping[str, tuple[str, ...]] = {
    "kernel": ("lost", "passing", "slow", "killed"),
    "allocate": ("oom",),
    "os.fsync": ("full", "killed"),
    "os.replace": ("killed",),
    "torch.cuda.synchronize": ("lost", "passing"),
    "torch.cuda.Event.record": ("lost", "passing"),
    "torch.cuda.Event.elapsed_time": ("not-ready", "zero", "negative", "nan", "tenfold"),
    "torch.cuda.CUDAGraph.replay": ("lost", "oom"),
    "torch.cuda.graph.__enter__": ("passing",),
    "torch.cuda.mem_get_info": ("passing", "none-free"),
    "torch.cuda.get_device_capability": ("not-set-up",),
    "torch.cuda.empty_cache": ("passing",),
    "torch.nn.functional.scaled_dot_product_attention": ("no-kernel", "oom"),
    "bitsandbytes.functional.dequantize_4bit": ("runtime",),
    "bitsandbytes.functional.quantize_4bit": ("runtime",),
    "pynvml.nvmlDeviceGetClockInfo": ("nvml-lost", "halved"),
    "pynvml.nvmlDeviceGetTemperature": ("nvml-lost",),
}
"""Each call that may fail, and how it can. Kernels and allocations are those of the simulated GPU."""
NEEDS_DEVICE = ("kernel", "torch.cuda.synchronize", "torch.cuda.Event.record", "torch.cuda.Event.elapsed_time")


KEY = ("engine", "phase", "batch_size", "prompt_len", "context_len")
SUBJECT = ("kind", "cell", *KEY, "link", "operator", "way")
EXECUTED = ("executed_flops", "executed_bytes")
COUNTS = ("model_flops", "model_bytes", *EXECUTED, "intensity")
TIMES = ("latency_s", "ttft_s", "first_step_s", "issue_s")
OF_SAMPLES = ("samples", "repetitions", "stopped", "latency_low_s", "latency_high_s", "p90_s", "p99_s")
OF_SAMPLES += ("ttft_p90_s", "ttft_p99_s")
"""Columns that may lose or gain values where a sweep has fewer or more repetitions."""
COUNTING = {"the choice of kernels", "bitsandbytes' choice of 4-bit kernels"}
"""Parts of a run without which executed work is counted by another rule."""


@dataclass(frozen=True)
class Fault:
    """One fault: the n-th call of an API in a stage of a scenario; `on` for all later ones there too."""

    scenario: str
    api: str
    stage: str
    number: int
    kind: str
    on: bool = False

    def __str__(self) -> str:
        return f"{self.scenario}: {self.api} in {self.stage or 'the start'} #{self.number} {self.kind}{' on' * self.on}"

    def is_at(self, api: str, stage: str, count: int) -> bool:
        return (api, stage) == (self.api, self.stage) and (count == self.number or (self.on and count > self.number))


@contextlib.contextmanager
def failing(fault: Fault | None, world: World) -> Iterator[tuple[Counter[tuple[str, str]], set[str]]]:
    """Let calls fail as the fault says, within the context; yields calls by API and stage, and cells of failures."""
    begin, repetition = Stages.begin, sweep.repetition
    stage, cell_name, lost = "", "", False
    calls, touched = Counter[tuple[str, str]](), set[str]()

    def timed(engine: Any, cell: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal cell_name
        cell_name = cell_of(asdict(cell))
        try:
            return repetition(engine, cell, *args, **kwargs)
        finally:
            cell_name = ""

    def begun(stages: Stages, name: str, text: str = "") -> None:
        nonlocal stage
        stage = name
        begin(stages, name, text)

    def call(api: str, real: Callable[[], Any]) -> Any:
        nonlocal lost
        if lost and api in NEEDS_DEVICE:
            raise RAISED["lost"]()
        calls[api, stage] += 1
        if fault is None or not fault.is_at(api, stage, calls[api, stage]):
            return real()
        touched.add(cell_name)
        if fault.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        lost = fault.kind == "lost"
        if fault.kind in RAISED:
            raise RAISED[fault.kind]()
        return LIES[fault.kind](real())

    def wrapped(api: str) -> Callable[..., Any]:
        real = pkgutil.resolve_name(api)

        def called(*args: Any, **kwargs: Any) -> Any:
            if "/simulated/" in sys._getframe(1).f_code.co_filename:  # the simulator's own calls do not fail
                return real(*args, **kwargs)
            return call(api, lambda: real(*args, **kwargs))

        return called

    def launched(*kernel: Any) -> None:
        *_, first, _operators, duration_s, _start_s = kernel
        if first:  # of a replayed graph only its first kernel counts
            call("kernel", lambda: (world.card.stream.core, duration_s))

    world.card.core.on_kernel = launched
    world.card.memory.on_allocate = lambda _bytes: call("allocate", lambda: None)
    with (
        mock.patch.object(Stages, "begin", begun),
        mock.patch.object(sweep, "repetition", timed),
        contextlib.ExitStack() as stack,
    ):
        for api in CALLS:
            with contextlib.suppress(ImportError):  # a library that is missing, an event of the GPU
                stack.enter_context(mock.patch(api, wrapped(api)))
        yield calls, touched


@dataclass(frozen=True)
class Ran:
    """The outcome of one command, with its folder as read without the profiler's own reader."""

    code: int | None
    """None if it raised an exception."""
    out: str
    err: str
    left_bytes: int
    """Bytes of the GPU's memory in use at the end."""
    simulated_s: float
    calls: Mapping[tuple[str, str], int]
    touched: set[str]
    """Engine, batch and length of the cells that were timed when a call failed."""
    rows: Mapping[str, dict[str, str]]
    """Rows of cells.csv by the values of `KEY`."""
    document: Mapping[str, Any]
    facts: frozenset[str]
    """Each kind of fact with its subject, and each column that has a value."""


def ran(name: str, parent: Path, fault: Fault | None = None, *, resume: bool = False) -> Ran:
    """Run a scenario's command once on its own GPU, in the folder `run`."""
    scenario, truth = SCENARIOS[name]
    folder = parent / "run"
    options = {"resume": folder} if resume else {**scenario.options(), "out": folder, "weights": "random"}
    more = flags({**options, "no_trials": True, "device": "cuda"})
    words = ["roofscope", "run", str(scenario.folder(parent)), *more, "--quiet", "--plain"]
    out, err, code = io.StringIO(), io.StringIO(), None
    with simulated(truth) as world, contextlib.ExitStack() as stack:
        for place, value in {**BRIEF, "sys.argv": words}.items():
            stack.enter_context(mock.patch(place, value))
        stack.enter_context(mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(parent / "cache")}))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        world.host.unix_at_start_s += LATER_S * resume
        started_s = world.host.now_s
        with failing(fault, world) as (calls, touched):
            try:
                app.main()
            except SystemExit as ended:
                code = int(ended.code or 0)
            except BaseException:
                err.write(traceback.format_exc())
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps them; they are no leak
        took_s, left_bytes = world.host.now_s - started_s, world.card.memory.allocated
    return Ran(code, out.getvalue(), err.getvalue(), left_bytes, took_s, calls, touched, *left_in(folder))


def left_in(folder: Path) -> tuple[dict[str, dict[str, str]], dict[str, Any], frozenset[str]]:
    """Return the rows, the document and the facts of a run folder, or of none."""
    if not (folder / "run.json").exists():
        return {}, {}, frozenset()
    cells = folder / "cells.csv"
    table = csv.DictReader(cells.read_text().splitlines() if cells.exists() else [])
    rows = {"/".join(row[name] for name in KEY): row for row in table}
    facts = {f"{key} {name}" for key, row in rows.items() for name in row if row[name] and name not in OF_SAMPLES}
    for record in read_records(folder):
        subject = " ".join(str(record[name]) for name in SUBJECT if name in record)
        facts.add(subject)
        for key in record.get("keys", ()):
            facts |= {f"{subject} {key} {one['operator']}" for one in record.get("operators", ())}
    return rows, json.loads((folder / "run.json").read_text()), frozenset(facts)


def whole(name: str, parent: Path) -> Ran:
    """Run a scenario twice without a fault: the first run imports libraries and learns operators."""
    ran(name, parent / f"{name}-first")
    base = ran(name, parent / name)
    if base.code != 0:
        raise RuntimeError(f"{name} fails without a fault ({base.code}): {base.err}")
    return base


def planned(name: str, base: Ran) -> list[Fault]:
    """Return the faults of a scenario: each call's first, middle and last use in each stage, and each way to fail."""
    return [
        Fault(name, api, stage, number, kind, on)
        for (api, stage), calls in sorted(base.calls.items())
        for kind in CALLS[api]
        if (name == "confident") == (kind in LIES)
        for number in sorted({1, calls // 2 + 1, calls})
        for on in ((False, True) if number < calls and kind not in ("lost", "killed") else (False,))
    ]


def differs(before: str, after: str, share: float, least: float = 0.0) -> bool:
    try:
        return abs(float(after) - float(before)) > least + share * abs(float(before))
    except ValueError:
        return before != after


def changed(base: Ran, after: Ran, counts: Sequence[str] = COUNTS) -> dict[str, list[str]]:
    """Return the counts and times of measured cells that are not as before, by row."""
    found = {}
    for key, row in after.rows.items():
        was = base.rows[key]
        share = 0.0 if was["repetitions"] == row["repetitions"] else OTHER_REPETITIONS
        names = [name for name in counts if was[name] != row[name]]
        names += [name for name in TIMES if differs(was[name], row[name], share, TICKS_S)]
        if row["status"] == "ok" and names:
            found[key] = [f"{name} {was[name]} -> {row[name]}" for name in names]
    return found


def cell_of(fields: Mapping[str, Any]) -> str:
    """Return the name of a cell, from its fields or its row."""
    return f"{fields['engine']}/{fields['batch_size']}/{fields['prompt_len']}"


def broken(base: Ran, fault: Fault, after: Ran) -> dict[str, object]:
    """Return what must hold after a fault, each with what shows that it does not."""
    ends = fault.kind in ("lost", "full") or (fault.on and fault.api in NEEDS_DEVICE) or fault.stage in ("", "loading")
    documented = after.code in (0, 3) or (after.code == 2 and ends)
    one_line = "Traceback" not in after.err and len(after.err.strip().splitlines()) <= 1
    error = RAISED[fault.kind]() if fault.kind in RAISED else ""
    why = "out of memory" if fault.kind == "oom" else getattr(error, "strerror", str(error).partition("\n")[0])
    told = all(plain(why)[:24] in plain(text) for text in (json.dumps(after.document), after.out))
    uncounted = {part["what"] for part in after.document.get("missing", ())} & COUNTING
    others = changed(base, after, [name for name in COUNTS if not (uncounted and name in EXECUTED)])
    if fault.kind not in ("lost", "oom") and after.code != 2:
        others |= {key: [row["status"]] for key, row in after.rows.items() if row["status"] != "ok"}
    return {
        "the call is reached": after.calls.get((fault.api, fault.stage), 0) < fault.number,
        "the exit code is a documented one, with one line on stderr": (
            "" if documented and one_line else f"exit code {after.code}: {after.err.strip()}"
        ),
        "requested cells = measured + failed + skipped": (
            (after.rows or after.code != 2) and base.rows.keys() ^ after.rows.keys()
        ),
        "cells that the fault did not touch are as without it": (
            {key: what for key, what in others.items() if cell_of(after.rows[key]) not in after.touched}
        ),
        "what is missing is named with its reason in run.json and on the screen": (
            [] if after.code == 2 or (after.code != 0 and told) else sorted(base.facts - after.facts)[:3]
        ),
        "no false figure has high confidence": [
            f"{key} {name} {base.rows[key][name]} -> {row[name]}"
            for key, row in after.rows.items()
            if fault.kind in LIES and row["status"] == "ok" and row["confidence"] == "high"
            for name in (*TIMES, "attained", "regime")
            if differs(base.rows[key][name], row[name], FALSE)
        ],
        "the GPU's memory is freed again": max(0, after.left_bytes - base.left_bytes),
        "the run ends": after.simulated_s > base.simulated_s + MOST_EXTRA_S,
    }


def plain(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def unfinished(base: Ran, after: Ran) -> object:
    """Return what differs after a resume without the fault: the run must end as if there had been none."""
    if after.code != 0 or not after.document.get("finished"):
        return after.code, after.err
    return changed(base, after) or sorted(base.facts - after.facts)[:3]


def tried(base: Ran, fault: Fault) -> list[str]:
    """Run with the fault, resume without it if the run is not whole, and return what does not hold."""
    with tempfile.TemporaryDirectory(prefix="roofscope-fault-") as name:
        parent, code = Path(name), None
        if fault.kind == "killed":
            found: dict[str, object] = {"the process is killed": not is_killed(fault, parent)}
        else:
            first = ran(fault.scenario, parent, fault)
            code, found = first.code, broken(base, fault, first)
        if (parent / "run" / "run.json").exists() and code != 0:
            found["one --resume gives the whole run"] = unfinished(base, ran(fault.scenario, parent, resume=True))
    return [f"{rule}: {what}" for rule, what in found.items() if what]


def is_killed(fault: Fault, parent: Path) -> bool:
    """Run with the fault in a process of its own, and return whether it was killed."""
    if child := os.fork():
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    ran(fault.scenario, parent, fault)
    os._exit(1)


def main() -> int:
    """Try faults, each in a process of its own, and print what does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="try so many, drawn by --seed (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose line has this text")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked process must not wait for threads that it does not have
    with tempfile.TemporaryDirectory(prefix="roofscope-faults-") as folder:
        known = {name: whole(name, Path(folder)) for name in SCENARIOS}
    faults = [fault for name in known for fault in planned(name, known[name]) if options.only in str(fault)]
    chosen = random.Random(options.seed).sample(faults, min(options.sample or len(faults), len(faults)))
    print(f"{len(chosen)} of {len(faults)} faults", flush=True)
    gc.collect()
    gc.freeze()  # existing objects are then not collected again in each process
    failed = 0
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        answers = [pool.apply_async(tried, (known[fault.scenario], fault)) for fault in chosen]
        for fault, answer in zip(chosen, answers, strict=True):
            try:
                failures = answer.get(LONGEST_S)
            except Exception as error:
                failures = [f"no answer: {error!r}"]
            failed += bool(failures)
            for text in failures:
                print(f"{fault}: {text}"[:400], flush=True)
    print(f"{len(chosen)} faults, {failed} after which something does not hold")
    return 1 if failed else 0


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run of four cells without a fault."""
    return whole("eager", tmp_path_factory.mktemp("known"))


def test_a_planted_silent_loss_is_detected(known: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel fails once during replays, and the run reports it. The planted loss suppresses that report."""
    fault = Fault("eager", "kernel", "replays", 1, "passing")
    assert tried(known, fault) == []
    monkeypatch.setattr(Stages, "miss", lambda *_: None)
    assert any("what is missing is named" in failure for failure in tried(known, fault))


def test_a_card_that_is_lost(known: Ran, tmp_path: Path) -> None:
    """The context breaks for good in the middle of the cells: every call gives the same error.

    https://docs.nvidia.com/cuda/cuda-runtime-api, cudaErrorLaunchFailure: the process must be ended. Measured cells
    stay, the folder and the screen report the loss, and a resume appends the rest.
    """
    fault = Fault("eager", "kernel", "timing", known.calls["kernel", "timing"] // 2, "lost")
    lost = ran("eager", tmp_path, fault)
    assert not any(broken(known, fault, lost).values())
    samples = tmp_path / "run" / "samples.jsonl"
    before = samples.read_text()
    assert lost.code == 2
    assert not lost.document["finished"]
    assert any("illegal memory access" in line for line in lost.document["warnings"])
    assert "illegal memory access" in lost.err
    assert 0 < sum(row["status"] == "ok" for row in lost.rows.values()) < len(known.rows)
    assert not unfinished(known, ran("eager", tmp_path, resume=True))
    assert samples.read_text().startswith(before)
    records = [record for record in read_records(samples.parent) if "round" in record]
    repetitions = [(one["prompt_len"], one["batch_size"], one["round"]) for one in records]
    assert len(repetitions) == len(set(repetitions))
