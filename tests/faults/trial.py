"""The runs that get faults, and a trial: one run with one fault, one resume after it, and the outcome of both."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from simulated.scenario import Scenario, flags
from simulated.truth import A100, H100, T4, Truth
from simulated.world import simulated

from profiler.cli.app import main
from profiler.cli.options import EXIT_INCOMPLETE
from profiler.report.write import markdown_report
from profiler.store.folder import read_run

from .oracles import Case, Ran, failures, read
from .seam import Seam
from .sites import Injection

_BRIEF = {"profiler.roofs.sampler._LOADED_S": 0.02, "profiler.roofs.sampler._MOST_RECORDED": 20}
"""Runs are shorter than usual: faults need no times exact to a thousandth, and there are a thousand runs."""
_AGAIN = ("no_levers", "budget", "trace")
"""Options of a run that its resume repeats."""
_LATER_S = 3600.0
"""Simulated seconds between a run and its resume."""


@dataclass(frozen=True)
class Played:
    """One run of `roofscope run` on one card."""

    name: str
    asked: Scenario
    truth: Truth
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the command line in addition to the scenario's; None removes one."""
    libraries: tuple[str, ...] = ()
    """Modules to import before the run is recorded."""
    lies: bool = False
    """Whether to try only false answers and slow calls: otherwise the cells of this run have high confidence."""

    def arguments(self, folder: Path) -> dict[str, Any]:
        every = {**self.asked.options(), "out": folder, **self.options}
        return {name: value for name, value in every.items() if value is not None}


def _small(engine: str = "eager", prompts: tuple[int, ...] = (16, 32), **changes: Any) -> Scenario:
    return Scenario("smollm2-135m", 1, "float16", engine, prompts, (1, 2), 8, **changes)


def _one(model: str, layers: int = 1) -> Scenario:
    return Scenario(model, layers, "bfloat16", "eager", (16,), (1,), 8)


_MIXTRAL = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}

SCENARIOS: dict[str, Played] = {
    played.name: played
    for played in (
        Played("eager", _small(), A100),
        Played("graph", _small("graph"), A100),
        Played("nf4", _small(quant="nf4"), A100),
        Played("int8", _small(prompts=(16,), quant="int8"), A100),
        Played("fp8", replace(_one("smollm2-135m"), quant="fp8"), H100, libraries=("torchao",)),
        Played("experts", replace(_one("mixtral-8x7b"), changes=_MIXTRAL), A100),
        Played("engines", _small("static,compile,generate", (16,)), A100, {"budget": 120}),
        Played(
            "inside", _one("smollm2-135m", layers=4), A100, {"trace": True, "no_levers": None}, libraries=("torchao",)
        ),
        Played("sure", Scenario("mistral-7b-v0.1", 1, "float16", "eager", (16, 512), (1, 2), 8), T4, lies=True),
    )
}


@dataclass(frozen=True)
class Trial:
    """A run with one fault, and its failed conditions."""

    injection: Injection
    code: int | None
    failures: tuple[str, ...]
    said: str
    """The run's stderr, and the exception that it raised."""


def tried(injection: Injection, played: Played, model: Path, base: Ran) -> Trial:
    """Run with the fault; if the exit code is not 0, resume without it."""
    with tempfile.TemporaryDirectory(prefix="roofscope-fault-") as name:
        folder = Path(name) / "run"
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": f"{name}/cache"}):
            first = ran(played, model, folder, injection)
            resumed = None
            if first.code != 0 and first.folder is not None:
                resumed = ran(played, model, folder, resume=True)
    failed = failures(Case(injection, base, first, resumed))
    if not first.fired:
        failed.append("fires: the call was not reached")
    return Trial(injection, first.code, tuple(failed), first.err + first.escaped)


def ran(played: Played, model: Path, folder: Path, injection: Injection | None = None, *, resume: bool = False) -> Ran:
    """Run the command once on its own cards, and capture all its output."""
    options = played.arguments(folder)
    if resume:
        options = {name: options[name] for name in _AGAIN if name in options} | {"resume": folder}
    else:
        options["weights"] = "random"
    words = ["roofscope", "run", str(model), *flags({**options, "device": "cuda"}), "--quiet", "--plain"]
    with simulated(played.truth) as world, contextlib.ExitStack() as stack:
        seam = Seam(world, injection)
        for name, value in _BRIEF.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(mock.patch("profiler.device.contention.ForeignLoad.cores", return_value=0.0))
        stack.enter_context(seam.installed())
        stack.enter_context(mock.patch("profiler.report.write.write_reports"))  # pages and pictures take seconds
        stack.enter_context(mock.patch.object(sys, "argv", words))
        stack.enter_context(mock.patch.object(signal, "signal"))
        if resume:
            world.host.unix_at_start_s += _LATER_S
        started_s = world.host.now_s
        with _heard() as heard:
            code, escaped = _ended()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps them; they are no leak
        state, left_bytes = read(folder), world.card.memory.allocated
        if state is not None and code == EXIT_INCOMPLETE:
            state = replace(state, report=markdown_report(read_run(folder)))
        took_s = world.host.now_s - started_s
        return Ran(code, *heard, escaped, seam.calls, seam.fired, left_bytes, took_s, state)


def _ended() -> tuple[int | None, str]:
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0), ""
    except BaseException:
        return None, traceback.format_exc()
    return None, "the command did not end by an exit code"


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """Capture both streams, from Python and from C."""
    said = ["", ""]
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in said]
        stack.enter_context(contextlib.redirect_stdout(files[0]))
        stack.enter_context(contextlib.redirect_stderr(files[1]))
        kept = [os.dup(1), os.dup(2)]
        for number, file in enumerate(files):
            os.dup2(file.fileno(), number + 1)
        try:
            yield said
        finally:
            for number, (file, before) in enumerate(zip(files, kept, strict=True)):
                os.dup2(before, number + 1)
                os.close(before)
                file.seek(0)
                said[number] = file.read()
