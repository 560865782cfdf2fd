"""What can fail, the runs in which it fails, and what must hold afterwards."""

from __future__ import annotations

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
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import pynvml
import torch
from raw_samples import read_records
from simulated.scenario import Scenario, flags
from simulated.truth import A100, T4, Truth
from simulated.world import World, simulated

from profiler.cli.app import main
from profiler.measure import sweep
from profiler.run.stages import Stages

LONGEST_S = 600.0
LATER_S = 3600.0
"""Simulated seconds between a run and its resume."""
BRIEF: Mapping[str, Any] = {
    "profiler.roofs.sampler._LOADED_S": 0.02,
    "profiler.roofs.sampler._MOST_RECORDED": 20,
    "profiler.device.contention.ForeignLoad.cores": lambda _: 0.0,
    "profiler.report.write.write_report": lambda *_, **__: (),
}
"""What is shorter: ceilings, and no reports, whose pages and pictures take seconds. No other process is busy."""
SIMULATOR = "/simulated/"
"""Its own calls do not fail."""
NOT_READY, ILLEGAL_ADDRESS, INVALID_VALUE = 600, 700, 1
"""Values of cudaError_t (CUDA Runtime API)."""


def slowed(kernel: tuple[Any, float]) -> None:
    """Let a kernel take ten times as long."""
    core, duration_s = kernel
    core.ready_s += 9 * duration_s


def cuda(text: str, code: int) -> Callable[[], BaseException]:
    """The exception that torch raises for a CUDA error since 2.8 (c10/cuda/CUDAException.cpp)."""

    def made() -> BaseException:
        error = torch.AcceleratorError(f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported.")
        error.error_code = code  # type: ignore[attr-defined]
        return error

    return made


RAISED: Mapping[str, Callable[[], BaseException]] = {
    "lost": cuda("an illegal memory access was encountered", ILLEGAL_ADDRESS),
    "passing": cuda("invalid argument", INVALID_VALUE),
    "not-ready": cuda("device not ready", NOT_READY),
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


SMALL = Scenario("smollm2-135m", 1, "float16", "eager", (16, 32), (1, 2), 8)
SCENARIOS: Mapping[str, tuple[Scenario, Truth]] = {
    "eager": (SMALL, A100),
    "graph": (replace(SMALL, engine="graph", prompt_lens=(16,)), A100),
    "nf4": (replace(SMALL, quant="nf4", prompt_lens=(16,)), A100),
    "engines": (replace(SMALL, engine="static,generate", prompt_lens=(16,)), A100),
    "confident": (Scenario("mistral-7b-v0.1", 1, "float16", "eager", (16, 512), (1, 2), 8), T4),
}
"""Runs without a fault. `confident` has cells of high confidence, and gets the false answers."""


@dataclass(frozen=True)
class Ran:
    """The outcome of one command; its code is None if it was killed or raised an exception."""

    code: int | None
    out: str = ""
    err: str = ""
    left_bytes: int = 0
    """Bytes of the GPU's memory in use at the end."""
    simulated_s: float = 0.0
    calls: Mapping[tuple[str, str], int] = ()  # type: ignore[assignment]
    """Calls by API and stage."""
    fired: tuple[tuple[str, str], ...] = ()
    """The stage and the cell of each failed call."""


@dataclass(frozen=True)
class Recorded:
    """A scenario that ran without a fault, its model's folder, and the state that it left."""

    name: str
    model: Path
    base: Ran
    state: State


class Seam:
    """Counts the calls of a run, and makes them fail as the fault says."""

    def __init__(self, fault: Fault | None) -> None:
        self._fault, self._lost = fault, False
        self._stage = self._cell = ""
        self.calls: Counter[tuple[str, str]] = Counter()
        self.fired: list[tuple[str, str]] = []

    def call(self, api: str, real: Callable[[], Any]) -> Any:
        """Make a call, or let it fail. Raises the error of the fault, or of a device that is lost."""
        if self._lost and api in NEEDS_DEVICE:
            raise RAISED["lost"]()
        key = api, self._stage
        self.calls[key] += 1
        fault, count = self._fault, self.calls[key]
        if fault is None or key != (fault.api, fault.stage):
            return real()
        if count < fault.number or (count > fault.number and not fault.on):
            return real()
        self.fired.append((self._stage, self._cell))
        if fault.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        self._lost = fault.kind == "lost"
        if fault.kind in RAISED:
            raise RAISED[fault.kind]()
        return LIES[fault.kind](real())

    def _wrapped(self, api: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def called(*args: Any, **kwargs: Any) -> Any:
            if SIMULATOR in sys._getframe(1).f_code.co_filename:
                return real(*args, **kwargs)
            return self.call(api, lambda: real(*args, **kwargs))

        return called

    def _launched(self, stream: Any, *kernel: Any) -> None:
        """A kernel was launched; of a replayed graph only its first one counts."""
        *_, launched, _operators, duration_s, _start_s = kernel
        if launched:
            self.call("kernel", lambda: (stream.core, duration_s))

    @contextlib.contextmanager
    def installed(self, world: World) -> Iterator[None]:
        begin, repetition = Stages.begin, sweep.repetition

        def begun(stages: Stages, name: str, text: str = "") -> None:
            self._stage = name
            begin(stages, name, text)

        def timed(engine: Any, cell: Any, *args: Any, **kwargs: Any) -> Any:
            self._cell = f"{cell.engine}/{cell.batch_size}/{cell.depth}"
            try:
                return repetition(engine, cell, *args, **kwargs)
            finally:
                self._cell = ""

        for card in world.cards:
            card.core.on_kernel = partial(self._launched, card.stream)
            card.memory.on_allocate = lambda _bytes: self.call("allocate", lambda: None)
        with contextlib.ExitStack() as stack:
            for api in CALLS:
                with contextlib.suppress(ImportError, ValueError):  # a library that is missing, an event of the GPU
                    stack.enter_context(mock.patch(api, self._wrapped(api, pkgutil.resolve_name(api))))
            stack.enter_context(mock.patch.object(Stages, "begin", begun))
            stack.enter_context(mock.patch.object(sweep, "repetition", timed))
            yield


def ran(name: str, model: Path, folder: Path, fault: Fault | None = None, *, resume: bool = False) -> Ran:
    """Run the command once on its own GPU, and capture its output. A process of its own is killed."""
    if fault is not None and fault.kind == "killed":
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            return Ran(None, fired=((fault.stage, ""),) if os.WIFSIGNALED(status) else ())
        _run(name, model, folder, fault)
        os._exit(1)
    return _run(name, model, folder, fault, resume=resume)


def _run(name: str, model: Path, folder: Path, fault: Fault | None, *, resume: bool = False) -> Ran:
    scenario, truth = SCENARIOS[name]
    options = {"resume": folder} if resume else {**scenario.options(), "out": folder, "weights": "random"}
    more = flags({**options, "no_trials": True, "device": "cuda"})
    words = ["roofscope", "run", str(model), *more, "--quiet", "--plain"]
    out, err, code, seam = io.StringIO(), io.StringIO(), None, Seam(fault)
    with simulated(truth) as world, contextlib.ExitStack() as stack:
        for place, value in BRIEF.items():
            stack.enter_context(mock.patch(place, value))
        stack.enter_context(mock.patch.object(sys, "argv", words))
        stack.enter_context(mock.patch.object(signal, "signal"))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        world.host.unix_at_start_s += LATER_S * resume
        started_s = world.host.now_s
        with seam.installed(world):
            try:
                main()
            except SystemExit as ended:
                code = int(ended.code or 0)
            except BaseException:
                err.write(traceback.format_exc())
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps them; they are no leak
        took_s, left = world.host.now_s - started_s, world.card.memory.allocated
        return Ran(code, out.getvalue(), err.getvalue(), left, took_s, dict(seam.calls), tuple(seam.fired))


@dataclass(frozen=True)
class State:
    """What a run folder holds, read without the profiler's own reader."""

    rows: Mapping[tuple[str, ...], dict[str, str]]
    """Rows of cells.csv by `KEY`."""
    document: Mapping[str, Any]
    facts: frozenset[str]
    """Each kind of fact with its subject, and each column that has a value."""


KEY = ("engine", "phase", "batch_size", "prompt_len", "context_len")
SUBJECT = ("kind", "cell", *KEY, "link", "operator", "way")
COUNTS = ("model_flops", "model_bytes", "executed_flops", "executed_bytes", "intensity")
TIMES = ("latency_s", "ttft_s", "first_step_s", "issue_s")
SAMPLES = {
    "samples", "repetitions", "stopped", "latency_low_s", "latency_high_s", "p90_s", "p99_s", "ttft_p90_s", "ttft_p99_s"
}  # fmt: skip
"""Columns that may lose or gain values where a sweep has fewer or more repetitions."""
COUNTING = {"the choice of kernels", "bitsandbytes' choice of 4-bit kernels"}
"""Parts of a run without which executed work is counted by another rule."""
TICKS_S, OTHER_REPETITIONS, FALSE = 1.01e-6, 0.01, 0.05
"""Two ticks of a CUDA event; what another number of repetitions may change; and from where on a figure is false."""
MOST_EXTRA_S = 60.0
"""Simulated seconds that a fault may add to a run."""


def state(folder: Path) -> State | None:
    """Return None if the folder has no run."""
    if not (folder / "run.json").exists():
        return None
    cells = folder / "cells.csv"
    table = csv.DictReader(cells.read_text().splitlines() if cells.exists() else [])
    rows = {tuple(row[name] for name in KEY): row for row in table}
    facts = {
        f"{'/'.join(key)} {name}" for key, row in rows.items() for name in row if row[name] and name not in SAMPLES
    }
    for record in read_records(folder):
        subject = " ".join(str(record[name]) for name in SUBJECT if name in record)
        operators = [
            f"{key} {one['operator']}" for key in record.get("keys", ()) for one in record.get("operators", ())
        ]
        facts |= {subject, *(f"{subject} {operator}" for operator in operators)}
    return State(rows, json.loads((folder / "run.json").read_text()), frozenset(facts))


def recorded(name: str, parent: Path) -> Recorded:
    """Run a scenario twice without a fault: the first run imports libraries and learns operators."""
    model = SCENARIOS[name][0].folder(parent / name)
    for number in range(2):
        base = ran(name, model, parent / name / f"run-{number}")
        left = state(parent / name / f"run-{number}")
        if base.code != 0 or left is None:
            raise RuntimeError(f"{name} fails without a fault ({base.code}): {base.err}")
    return Recorded(name, model, base, left)


def planned(recording: Recorded) -> list[Fault]:
    """Return the faults of a scenario: each call's first, middle and last use in each stage, and each way to fail."""
    return [
        Fault(recording.name, api, stage, number, kind, on)
        for (api, stage), calls in sorted(recording.base.calls.items())
        for kind in CALLS[api]
        if (recording.name == "confident") == (kind in LIES)
        for number in sorted({1, calls // 2 + 1, calls})
        for on in ((False, True) if number < calls and kind not in ("lost", "killed") else (False,))
    ]


def tried(recording: Recorded, fault: Fault) -> list[str]:
    """Run with the fault, resume without it if the run is not whole, and return what does not hold."""
    with tempfile.TemporaryDirectory(prefix="roofscope-fault-") as name:
        folder = Path(name) / "run"
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": f"{name}/cache"}):
            first = ran(recording.name, recording.model, folder, fault)
            after = state(folder)
            failures = [] if first.fired else ["the call was not reached"]
            if fault.kind != "killed":
                failures += _ended(recording, fault, first, has_run=after is not None)
                failures += _kept(recording, fault, first, after) if after else []
            if first.code != 0 and after is not None:
                resumed = ran(recording.name, recording.model, folder, resume=True)
                failures += _resumed(recording, resumed, state(folder))
    return failures


def _ended(recording: Recorded, fault: Fault, first: Ran, *, has_run: bool) -> Iterator[str]:
    """What does not hold of how the command ended."""
    if first.code not in (0, 2, 3) or "Traceback" in first.err or len(first.err.strip().splitlines()) > 1:
        yield f"exit code {first.code}, and not one line: {first.err}"
    gone = fault.kind in ("lost", "full") or (fault.on and fault.api in NEEDS_DEVICE)
    if first.code == 2 and not gone and fault.stage not in ("", "loading"):
        yield f"the run ended: {first.err}"
    if first.code != 2 and not has_run:
        yield f"exit code {first.code} without a run folder"
    if first.left_bytes > recording.base.left_bytes:
        yield f"{first.left_bytes - recording.base.left_bytes} bytes of the GPU are still held"
    if first.simulated_s > recording.base.simulated_s + MOST_EXTRA_S:
        yield f"{first.simulated_s:.0f} simulated seconds instead of {recording.base.simulated_s:.0f}"


def _kept(recording: Recorded, fault: Fault, first: Ran, after: State) -> Iterator[str]:
    """What does not hold of the run folder."""
    if set(after.rows) != set(recording.state.rows) and (first.code != 2 or after.rows):
        yield f"{len(after.rows)} of {len(recording.state.rows)} cells in cells.csv"
    missing = {part["what"] for part in after.document.get("missing", ())}
    counts = [name for name in COUNTS if not (name.startswith("executed") and missing & COUNTING)]
    for key, row in after.rows.items():
        before, name = recording.state.rows.get(key, row), "/".join(key)
        depth = row["prompt_len"] if row["prompt_len"] != "0" else row["context_len"]
        if row["status"] == "ok" and row["confidence"] == "high" and fault.kind in LIES:
            for column in (*TIMES, "attained", "regime"):
                if _differs(before[column], row[column], FALSE):
                    yield f"{name} has high confidence in {column} {row[column]}, which is {before[column]}"
        if f"{row['engine']}/{row['batch_size']}/{depth}" in {cell for _, cell in first.fired}:
            continue
        if row["status"] == "ok":
            yield from _moved(before, row, counts)
        elif fault.kind not in ("lost", "oom") and first.code != 2:
            yield f"{name} is {row['status']}, which the fault did not touch"
    lost = "; ".join(sorted(recording.state.facts - after.facts))[:200]
    if lost and first.code == 0:
        yield f"exit code 0, and facts are gone: {lost}"
    if lost and first.code != 2:
        why = "out of memory" if fault.kind == "oom" else str(RAISED.get(fault.kind, str)()).partition("\n")[0]
        for place, text in (("run.json", json.dumps(after.document)), ("the screen", first.out)):
            if _plain(why)[:24] not in _plain(text):
                yield f"{place} does not say why ({why}) facts are gone: {lost}"


def _resumed(recording: Recorded, resumed: Ran, after: State | None) -> Iterator[str]:
    """What does not hold after a resume without the fault: the run must end as if there had been none."""
    if resumed.code != 0 or after is None or not after.document.get("finished"):
        yield f"the resume ends with {resumed.code}: {resumed.err}"
        return
    for key, row in recording.state.rows.items():
        if key not in after.rows or after.rows[key]["status"] != "ok":
            yield f"after the resume {'/'.join(key)} has no number"
        else:
            yield from _moved(row, after.rows[key], COUNTS)
    if gone := sorted(recording.state.facts - after.facts):
        yield f"after the resume {len(gone)} facts are gone: {'; '.join(gone[:3])}"


def _moved(before: dict[str, str], row: dict[str, str], counts: Sequence[str]) -> Iterator[str]:
    share = 0.0 if before["repetitions"] == row["repetitions"] else OTHER_REPETITIONS
    changed = [name for name in counts if before[name] != row[name]]
    changed += [name for name in TIMES if _differs(before[name], row[name], share, TICKS_S)]
    cell = "/".join(row[name] for name in KEY)
    yield from (f"{cell} {name} {before[name]} -> {row[name]}" for name in changed)


def _differs(before: str, after: str, share: float, least: float = 0.0) -> bool:
    try:
        return abs(float(after) - float(before)) > least + share * abs(float(before))
    except ValueError:
        return before != after


def _plain(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def trials(recordings: Mapping[str, Recorded], faults: Sequence[Fault], jobs: int = 2) -> int:
    """Try faults, each in a process of its own. Prints what does not hold; returns after how many faults."""
    gc.collect()
    gc.freeze()  # existing objects are then not collected again in each process
    failed = 0
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        answers = [pool.apply_async(tried, (recordings[fault.scenario], fault)) for fault in faults]
        for fault, answer in zip(faults, answers, strict=True):
            try:
                failures = answer.get(LONGEST_S)
            except Exception as error:
                failures = [f"no answer: {error!r}"]
            failed += bool(failures)
            for text in failures:
                print(f"{fault}: {text}"[:400], flush=True)
    return failed
