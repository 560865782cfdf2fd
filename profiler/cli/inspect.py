"""The commands that run no model: doctor, ceilings, gpus, selftest, models."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profiler.cli.options import EXIT_INCOMPLETE, EXIT_WRONG, Format, Plain
from profiler.cli.ranks import start_ranks
from profiler.errors import RequestError

if TYPE_CHECKING:
    from profiler.device.device import Device
    from profiler.facts.roofs import Ceilings


def ceilings(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write a GPU profile: one more minute, three if busy.")] = None,
    out_dtypes: Annotated[str, typer.Option(help="--out: the dtypes of the profile.")] = "float32,bfloat16",
    link_ranks: Annotated[
        int, typer.Option("--link", help="Measure all-reduces between so many ranks instead, one per GPU.")
    ] = 0,
    plot: Annotated[Path | None, typer.Option(help="--link: draw it, as PNG or SVG.")] = None,
    output_format: Format = "table",
) -> None:
    """Measure the roofs of this device.

    Measures matmuls in every dtype, memory bandwidth over sizes, links and launches. With --link, measures latency and
    bandwidth between ranks (NCCL on GPUs, gloo on a CPU); starts torchrun if needed.
    """
    if link_ranks or plot:
        _ceilings_of_link(device, link_ranks, plot, output_format, with_profile=out is not None)
        return
    from dataclasses import replace

    from profiler.device.contention import ForeignLoad
    from profiler.device.device import resolve_device
    from profiler.device.machine import machine_for
    from profiler.gpu_profile.measure import profiled_dtypes, write_profile
    from profiler.json_document import json_text
    from profiler.loading.meta_model import quiet_libraries
    from profiler.report.device import ceilings_document
    from profiler.roofs.gemm import measurable_dtypes
    from profiler.roofs.host_dispatch import measure_host_pace
    from profiler.roofs.links import measure_links
    from profiler.roofs.measure import measure
    from profiler.roofs.sampler import attempt
    from profiler.run.warnings import device_warnings, health_warnings, missing_roofs, roof_warnings

    names = profiled_dtypes(out_dtypes, out) if out is not None else []
    machine, foreign = machine_for(resolve_device(device)), ForeignLoad()
    info, dtypes = machine.info, measurable_dtypes(machine.device)
    model_dtype = "bfloat16" if machine.is_cuda else "float32"
    roofs = measure(machine, dtypes, model_dtype=model_dtype).only(dtypes, model_dtype)
    links, missing = measure_links(machine.links, machine)
    host = None
    with quiet_libraries(), attempt("the host's pace", machine, missing):
        host = measure_host_pace(machine)
    roofs = replace(roofs, links=links, host=host, missing={**roofs.missing, **missing})
    profile_warnings = write_profile(machine, roofs, names, out) if out is not None else []
    sheet = info.datasheet
    peaks = {name: sheet.peak_flops_per_s(name) for name in dtypes} if sheet else {}
    sheet_per_s = {**peaks, **({"bandwidth": sheet.bandwidth_bytes_per_s} if sheet else {})}
    warnings = [
        *device_warnings(info, foreign),
        *health_warnings(info, roofs),
        *missing_roofs(roofs),
        *roof_warnings(roofs),
        *profile_warnings,
    ]
    if output_format == "json":
        print(json_text(ceilings_document(info, roofs, sheet_per_s, warnings)))
        return
    _print_ceilings(info, roofs, sheet_per_s, warnings)


def _print_ceilings(
    info: Device, roofs: Ceilings, sheet_per_s: Mapping[str, float | None], warnings: Sequence[str]
) -> None:
    from rich.console import Console

    from profiler.report.hardware import ceilings_table, host_words
    from profiler.report.terminal import rich_table
    from profiler.units import processors, scaled

    console = Console(width=100, markup=False, emoji=False)
    console.print(f"{info.name}, {processors(info.threads, info.kind)}", highlight=False)
    for warning in warnings:
        console.print(f"warning: {warning}", highlight=False)
    console.print(rich_table(ceilings_table(roofs, sheet_per_s)))
    curve = ", ".join(f"{point.nbytes >> 20} MiB {scaled(point.bytes_per_s, 'B/s')}" for point in roofs.curve)
    console.print(f"repeated reads: {curve}", highlight=False)
    for name, link in roofs.links.items():
        console.print(f"from {name}: {scaled(link.per_s, 'B/s')}", highlight=False)
    if roofs.host:
        console.print(host_words(roofs.host), highlight=False)


def _ceilings_of_link(device: str, ranks: int, plot: Path | None, output_format: str, *, with_profile: bool) -> None:
    from profiler.device.device import resolve_device
    from profiler.device.process_group import cards

    if ranks < 2:
        raise RequestError(f"--link {ranks}: a link has at least 2 ranks.")
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise RequestError(f"--plot {plot}: the name must end in .png or .svg.")
    if with_profile:
        raise RequestError("--link measures the link only; write the profile (--out) with a command of its own.")
    kind = resolve_device(device).type
    if kind == "cuda" and ranks > cards():
        raise RequestError(f"--link {ranks}: this machine has {cards()} GPUs; use at most that many, or --device cpu.")
    if start_ranks(ranks):
        return
    from profiler.device.machine import machine_for
    from profiler.device.process_group import ProcessGroup
    from profiler.roofs.links import measure_collective

    group = ProcessGroup(kind)
    if group.size != ranks:
        raise RequestError(f"torchrun started {group.size} processes; use --link {group.size}.")
    group.share_cores()
    link = measure_collective(group, machine_for(group.device))
    group.close()
    if group.rank:
        return
    if plot is not None:
        from profiler.report.plots import save_figure
        from profiler.report.plots.link import link_figure
        from profiler.report.plots.style import styled

        with styled():
            figure = link_figure(link)
        save_figure(figure, plot)
    from profiler.json_document import json_text
    from profiler.report.link import link_document, link_lines, link_table

    document = link_document(link)
    if output_format == "json":
        print(json_text(document))
        return
    from rich.console import Console

    from profiler.report.terminal import rich_table

    console = Console(width=100, markup=False, emoji=False)
    console.print(rich_table(link_table(document)))
    for line in link_lines(document):
        console.print(line, highlight=False)


def doctor(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    plain: Plain = False,
    output_format: Format = "table",
) -> None:
    """Check this installation, and propose a first command.

    Checks driver, torch, GPU, NVML and compilers, and lists the presets that fit.
    """
    from profiler.checks.doctor import examine
    from profiler.json_document import json_text

    examination = examine(device)
    if output_format == "json":
        print(json_text(examination))
        return
    from profiler.checks.render import findings_table
    from profiler.report.console import screen
    from profiler.report.terminal import rich_table

    console = screen(plain=plain)
    console.print(rich_table(findings_table(examination.findings)), highlight=False)
    console.print(f"run first: {examination.first}", highlight=False)


def gpus_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="[GPU...]", help="Only these, side by side.")] = None,
    output_format: Format = "table",
) -> None:
    """List GPU datasheets: dense peaks, bandwidth and ridge points."""
    from profiler.data.datasheets import gpu_called, gpus
    from profiler.json_document import json_text

    sheets = [gpu_called(name) for name in names or ()] or list(gpus())
    if output_format == "json":
        from profiler.report.device import gpu_rows

        print(json_text(gpu_rows(sheets)))
        return
    from rich.console import Console

    from profiler.report.device import gpu_columns, gpus_table
    from profiler.report.terminal import rich_table

    console = Console(width=118, markup=False, emoji=False)
    if names:
        console.print(rich_table(gpu_columns(sheets)))
        return
    console.print(rich_table(gpus_table(sheets)))


def selftest(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    output_format: Format = "table",
) -> None:
    """Check the verdicts on kernels with a known label.

    Exit codes: 0 right, 1 a label is wrong, 3 a kernel is inconclusive.
    """
    from profiler.checks.render import contention_line, selftest_row
    from profiler.checks.selftest import run_selftest
    from profiler.device.contention import Neighbours
    from profiler.device.device import resolve_device
    from profiler.device.machine import machine_for
    from profiler.json_document import json_text
    from profiler.roofs.measure import measure
    from profiler.run.neighbours import host_threads

    machine, neighbours = machine_for(resolve_device(device)), Neighbours()
    results = list(run_selftest(machine, measure(machine, ["float32"], model_dtype="float32")))
    wrong, right = any(result.wrong for result in results), all(result.right for result in results)
    contention = neighbours.look()
    busy = not right and contention.disturbs(host_threads(machine.info))
    if busy:
        print(contention_line(contention, results), file=sys.stderr if output_format == "json" else sys.stdout)
    if output_format == "json":
        print(json_text([selftest_row(result) for result in results]))
    elif wrong or not busy:
        from rich.console import Console

        from profiler.checks.render import selftest_doubts, selftest_table
        from profiler.report.terminal import rich_table

        console = Console(width=100, markup=False, emoji=False)
        console.print(rich_table(selftest_table(results)))
        for line in selftest_doubts(results):
            console.print(line, highlight=False)
    if wrong:
        raise typer.Exit(EXIT_WRONG)
    if not right:
        raise typer.Exit(EXIT_INCOMPLETE)


def models(output_format: Format = "table") -> None:
    """List the presets, the models that roofscope knows by name."""
    from profiler.loading.source import load_preset, preset_names

    presets = {name: load_preset(name) for name in preset_names()}
    if output_format == "json":
        print(json.dumps({name: preset.model_dump() for name, preset in presets.items()}, indent=2))
        return
    for name, preset in presets.items():
        gated = " (gated)" if preset.gated else ""
        print(f"{name:18} {preset.params / 1e9:7.3f} B  {preset.hub_id}{gated}")
