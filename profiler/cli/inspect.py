"""The commands that run no model: doctor, ceilings, gpus, models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from profiler.cli.options import OnDevice, Output, asks
from profiler.cli.run import group_of
from profiler.errors import RequestError
from profiler.options import argument, option


@dataclass(frozen=True)
class OfLink:
    """The link that `ceilings` measures in place of the roofs."""

    link_ranks: int = option(0, "Measure all-reduces between so many ranks instead, one per GPU.", flag="link")

    def __post_init__(self) -> None:
        if self.link_ranks and self.link_ranks < 2:
            raise RequestError(f"--link {self.link_ranks}: a link has at least 2 ranks.")


@asks()
def ceilings(on: OnDevice, between: OfLink, output: Output) -> None:
    """Measure the roofs of this device.

    Measures matmuls in every dtype, memory bandwidth over sizes, links and launches. With --link, measures latency and
    bandwidth between ranks (NCCL on GPUs, gloo on a CPU); starts torchrun if needed.
    """
    if between.link_ranks:
        _ceilings_of_link(on.device, between.link_ranks, output)
        return
    from profiler.device.contention import ForeignLoad
    from profiler.device.device import resolve_device
    from profiler.device.machine import machine_for
    from profiler.judge.warnings import health_warnings
    from profiler.report.device import ceilings_document, ceilings_section
    from profiler.roofs.bandwidth import measure_links
    from profiler.roofs.gemm import measurable_dtypes
    from profiler.roofs.measure import measure
    from profiler.run.warnings import busy_words, device_warnings, missing_roofs, roof_warnings

    machine, foreign = machine_for(resolve_device(on.device)), ForeignLoad()
    info, dtypes = machine.info, measurable_dtypes(machine.device)
    model_dtype = "bfloat16" if machine.is_cuda else "float32"
    roofs = measure(machine, dtypes, model_dtype=model_dtype).only(dtypes, model_dtype)
    links, missing = measure_links(machine.links, machine)
    roofs = replace(roofs, links=links, missing={**roofs.missing, **missing})
    sheet = info.datasheet
    peaks = {name: sheet.peak_flops_per_s(name) for name in dtypes} if sheet else {}
    sheet_per_s = {**peaks, **({"bandwidth": sheet.bandwidth_bytes_per_s} if sheet else {})}
    warnings = [
        *busy_words(info.host_threads, foreign),
        *device_warnings(info),
        *health_warnings(info.datasheet, roofs),
        *missing_roofs(roofs),
        *roof_warnings(roofs),
    ]
    output.answer(
        lambda: ceilings_document(info, roofs, sheet_per_s, warnings),
        lambda: [ceilings_section(info, roofs, sheet_per_s, warnings)],
    )


def _ceilings_of_link(device: str, ranks: int, output: Output) -> None:
    from profiler.device.device import resolve_device

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
    from profiler.report.blocks import Lines, Section
    from profiler.report.device import link_document, link_lines, link_table

    document = link_document(link)
    output.answer(lambda: document, lambda: [Section("", [link_table(document), Lines(link_lines(document))])])


@asks()
def doctor(on: OnDevice, output: Output) -> None:
    """Check this installation, and propose a first command.

    Checks driver, torch, GPU, NVML and compilers, and lists the presets that fit.
    """
    from profiler.checks.doctor import examination_section, examine

    examination = examine(on.device)
    output.answer(lambda: examination, lambda: [examination_section(examination)])


@dataclass(frozen=True)
class GpuNames:
    """The datasheets that `gpus` shows."""

    names: list[str] | None = argument("Only these, side by side.", "[GPU...]", default=None)


@asks()
def gpus(asked: GpuNames, output: Output) -> None:
    """List GPU datasheets: dense peaks, bandwidth and ridge points."""
    from profiler.data import datasheets
    from profiler.report.blocks import Section
    from profiler.report.device import gpu_columns, gpu_rows, gpus_table

    sheets = [datasheets.gpu_called(name) for name in asked.names or ()] or list(datasheets.gpus())
    table = gpu_columns if asked.names else gpus_table
    output.answer(lambda: gpu_rows(sheets), lambda: [Section("", [table(sheets)])])


@asks()
def models(output: Output) -> None:
    """List the presets, the models that roofscope knows by name."""
    from profiler.loading.source import load_preset, preset_names
    from profiler.report.blocks import Lines, Section

    presets = {name: load_preset(name) for name in preset_names()}
    lines = [
        f"{name:18} {preset.params / 1e9:7.3f} B  {preset.hub_id}{' (gated)' if preset.gated else ''}"
        for name, preset in presets.items()
    ]
    output.answer(
        lambda: {name: preset.model_dump() for name, preset in presets.items()}, lambda: [Section("", [Lines(lines)])]
    )
