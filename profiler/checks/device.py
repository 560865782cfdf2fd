"""Checks of a device, by small pieces of work on it: its memory, libraries, kernels and products. Each gives one line.

Every check leaves the device's state as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import util

import torch

from profiler.checks.installation import Found, compiler
from profiler.counting.attention import AttentionCore
from profiler.counting.attention_kernel import sdpa_kernel
from profiler.device.device import compute_capability
from profiler.device.machine import Machine, recorded
from profiler.device.telemetry import nvml_source
from profiler.errors import first_line
from profiler.facts.measurements import COMPILED, REPEATED_HEADS
from profiler.facts.step import UNFUSED_KERNEL
from profiler.judge.how_to import how_to
from profiler.packages import MISSING, install_command, version_of
from profiler.quant.bitsandbytes import import_bitsandbytes
from profiler.roofs.gemm import ONE_SCALE, measurable_dtypes, square_product
from profiler.units import percent, processors, scaled

_LITTLE_FREE = 0.8
"""Below this share of a GPU's memory, other processes use some of it."""
_SIDE = 64
"""Rows and columns of products: `torch._int_mm` needs over 16 rows, and `torch._scaled_mm` multiples of 16."""
_QUERY_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
"""Query heads, KV heads and head width of Mistral-7B and Llama-3.1-8B."""
_PROMPT = 512
_ONE_BY_ONE = "mixtures of experts run one expert after the other, and wait for the GPU in every layer"


def card(machine: Machine) -> Found:
    """Report the device and its datasheet, and check that it runs a kernel of this torch."""
    info = machine.info
    if not machine.is_cuda:
        return None, f"the CPU: {info.name}, {processors(info.threads, info.kind)}, {info.compute_capability}"
    words = f"{info.name}, {info.threads} SMs, compute capability {info.compute_capability}"
    if len(machine.links) > 1:
        words += f", one of {len(machine.links)}"
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
    if machine.is_cuda and free < _LITTLE_FREE * total:
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


def cupti(machine: Machine) -> Found:
    """Check that torch's profiler sees the GPU's kernels."""
    if not machine.is_cuda:
        return None, "no GPU"
    x = torch.zeros(1, device=machine.device)
    with recorded(cuda=True) as profile:
        x.add_(1)
        machine.clock.synchronize()
    if not any(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()):
        return False, "sees no kernel: --breakdown and --trace show only modules"
    return True, "sees the GPU's kernels"


def bitsandbytes(machine: Machine) -> Found:
    """Check that bitsandbytes packs and unpacks 4-bit weights on the device."""
    version = version_of("bitsandbytes")
    if version == MISSING:
        return False, f"missing, needed for --quant int8, nf4 and fp4: {install_command('bitsandbytes')}"
    try:
        functional = import_bitsandbytes()
    except Exception as error:
        return False, f"{version} does not import: {first_line(error)}; no --quant int8, nf4 and fp4"
    try:
        packed, state = functional.quantize_4bit(torch.ones(64, 64, device=machine.device), quant_type="nf4")
        functional.dequantize_4bit(packed, state)[0, 0].item()
    except Exception as error:
        return False, f"{version} fails on this device: {first_line(error)}; no --quant nf4 and fp4"
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
    if x.item() != 1:
        return False, "a captured graph does nothing when it is replayed"
    return True, "captured and replayed"


def attention(machine: Machine) -> Found:
    """Report the kernels of `scaled_dot_product_attention` in prefill and decode, with and without a mask."""
    plain, masked = (
        [_kernel(machine, query=query, masked=with_mask) for query in (_PROMPT, 1)] for with_mask in (False, True)
    )
    words = f"kernel {_phases(plain)}" + (f"; with a mask {_phases(masked)}" if plain != masked else "")
    if UNFUSED_KERNEL not in (*plain, *masked):
        return True, words
    words += f"; {UNFUSED_KERNEL} copies K and V for every head and writes its scores to memory"
    if plain[1] == UNFUSED_KERNEL != masked[1]:
        ways = " or, in decode, ".join(how_to(change, on_gpu=True).line for change in (REPEATED_HEADS, COMPILED))
        words += f"; avoid it by {ways}"
    elif UNFUSED_KERNEL in masked:
        words += ": a newer torch may have a kernel for this GPU"
    return True, words, True


def _kernel(machine: Machine, *, query: int, masked: bool) -> str:
    """Return the kernel of a grouped attention with `query` new tokens in 16 bits."""
    dtype = getattr(torch, machine.info.sixteen_bit_dtype)
    core = AttentionCore("core", dtype, _QUERY_HEADS, _KV_HEADS, _HEAD_DIM, _HEAD_DIM)
    return sdpa_kernel(core, machine.device, dtype, query=query, keys=_PROMPT, masked=masked)


def _phases(kernels: Sequence[str]) -> str:
    """Return text such as `flash` or `math in prefill, flash in decode`."""
    prefill, decode = kernels
    return prefill if prefill == decode else f"{prefill} in prefill, {decode} in decode"


def products(machine: Machine) -> Found:
    """Check that the GPU multiplies in each dtype for which it has units, as the roofs and `--quant` do."""
    dtypes, failed = measurable_dtypes(machine.device), list[str]()
    for dtype in dtypes:
        try:
            call, method = square_product(machine.device, dtype, _SIDE)
            call()
        except Exception as error:
            failed.append(f"{dtype} has no roof here: {first_line(error)}")
        else:
            failed += [f"no --quant fp8 here, use int8wo: {dtype} has {ONE_SCALE}"] if ONE_SCALE in method else []
    return not failed, "; ".join(failed) or f"multiplies in {', '.join(dtypes)}"


def grouped_products(machine: Machine) -> Found:
    """Check the product of mixtures of experts, here two experts with half of the rows each."""
    left = torch.ones(_SIDE, _SIDE, device=machine.device, dtype=torch.bfloat16)
    ends = torch.arange(_SIDE // 2, _SIDE + 1, _SIDE // 2, device=machine.device, dtype=torch.int32)
    call = partial(torch._grouped_mm, left, torch.stack([left, left]), offs=ends)
    try:
        call()
    except Exception as error:
        is_old = compute_capability(machine.device) < (8, 0)
        return None if is_old else False, f"{first_line(error)}; {_ONE_BY_ONE}"
    if machine.waits(call):  # without a kernel for the GPU, `_grouped_mm` reads the groups' ends (GroupedMMUtils.h)
        return True, "waits for the GPU in every call: no --engine graph for mixtures of experts", True
    return True, "mixtures of experts run all experts in one call"
