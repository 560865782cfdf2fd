"""The commands that run a model: run and batch-test."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from profiler.cli.options import EXIT_INCOMPLETE, EXIT_INTERRUPTED, Format, Plain, Quiet, asks
from profiler.cli.ranks import start_ranks, started_by_torchrun
from profiler.errors import RankError, RequestError
from profiler.run.options import Options

if TYPE_CHECKING:
    from profiler.device.process_group import ProcessGroup
    from profiler.run.stages import Listener
    from profiler.store.folder import Run


@asks()
def run(
    *,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Finish an interrupted run.")] = None,
    quiet: Quiet = False,
    plain: Plain = False,
    output_format: Format = "table",
    **run_options: Any,
) -> None:
    """Profile a model, and report what limits prefill and decode.

    Measures the roofs of the device, and every combination of prompt length and batch size.
    """
    start_s = time.time()
    options = Options(**run_options)
    from profiler.report.progress import make_listener

    group = None
    if options.tp != 1 or started_by_torchrun():
        group = _group_of(options, resume)
        if group is None:
            return
    listener = make_listener(quiet=quiet, plain=plain)
    with listener:
        from profiler.run.pipeline import execute
        from profiler.run.validate import prepare, prepare_resume

        precisions = [name.strip() for name in options.quant.split(",") if name.strip()]
        if len(precisions) > 1:
            if resume is not None:
                raise RequestError("--resume finishes one run; pass the folder of one precision, and no --quant.")
            _refuse_gaps(_run_precisions(options, precisions, listener, output_format, plain))
            return
        devices = [name.strip() for name in options.device.split(",") if name.strip()]
        if len(devices) > 1:
            if resume is not None or group is not None:
                raise RequestError("--device with several devices runs one after the other; omit --resume and --tp.")
            _refuse_gaps(_run_devices(options, devices, listener, output_format, plain))
            return
        prepared = prepare(options) if resume is None else prepare_resume(resume, options)
        try:
            result = execute(prepared, listener, group=group, spent_s=max(0.0, time.time() - start_s))
        except RankError as error:
            listener.close()
            raise RankError(f"{error}; the measurements are in {prepared.out}.") from error
        except KeyboardInterrupt:
            listener.close()
            words = f"interrupted; the measurements are in {prepared.out}, and --resume {prepared.out} finishes the run"
            print(words, file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if output_format == "json":
        print(json.dumps(run_json(result), indent=2))
    else:
        from profiler.report.console import screen
        from profiler.report.sections import print_run

        print_run(result, screen(plain=plain))
    _refuse_gaps([result])


def _refuse_gaps(runs: Sequence[Run]) -> None:
    """Exit with `EXIT_INCOMPLETE` if one of the runs has a cell without a number or a part that failed."""
    if any(run.document.missing or any(math.isnan(row.latency_s) for row in run.results) for run in runs):
        raise typer.Exit(EXIT_INCOMPLETE)


def _group_of(options: Options, resume: Path | None) -> ProcessGroup | None:
    """Return the process group that this process leads, or None if the run is finished.

    It is finished if this process started the ranks, or followed as one of them. Raises RequestError for options that
    do not work with tensor parallelism.
    """
    from profiler.device.machine import machine_for
    from profiler.device.process_group import ProcessGroup
    from profiler.run.validate import prepare, prepare_resume

    prepared = prepare(options) if resume is None else prepare_resume(resume, options)
    if start_ranks(options.tp):
        return None
    group = ProcessGroup(prepared.request.device.type)
    if group.size != options.tp:
        raise RequestError(f"torchrun started {group.size} processes; use --tp {group.size}.")
    if group.rank == 0:
        return group
    from profiler.run.tensor_parallel import follow_rank

    follow_rank(prepared, group, machine_for(group.device))
    return None


def _run_devices(
    options: Options, devices: list[str], listener: Listener, output_format: str, plain: bool
) -> list[Run]:
    from dataclasses import asdict

    from profiler.run.multi_run import device_healths, run_devices

    runs = run_devices(options, devices, listener)
    healths = device_healths(runs, devices)
    if output_format == "json":
        rows = [{**asdict(item), "ill": item.ill} for item in healths]
        print(json.dumps({"devices": rows, "runs": [run_json(run) for run in runs]}, indent=2))
        return runs
    from profiler.report.console import screen
    from profiler.report.device import health_lines
    from profiler.report.sections import print_run

    console = screen(plain=plain)
    for run in runs:
        print_run(run, console)
    console.print()
    for line in health_lines(healths):
        console.print(line, highlight=False, style="bold")
    return runs


def _run_precisions(
    options: Options, precisions: list[str], listener: Listener, output_format: str, plain: bool
) -> list[Run]:
    from profiler.run.multi_run import run_precisions

    runs = run_precisions(options, precisions, listener)
    if output_format == "json":
        print(json.dumps([run_json(run) for run in runs], indent=2))
        return runs
    from profiler.report.console import screen
    from profiler.run.precisions import print_comparison

    print_comparison(runs, screen(plain=plain))
    return runs


@asks(
    "model", "new_tokens", "dtype", "quant", "weights", "engine", "device", "out", "budget_s",
    defaults={"new_tokens": 16, "budget_s": 60.0},
)  # fmt: skip
def batch_test(
    *,
    phase: Annotated[str, typer.Option(help="prefill or decode.")] = "decode",
    prompt: Annotated[int, typer.Option(help="Prompt tokens.")] = 128,
    context: Annotated[int, typer.Option(help="Instead of a prompt: tokens in the KV cache of a decode.")] = 0,
    quiet: Quiet = False,
    plain: Plain = False,
    output_format: Format = "table",
    **run_options: Any,
) -> None:
    """Double the batch until memory, throughput or budget ends it.

    Compares the measured slopes with those that bytes and FLOPs predict.
    """
    prompt_lens, context_lens = ([], [context]) if context else ([prompt], [])
    options = Options(prompt_lens=prompt_lens, context_lens=context_lens, **run_options)
    from profiler.report.progress import make_listener

    with make_listener(quiet=quiet, plain=plain) as listener:
        from profiler.run.batch_test import prepare_batch_test
        from profiler.run.pipeline import execute

        listener.stage("choosing batches: roofs, counts, memory and budget")
        prepared = prepare_batch_test(options, phase)
        for warning in prepared.warnings:
            listener.stage(warning)
        result = execute(prepared, listener)
    if output_format == "json":
        print(json.dumps(run_json(result), indent=2))
    else:
        from profiler.report.console import screen
        from profiler.run.batch_test_screen import print_doubling

        print_doubling(result, "prefill" if phase == "prefill" else "decode", screen(plain=plain))
    _refuse_gaps([result])


def run_json(run: Run) -> dict[str, object]:
    """Return the JSON document of a run: run.json, its folder, and the rows of cells.csv."""
    from profiler.store.document import document_json

    cells = json.loads(run.cells.to_json(orient="records", double_precision=15))
    return {**json.loads(document_json(run.document)), "folder": str(run.folder), "cells": cells}
