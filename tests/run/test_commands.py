"""The command in a report repeats its run; failures affect only their part of a run, or end it; damaged run folders."""

from __future__ import annotations

import math
import shlex
import shutil
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hurry import with_effort
from machines import HOST, small

import profiler
from profiler.device.device import ENVIRONMENT
from profiler.effort import STANDARD
from profiler.engines.transformers import EagerEngine
from profiler.errors import DeviceError, OutOfTimeError, RankError, RequestError
from profiler.facts.repetitions import Gap
from profiler.grid.cells import Cell
from profiler.grid.ranges import make_grid
from profiler.loading.prompts import Prompts
from profiler.loading.request import ModelRequest
from profiler.loading.source import resolve
from profiler.measure import trials
from profiler.measure.sweep import RepetitionContext, repetition, warm_up
from profiler.quant.registry import QuantOptions
from profiler.ranks.process_group import ProcessGroup
from profiler.report.progress import Listener
from profiler.run.options import Options
from profiler.run.stages import Stages
from profiler.run.validate import repeating
from profiler.store.folder import Run, read_run

ROOT = Path(__file__).parents[2]
OTHER_THAN_DEFAULT = {
    "model": "smollm2-135m", "prompt_lens": "32,64", "prompts": Path("my prompts.txt"),
    "context_lens": "128", "batch_sizes": "3", "new_tokens": 9,
    "dtype": "bfloat16", "quant": "nf4", "double_quant": True, "compute_dtype": "float16", "weights": "random",
    "engine": "static", "cache": "fp8", "attn": "eager", "tp": 2, "device": "cuda:1", "out": "runs/mine",
    "budget_s": 7.5, "draft": "ngram",
    "fresh": True, "no_trials": True, "breakdown": True, "trace": True, "check_quality": True,
    "trust_remote_code": True, "allow_pickle": True,
}  # fmt: skip
"""Every option, with a value that is not its default."""


def test_every_option_is_in_the_command(roofscope, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """The exceptions are the folder, which differs the next time, and the cache, which the engine names."""
    defaults = {item.name: item.default for item in fields(Options)}
    assert OTHER_THAN_DEFAULT.keys() == defaults.keys(), "a new option must be repeated too"
    assert [name for name, value in OTHER_THAN_DEFAULT.items() if value == defaults[name]] == []
    options = Options(**OTHER_THAN_DEFAULT)  # type: ignore[arg-type]
    request = ModelRequest(
        resolve("smollm2-135m"), torch.device("cuda:1"), torch.bfloat16, quant="nf4",
        quant_options=QuantOptions(True, torch.float16), weights="random", attn="eager",
    )  # fmt: skip
    prepare = mock.Mock(side_effect=RequestError("only read."))
    monkeypatch.setattr("profiler.run.validate.prepare", prepare)
    words = shlex.split(repeating(request, make_grid("32,64", "3", 9, "128", ["static"]), options))
    assert "only read" in roofscope(*words[words.index("roofscope") + 1 :]).err
    prepare.assert_called_once_with(replace(options, out=None, cache=""))


RUN = Path(__file__).parents[1] / "data" / "tiny_run"


def in_precision(quant: str) -> Run:
    run = read_run(RUN)
    return replace(run, document=replace(run.document, model=replace(run.model, quant=quant)))


REASON = "1 cell has no number (first: batch 1 x 64, failed: KeyError: 'planted')."


@pytest.mark.parametrize(
    ("several", "output_format", "incomplete"),
    [
        (("--quant", "none,nf4"), "table", True),
        (("--quant", "none,nf4"), "json", False),
        (("--device", "cuda:0,cuda:1"), "json", True),
        ((), "table", True),
        ((), "table", False),
    ],
)
def test_a_cell_without_a_number_in_any_run_gives_its_exit_code_and_its_reason(  # type: ignore[no-untyped-def]
    roofscope, several: tuple[str, ...], output_format: str, incomplete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for two precisions, two devices and a batch test; the first run is always complete."""
    runs = [in_precision("none"), in_precision("nf4")]
    if incomplete:
        first, *others = runs[1].results
        document = replace(runs[1].document, warnings=(*runs[1].document.warnings, REASON))
        runs[1] = Run(RUN, document, (replace(first, status="failed", latency_s=math.nan), *others))
    monkeypatch.setattr("profiler.run.pipeline.run_precisions", lambda *_: runs)
    monkeypatch.setattr("profiler.run.pipeline.run_devices", lambda *_: runs)
    monkeypatch.setattr("profiler.run.validate.prepare_batch_test", lambda *_: SimpleNamespace(warnings=()))
    monkeypatch.setattr("profiler.run.pipeline.execute", lambda *_: runs[1])
    command = ("run", "smollm2-135m", *several) if several else ("batch-test", "smollm2-135m")
    found = roofscope(*command, "--quiet", "--plain", "--format", output_format)
    assert found.code == (3 if incomplete else 0), found.err
    words = " ".join(found.out.split())
    assert ("KeyError: 'planted'" in words) is incomplete
    if several[:1] == ("--quant",) and incomplete and output_format == "table":
        assert f"! nf4: {REASON}" in words


def test_a_model_and_its_draft_are_quoted_and_without_their_folder(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "my model")
    request = ModelRequest(resolve(str(folder)), torch.device("cpu"), torch.float32)
    command = repeating(request, make_grid("32", "1", 8), Options(draft=str(folder)))
    assert "roofscope run 'my model' " in command
    assert command.endswith("--draft 'my model'")
    assert str(tmp_path) not in command


def test_the_environment_is_in_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """`env` sets them in every shell, and below a profiler that starts the command."""
    request = ModelRequest(resolve("smollm2-135m"), torch.device("cpu"), torch.float32)
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    bare = repeating(request, make_grid("32", "1", 8), Options())
    assert bare.startswith("roofscope run smollm2-135m ")
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    command = repeating(request, make_grid("32", "1", 8), Options())
    assert command == f"env OMP_NUM_THREADS=3 TORCHINDUCTOR_MAX_AUTOTUNE=1 {bare}"


CELL = Cell(1, 8, 8)


def failing(error: BaseException) -> Any:
    return SimpleNamespace(name="eager", prepare=mock.Mock(side_effect=error))


def timed(error: BaseException, machine: Any = HOST) -> Any:
    return repetition(failing(error), CELL, 0, RepetitionContext(machine, Prompts(64)))


def no_memory() -> BaseException:
    """Return torch's error for more bytes than a 47-bit address space has."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("recompile_limit reached\nwith more"), "failed", "RuntimeError: recompile_limit reached"),
        (RequestError("this engine cannot."), "failed", "this engine cannot."),
        (no_memory(), "oom", "out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `f`"), "oom", "out of memory"),
    ],
)
def test_a_cell_that_raises_is_a_gap_with_its_reason_and_gives_no_pace(
    error: Exception, status: Any, reason: str
) -> None:
    assert timed(error) == Gap(CELL, status, reason)
    assert warm_up(failing(error), CELL, HOST, prompts=Prompts(64), budget_s=1.0) is None


def test_a_step_that_finds_no_piece_large_enough_is_told_what_joins_them() -> None:
    machine = mock.Mock(wraps=HOST, is_cuda=True, available_bytes=lambda: 17 << 30)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.75 GiB.")
    gap = timed(error, machine)
    assert (gap.status, "expandable_segments:True" in gap.reason) == ("oom", True)
    machine.available_bytes = lambda: 1 << 30
    assert timed(error, machine) == Gap(CELL, "oom", "out of memory")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DeviceError("it is lost"), RankError("rank 1 ended")])
def test_what_ends_a_run_ends_it(error: BaseException) -> None:
    with pytest.raises(type(error)):
        timed(error)
    with pytest.raises(type(error)):
        warm_up(failing(error), CELL, HOST, prompts=Prompts(64), budget_s=1.0)
    with pytest.raises(type(error)), Stages(Listener(), HOST).optional("a stage", "it is missing"):
        raise error


def test_a_stage_that_fails_is_told_and_what_it_held_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor of the failed step is freed before memory is released, although its error is still being handled."""
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[object] = []
    machine, listener = small(), mock.Mock()
    monkeypatch.setattr(machine, "release", lambda: alive.append(held[0]()))

    def step() -> None:
        tensor = torch.ones(4)
        held.append(weakref.ref(tensor))
        raise AttributeError("no attribute 'cos'")

    stages = Stages(listener, machine)
    with stages.optional("the replays", "kernels have no times"):
        step()
    listener.stage.assert_called_once_with(
        "the replays failed (AttributeError: no attribute 'cos'): kernels have no times."
    )
    assert alive == [None]
    with stages.optional("the overhead", "it is unexplained"):
        raise OutOfTimeError("its steps did not end within 2.00 s")
    listener.stage.assert_called_with("the overhead was cut (its steps did not end within 2.00 s): it is unexplained.")
    assert [(part.what, part.cut) for part in stages.missing] == [("the replays", False), ("the overhead", True)]


def test_whatever_a_rank_raises_in_a_step_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other ranks would wait for the rest of the step."""
    monkeypatch.setattr("profiler.ranks.process_group._NOTICE_S", 0.0)
    group = object.__new__(ProcessGroup)
    group.rank, group.size = 1, 2
    for error in (RuntimeError("x"), AttributeError("x")):
        with pytest.raises(RankError, match=r"a step failed on rank 1 of 2: .*x"), group.together():
            raise error
    with pytest.raises(RequestError, match="a wrong request"), group.together():
        raise RequestError("a wrong request")


@pytest.mark.ci
def test_a_batch_size_that_fails_leaves_a_run_with_the_others(
    profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch of one is measured, judged and reported, although other parts of the run fail.

    The model raises AttributeError at a batch of two, changes raise unexpected errors, the ceilings cannot be measured
    again, and the disk is full at a picture.
    """
    prefill = EagerEngine.prefill

    def fails_at_two(self: EagerEngine, ids: torch.Tensor, slots: int) -> Any:
        if ids.shape[0] == 2:
            raise AttributeError("no attribute 'cos'")
        return prefill(self, ids, slots)

    unforeseen, tried = (mock.Mock(side_effect=KeyError("what nobody foresaw")) for _ in range(2))
    monkeypatch.setattr(EagerEngine, "prefill", fails_at_two)
    monkeypatch.setattr(trials.Side, "call", tried)
    monkeypatch.setattr("profiler.run.measure.remeasure_ceilings", unforeseen)
    full = mock.Mock(side_effect=OSError(ENOSPC, "No space left on device"))
    monkeypatch.setattr("profiler.report.html.html_report", full)
    with_effort(monkeypatch, shares=STANDARD.shares | {"overhead": 5.0, "trials": 15.0}, ceilings_again_s=0.5)
    run = profile_tiny(batch_sizes=[1, 2], no_trials=False, fresh=True)
    assert dict(zip(run.cells["batch_size"], run.cells["status"], strict=True)) == {1: "ok", 2: "failed"}
    assert run.document.finished
    assert any("AttributeError: no attribute 'cos'" in warning for warning in run.document.warnings)
    assert tried.called, "a change was tried and then skipped"
    missing = {part.what: part.why for part in run.document.missing}
    assert missing.pop("the second measurement of the ceilings") == "KeyError: 'what nobody foresaw'"
    assert missing.pop("report.html") == "OSError: [Errno 28] No space left on device"
    assert missing.pop("the CPU overhead") == "AttributeError: no attribute 'cos'"
    assert all(what.startswith("trying ") for what in missing)
    assert {part.sentence for part in run.document.missing} < set(run.document.warnings)
