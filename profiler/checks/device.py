"""Checks of a device by a little work on it. Each gives one line, and leaves the device's state as it was."""

from collections.abc import Callable
from importlib import util

import torch

from profiler.checks.installation import Found, compiler
from profiler.device.machine import Machine
from profiler.device.telemetry import nvml_source
from profiler.errors import first_line
from profiler.packages import MISSING, install_command, version_of
from profiler.quant.bitsandbytes import import_bitsandbytes
from profiler.units import percent, processors, scaled


def card(machine: Machine) -> Found:
    """Report the device and its datasheet, and check that it runs a kernel of this torch."""
    info = machine.info
    if not machine.is_cuda:
        return None, f"the CPU: {info.name}, {processors(info.threads, info.kind)}, {info.compute_capability}"
    several = f", one of {len(machine.links)}" if len(machine.links) > 1 else ""
    words = f"{info.name}, {info.threads} SMs, compute capability {info.compute_capability}{several}"
    try:
        torch.zeros(1, device=machine.device).add_(1).item()
    except RuntimeError as error:
        return False, f"{words}; cannot run a kernel: {first_line(error)}"
    if (sheet := info.datasheet) is None:
        return True, f"{words}; no datasheet"
    peak = sheet.peak_flops_per_s(sheet.sustained_dtype)
    words += f"; datasheet {sheet.gpu}: {scaled(sheet.bandwidth_bytes_per_s, 'B/s')}"
    words += f", {scaled(peak, 'FLOP/s')} in {sheet.sustained_dtype}" if peak else ""
    return True, words if sheet.peak_bf16_flops_per_s else f"{words}, no bfloat16 units"


def free_memory(machine: Machine) -> Found:
    """Report the free memory, and whether other processes use memory of the GPU."""
    free, total = machine.available_bytes(), machine.info.memory_bytes
    words = f"{scaled(free, 'B')} free of {scaled(total, 'B')}"
    if machine.is_cuda and free < 0.8 * total:
        return False, f"{words}: other processes hold {percent(1 - free / total)} of it"
    return True, words


def nvml(machine: Machine) -> Found:
    """Check that the GPU reports its clock, power and throttling."""
    if not machine.is_cuda:
        return None, "no GPU"
    try:
        source = nvml_source(machine.device)
    except ImportError:
        return False, f"missing, needed for clock, power and throttling: {install_command('nvidia-ml-py')}"
    source.read()
    source.facts()
    source.energy_j()
    exceptions = f" but {', '.join(source.missing).replace('_', ' ')}" if source.missing else ""
    return True, f"reports every figure{exceptions}"


def bitsandbytes(machine: Machine) -> Found:
    """Check that bitsandbytes packs and unpacks 4-bit weights on the device."""
    version = version_of("bitsandbytes")
    if version == MISSING:
        return False, f"missing, needed for --quant int8, nf4 and fp4: {install_command('bitsandbytes')}"
    functional = import_bitsandbytes()
    packed, state = functional.quantize_4bit(torch.ones(64, 64, device=machine.device), quant_type="nf4")
    functional.dequantize_4bit(packed, state)[0, 0].item()
    return True, f"{version}, packs and unpacks nf4 on this device"


def compiling(machine: Machine) -> Found:
    """Check torch.compile: on a GPU by running it; on a CPU, where that takes a minute, only the C++ compiler."""
    works, says = compiler()
    if not works:
        return works, says
    if not machine.is_cuda:
        return works, f"{says}; torch.compile was not tried"
    if util.find_spec("triton") is None:
        return False, "Triton is missing, needed for --engine compile on a GPU: pip install triton"
    torch.compile(lambda x: torch.relu(x) * 2 + 1)(torch.ones(64, device=machine.device))[0].item()
    return True, f"torch.compile runs on the GPU; {says}"


def graphs(machine: Machine) -> Found:
    """Check that a CUDA graph can be captured and replayed."""
    if not machine.captures:
        return None, "only on a CUDA GPU: no --engine graph here"
    x = torch.zeros(1, device=machine.device)
    with machine.on_side_stream():
        x.add_(1)
    x.zero_()
    machine.capture(lambda: x.add_(1))()
    return (True, "captured and replayed") if x.item() == 1 else (False, "a graph does nothing when it is replayed")


CHECKS: tuple[tuple[str, Callable[[Machine], Found], str], ...] = (
    ("device", card, ""),
    ("memory", free_memory, ""),
    ("NVML", nvml, "a run reports no clock, power or throttling"),
    ("bitsandbytes", bitsandbytes, "no --quant int8, nf4 and fp4"),
    ("compile", compiling, "no --engine compile"),
    ("graphs", graphs, "no --engine graph"),
)
"""Name, check, and the consequence for a run if it raises."""
