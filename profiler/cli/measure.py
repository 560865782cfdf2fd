"""The commands that measure or list (run, batch-test, ceilings, doctor, gpus, models), also as ranks under torchrun."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from profiler.cli.options import EXIT_INCOMPLETE, EXIT_INTERRUPTED, LongOutput, Output, Progress, asks
from profiler.data import datasheets
from profiler.device.device import gpu_count, resolve_device
from profiler.errors import RankError, RequestError
from profiler.grid.cells import PHASES, Phase
from profiler.grid.ranges import values_of
from profiler.options import argument, check_device_name, listed, one_of, option
from profiler.report.blocks import Lines, Section, Sentences
from profiler.run.options import Options

if TYPE_CHECKING:
    from profiler.ranks.process_group import ProcessGroup
    from profiler.store.folder import Run


@asks()
def run(
    options: Options,
    progress: Progress,
    output: LongOutput,
    resume: Path | None = option(None, "Finish an interrupted run.", metavar="RUN"),
) -> None:
    """Profile a model, and report what limits prefill and decode.

    Measures the ceilings of the device, and every combination of prompt length and batch size.
    """
    start_s = time.time()
    if len(listed(options.quant)) > 1 or len(listed(options.device)) > 1:
        if resume is not None or options.tp != 1:
            raise RequestError("several precisions or devices are runs one after the other; omit --resume and --tp.")
        _run_several(options, progress, output)
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
    try:
        with progress.listener(output) as listener:
            spent_s = max(0.0, time.time() - start_s)
            if group is None:
                from profiler.run.pipeline import execute

                measured = execute(prepared, listener, spent_s=spent_s)
            else:
                from profiler.ranks.run import execute_ranks

                measured = execute_ranks(prepared, listener, group, spent_s=spent_s)
    except RankError as error:
        raise RankError(f"{error}; the measurements are in {prepared.out}.") from error
    except KeyboardInterrupt:
        kept = f"the measurements are in {prepared.out}, and --resume {prepared.out} finishes the run"
        print(f"interrupted; {kept}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    from profiler.report.sections import run_sections

    whole_by = f"roofscope judge {measured.folder} --full"  # measures nothing again
    output.answer(lambda: run_json(measured), lambda: run_sections(measured), whole_by)
    _refuse_gaps([measured])


def _refuse_gaps(runs: Sequence[Run]) -> None:
    """Exit with `EXIT_INCOMPLETE` if one of the runs has a cell without a number or a part that failed."""
    if any(run.document.failed or any(math.isnan(row.latency_s) for row in run.results) for run in runs):
        raise typer.Exit(EXIT_INCOMPLETE)


def started_by_torchrun() -> bool:
    """Return whether torchrun started this process, like torch's `is_torchelastic_launched`, but without torch."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def group_of(option: str, ranks: int, device_type: str) -> ProcessGroup | None:
    """Return this process's group if torchrun started it; else start torchrun with this command line, and return None.

    Raises RequestError for more ranks than GPUs, RankError if a signal ended a rank. Exits with the code of the rank
    that failed first.
    """

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


def _run_several(options: Options, progress: Progress, output: LongOutput) -> None:
    precisions, devices = listed(options.quant), listed(options.device)
    with progress.listener(output) as listener:
        from profiler.run.pipeline import device_healths, run_devices, run_precisions

        if len(precisions) > 1:
            runs = run_precisions(options, precisions, listener)
        else:
            runs = run_devices(options, devices, listener)
    documents = [run_json(run) for run in runs]
    if len(precisions) > 1:
        from profiler.run.screens import comparison_sections, page_of_several

        output.answer(lambda: documents, lambda: comparison_sections(runs), f"open {page_of_several(runs)}")
    else:
        from profiler.report.device import health_lines
        from profiler.report.sections import run_sections

        healths = device_healths(runs, devices)
        rows = [{**asdict(item), "ill": item.ill} for item in healths]
        first = Section("", [Sentences(health_lines(healths))])
        output.answer(
            lambda: {"devices": rows, "runs": documents},
            lambda: [first, *(section for run in runs for section in run_sections(run))],
            " && ".join(f"roofscope judge {run.folder} --full" for run in runs),
        )
    _refuse_gaps(runs)


@asks(only=("model", "new_tokens", "dtype", "quant", "weights", "engine", "device", "out", "budget_s"), budget_s=60.0)
def batch_test(
    *,
    options: Options,
    phase: str = option("decode", "prefill or decode."),
    prompt: int | None = option(None, "Prompt tokens.", shown="128, or fewer where time is short"),
    context: int = option(0, "Instead of a prompt: tokens in the KV cache of a decode."),
    progress: Progress,
    output: Output,
) -> None:
    """Double the batch until memory, throughput or budget ends it.

    Compares the measured slopes with those that bytes and FLOPs predict.
    """
    one_of(phase, "--phase", PHASES)
    for tokens, flag in ((prompt, "--prompt"), (context, "--context")):
        if tokens:
            values_of([tokens], flag)
    doubled: Phase = "prefill" if phase == "prefill" else "decode"
    with progress.listener(output) as listener:
        from profiler.run import pipeline, validate

        prepared = validate.prepare_batch_test(options, doubled, prompt, context)
        result = pipeline.execute(prepared, listener)
    from profiler.run.screens import doubling_sections

    output.answer(lambda: run_json(result), lambda: doubling_sections(result, doubled))
    _refuse_gaps([result])


@asks()
def ceilings(
    *,
    device: str = option("auto", "auto, cpu, cuda or cuda:N."),
    link_ranks: int = option(0, "Measure all-reduces between so many ranks instead, one per GPU.", flag="link"),
    output: Output,
) -> None:
    """Measure the ceilings of this device.

    Measures matmuls in every dtype, memory bandwidth over sizes, links and launches. With --link, measures latency and
    bandwidth between ranks (NCCL on GPUs, gloo on a CPU); starts torchrun if needed.
    """
    check_device_name(device)
    if link_ranks:
        _ceilings_of_link(device, link_ranks, output)
        return
    from profiler.device.contention import ForeignLoad
    from profiler.device.machine import machine_for
    from profiler.judge.warnings import health_warnings
    from profiler.report.device import ceilings_document, ceilings_section
    from profiler.roofs import bandwidth, gemm, measure
    from profiler.run.warnings import busy_words, ceiling_warnings, device_warnings

    machine, foreign = machine_for(resolve_device(device)), ForeignLoad()
    info, dtypes = machine.info, gemm.measurable_dtypes(machine.device)
    model_dtype = "bfloat16" if machine.is_cuda else "float32"
    ceilings = measure.measure(machine, dtypes, model_dtype=model_dtype).only(dtypes, model_dtype)
    links, missing = bandwidth.measure_links(machine.links, machine)
    ceilings = replace(ceilings, links=links, missing={**ceilings.missing, **missing})
    sheet = info.datasheet
    peaks = {name: sheet.peak_flops_per_s(name) for name in dtypes} if sheet else {}
    sheet_per_s = peaks | ({"bandwidth": sheet.bandwidth_bytes_per_s} if sheet else {})
    warnings = [
        *busy_words(info.host_threads, foreign),
        *device_warnings(info),
        *health_warnings(info.datasheet, ceilings),
        *(f"{name} could not be measured: {why.rstrip('.')}." for name, why in ceilings.missing.items()),
        *ceiling_warnings(ceilings),
    ]
    output.answer(
        lambda: ceilings_document(info, ceilings, sheet_per_s, warnings),
        lambda: [ceilings_section(info, ceilings, sheet_per_s, warnings)],
    )


def _ceilings_of_link(device: str, ranks: int, output: Output) -> None:
    if ranks < 2:
        raise RequestError(f"--link {ranks}: a link has at least 2 ranks.")
    group = group_of("--link", ranks, resolve_device(device).type)
    if group is None:
        return
    import torch.distributed as dist

    from profiler.device.machine import machine_for

    group.share_cores()
    link = group.measure_link(machine_for(group.device))
    dist.destroy_process_group()
    if group.rank:
        return
    from profiler.report.device import link_document, link_lines, link_table

    document = link_document(link)
    output.answer(lambda: document, lambda: [Section("", [link_table(document), Lines(link_lines(document))])])


@asks()
def doctor(*, device: str = option("auto", "auto, cpu, cuda or cuda:N."), output: Output) -> None:
    """Check this installation, and propose a first command.

    Checks driver, torch, GPU, NVML and compilers, and lists the presets that fit.
    """
    check_device_name(device)
    from profiler.checks.doctor import examination_section, examine

    examination = examine(device)
    output.answer(lambda: examination, lambda: [examination_section(examination)])


@asks()
def gpus(output: Output, names: list[str] | None = argument("Only these, side by side.", "GPU", default=None)) -> None:
    """List GPU datasheets: dense peaks, bandwidth and ridge points."""
    from profiler.report.device import gpu_columns, gpu_rows, gpus_table

    sheets = [datasheets.gpu_called(name) for name in names or ()] or list(datasheets.gpus())
    table = gpu_columns if names else gpus_table
    output.answer(lambda: gpu_rows(sheets), lambda: [Section("", [table(sheets)])])


@asks()
def models(output: Output) -> None:
    """List the presets, the models that roofscope knows by name."""
    from profiler.loading.source import presets

    lines = [
        f"{name:18} {preset.params / 1e9:7.3f} B  {preset.hub_id}{' (gated)' if preset.gated else ''}"
        for name, preset in presets().items()
    ]
    document = {name: preset.model_dump() for name, preset in presets().items()}
    output.answer(lambda: document, lambda: [Section("", [Lines(lines)])])


def run_json(run: Run) -> dict[str, object]:
    """Return the JSON document of a run: run.json, its folder, and the rows of cells.csv."""
    from profiler.store.document import document_json

    cells = json.loads(run.cells.to_json(orient="records", double_precision=15))
    return {**json.loads(document_json(run.document)), "folder": str(run.folder), "cells": cells}
