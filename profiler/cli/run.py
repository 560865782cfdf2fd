"""The commands that run a model (run and batch-test), also as several ranks under torchrun."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from profiler.cli.options import EXIT_INCOMPLETE, EXIT_INTERRUPTED, LongOutput, Output, Progress, asks
from profiler.errors import RankError, RequestError
from profiler.grid.cells import PHASES, Phase
from profiler.grid.ranges import values_of
from profiler.options import listed, one_of, option
from profiler.run.options import Options

if TYPE_CHECKING:
    from profiler.ranks.process_group import ProcessGroup
    from profiler.report.progress import QuietListener
    from profiler.store.folder import Run


@dataclass(frozen=True)
class Resume:
    """An interrupted run."""

    resume: Path | None = option(None, "Finish an interrupted run.", metavar="RUN")


@asks()
def run(options: Options, interrupted: Resume, progress: Progress, output: LongOutput) -> None:
    """Profile a model, and report what limits prefill and decode.

    Measures the roofs of the device, and every combination of prompt length and batch size.
    """
    start_s, resume = time.time(), interrupted.resume
    precisions, devices = listed(options.quant), listed(options.device)
    if len(precisions) > 1:
        if resume is not None:
            raise RequestError("--resume finishes one run; pass the folder of one precision, and no --quant.")
        _run_precisions(options, precisions, progress, output)
        return
    if len(devices) > 1:
        if resume is not None or options.tp != 1:
            raise RequestError("--device with several devices runs one after the other; omit --resume and --tp.")
        _run_devices(options, devices, progress, output)
        return
    from profiler.run.validate import prepare, prepare_resume

    prepared = prepare(options) if resume is None else prepare_resume(resume, options)
    group: ProcessGroup | None = None
    if options.tp != 1 or started_by_torchrun():
        group = group_of("--tp", options.tp, prepared.request.device.type)
        if group is None:
            return
        if group.rank:
            from profiler.ranks.run import follow_rank

            follow_rank(prepared, group)
            return
    with progress.listener(output) as listener, _naming_what_is_kept(prepared.out, listener):
        spent_s = max(0.0, time.time() - start_s)
        if group is None:
            from profiler.run.pipeline import execute

            measured = execute(prepared, listener, spent_s=spent_s)
        else:
            from profiler.ranks.run import execute_ranks

            measured = execute_ranks(prepared, listener, group, spent_s=spent_s)
    from profiler.report.sections import run_sections

    whole_by = f"roofscope judge {measured.folder} --full"  # measures nothing again
    output.answer(lambda: run_json(measured), lambda: run_sections(measured), whole_by)
    _refuse_gaps([measured])


@contextlib.contextmanager
def _naming_what_is_kept(folder: Path, listener: QuietListener) -> Iterator[None]:
    """Context manager that names the run folder where a lost rank or Ctrl-C ends the run."""
    try:
        yield
    except RankError as error:
        raise RankError(f"{error}; the measurements are in {folder}.") from error
    except KeyboardInterrupt:
        listener.close()
        print(f"interrupted; the measurements are in {folder}, and --resume {folder} finishes the run", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _refuse_gaps(runs: Sequence[Run]) -> None:
    """Exit with `EXIT_INCOMPLETE` if one of the runs has a cell without a number or a part that failed."""
    if any(run.document.missing or any(math.isnan(row.latency_s) for row in run.results) for run in runs):
        raise typer.Exit(EXIT_INCOMPLETE)


def started_by_torchrun() -> bool:
    """Return whether torchrun started this process, like torch's `is_torchelastic_launched`, but without torch."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def group_of(option: str, ranks: int, device_type: str) -> ProcessGroup | None:
    """Return this process's group if torchrun started it; else start torchrun with this command line, and return None.

    Raises RequestError for more ranks than GPUs, RankError if a signal ended a rank. Exits with the code of the rank
    that failed first.
    """
    from profiler.device.device import gpu_count

    if device_type == "cuda" and ranks > gpu_count():
        raise RequestError(
            f"{option} {ranks}: this machine has {gpu_count()} GPUs; use at most that many, or --device cpu."
        )
    if not started_by_torchrun():
        _run_torchrun(ranks)
        return None
    from profiler.ranks.process_group import ProcessGroup

    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        raise RequestError(f"{option}: all ranks must be on one machine, whose clock they share.")
    if (started := int(os.environ["WORLD_SIZE"])) != ranks:
        raise RequestError(f"torchrun started {started} processes; use {option} {started}.")
    return ProcessGroup(device_type)


def _run_torchrun(ranks: int) -> None:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.CRITICAL)  # the ranks themselves print what there is to say
    try:
        torchrun.main(["--standalone", f"--nproc-per-node={ranks}", "-m", "profiler", *sys.argv[1:]])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            raise RankError(f"rank {rank} was ended by {failure.signal_name()}.") from None
        raise typer.Exit(failure.exitcode) from None
    except SignalException:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _run_devices(options: Options, devices: list[str], progress: Progress, output: LongOutput) -> None:
    with progress.listener(output) as listener:
        from profiler.run.multi_run import device_healths, run_devices

        runs = run_devices(options, devices, listener)
    healths = device_healths(runs, devices)

    def document() -> dict[str, object]:
        rows = [{**asdict(item), "ill": item.ill} for item in healths]
        return {"devices": rows, "runs": [run_json(run) for run in runs]}

    from profiler.report.blocks import Section, Sentences
    from profiler.report.device import health_lines
    from profiler.report.sections import run_sections

    health = Section("", [Sentences(health_lines(healths))])
    output.answer(document, lambda: [health, *(section for run in runs for section in run_sections(run))])
    _refuse_gaps(runs)


def _run_precisions(options: Options, precisions: list[str], progress: Progress, output: LongOutput) -> None:
    with progress.listener(output) as listener:
        from profiler.run.multi_run import run_precisions

        runs = run_precisions(options, precisions, listener)
    from profiler.run.screens import comparison_sections

    output.answer(
        lambda: [run_json(run) for run in runs],
        lambda: comparison_sections(runs, [str(run.folder) for run in runs]),
    )
    _refuse_gaps(runs)


@dataclass(frozen=True)
class BatchTest:
    """The steps whose batch `batch-test` doubles."""

    phase: str = option("decode", "prefill or decode.")
    prompt: int | None = option(None, "Prompt tokens.", shown="128, or fewer where time is short")
    context: int = option(0, "Instead of a prompt: tokens in the KV cache of a decode.")

    def __post_init__(self) -> None:
        one_of(self.phase, "--phase", PHASES)
        for tokens, flag in ((self.prompt, "--prompt"), (self.context, "--context")):
            if tokens:
                values_of([tokens], flag)

    @property
    def doubled(self) -> Phase:
        return "prefill" if self.phase == "prefill" else "decode"


@asks(
    only=("model", "new_tokens", "dtype", "quant", "weights", "engine", "device", "out", "budget_s"),
    budget_s=60.0,
)
def batch_test(options: Options, test: BatchTest, progress: Progress, output: Output) -> None:
    """Double the batch until memory, throughput or budget ends it.

    Compares the measured slopes with those that bytes and FLOPs predict.
    """
    with progress.listener(output) as listener:
        from profiler.run.pipeline import execute
        from profiler.run.validate import prepare_batch_test

        result = execute(prepare_batch_test(options, test.doubled, test.prompt, test.context), listener)
    from profiler.run.screens import doubling_sections

    output.answer(lambda: run_json(result), lambda: doubling_sections(result, test.doubled))
    _refuse_gaps([result])


def run_json(run: Run) -> dict[str, object]:
    """Return the JSON document of a run: run.json, its folder, and the rows of cells.csv."""
    from profiler.store.document import document_json

    cells = json.loads(run.cells.to_json(orient="records", double_precision=15))
    return {**json.loads(document_json(run.document)), "folder": str(run.folder), "cells": cells}
