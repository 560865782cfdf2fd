"""All roofs of a device in a few seconds; what was measured before is kept unless the device has outgrown it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from profiler.machine.machine import Machine
from profiler.roofs.products import measure_gemm, measure_gemv, square_product
from profiler.roofs.sampling import STAGE_BUDGET_S, clocked, sample
from profiler.roofs.streams import measure_page_fault_s, measure_streams
from profiler.roofs.values import GEMV, Ceilings

# A short look at what was kept; faster than this it has been outgrown.
_CHECK_S = 0.3
_CHECK_BYTES = 256 << 20
_OUTGROWN = 1.05


def measure(
    machine: Machine,
    dtypes: Sequence[str],
    *,
    model_dtype: str,
    stage_budget_s: float = STAGE_BUDGET_S,
    known: Ceilings | None = None,
) -> Ceilings:
    """Measure the roofs of a machine: GEMM for each of `dtypes`, streams, and a matrix-vector product of `model_dtype`.

    What `known` holds already is kept, whatever its dtypes, unless a short look shows that the device is faster than
    that: then it was measured in a busy minute. The machine tells its clock during each probe. Data are random, because
    a product of zeros draws less power and runs faster than any real one (Horace He, "Strangely, Matrix Multiplications
    on GPUs Run Faster When Given 'Predictable' Data!", 2024).
    """
    start_s = machine.now_s()
    if known is not None and _outgrown(known, machine):
        known = None
    roofs = known or measure_streams(machine, stage_budget_s)
    if not machine.is_cuda and not roofs.page_fault_s:
        roofs = replace(roofs, page_fault_s=measure_page_fault_s(machine))
    memory, compute = dict(roofs.memory), dict(roofs.compute)
    if model_dtype != "int8" and f"{GEMV} {model_dtype}" not in memory:
        probe = partial(measure_gemv, machine, model_dtype, roofs.stream_bytes, stage_budget_s)
        memory[f"{GEMV} {model_dtype}"] = clocked(probe, machine)
    for dtype in dtypes:
        if dtype not in compute:
            compute[dtype] = clocked(partial(measure_gemm, machine, dtype, stage_budget_s), machine)
    measured_s = roofs.measured_s + machine.now_s() - start_s
    return replace(roofs, compute=compute, memory=memory, measured_s=measured_s)


def _outgrown(known: Ceilings, machine: Machine) -> bool:
    """Whether the device is clearly faster now than the roofs that were kept: they are no roofs then."""
    elements = min(known.stream_bytes, _CHECK_BYTES) // 4
    data = torch.rand(elements, device=machine.device)
    read = 4 * elements / statistics.median(sample(data.sum, machine, _CHECK_S))
    if read > _OUTGROWN * known.memory_bytes_per_s:
        return True
    for dtype, roof in known.compute.items():
        if dtype == "float32":
            size = int(roof.method.split("x")[0])
            product = square_product(machine.device, dtype, size)
            return 2.0 * size**3 / statistics.median(sample(product, machine, _CHECK_S)) > _OUTGROWN * roof.per_s
    return False
